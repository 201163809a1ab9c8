"""Many requests at once: what each would say alone, whatever runs beside it."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import (
    Engine,
    EngineConfig,
    GenerationConfig,
    Request,
    RequestsConfig,
    generate,
)
from bmforge.infer.engine import Completion, native_step
from bmforge.infer.engine.native_step import load_step
from bmforge.infer.engine.packed_step import PackedStep
from bmforge.models import (
    GPT2,
    OPT,
    T5,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    OPTConfig,
    Qwen,
    QwenConfig,
    T5Config,
)
from bmforge.models.cpm_ant import CPMAnt, CPMAntConfig
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.models.pack import quantize_
from bmforge.testing.character_tokenizer import BEE_MARKS
from bmforge.tokenizers import CPMAntTokenizer, CPMBeeTokenizer

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "num_heads": 4, "num_layers": 2}
GROUPED: dict[str, Any] = {**SIZES, "intermediate_size": 96, "num_kv_heads": 2}
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(1, 96, (length,), generator=GENERATOR).tolist()
    for length in (1, 7, 40, 16, 33, 70, 3, 20)
]
NEW = 9


def make(kind: str, **more: Any) -> Any:
    made: Any
    if kind == "gpt2":
        made = GPT2.from_config(GPT2Config(**SIZES, max_seq_len=128), seed=1)
    elif kind == "opt":
        config = OPTConfig(**SIZES, intermediate_size=96, embed_size=32, max_seq_len=128)
        made = OPT.from_config(config, seed=1)
    elif kind == "window":
        windows: dict[str, Any] = {"window": 9, "window_layers": [1]}
        made = Qwen.from_config(QwenConfig(**GROUPED, **windows), seed=1)
    elif kind == "mixtral":
        experts = {"num_experts": 4, "experts_per_token": 2}
        made = Mixtral.from_config(MixtralConfig(**GROUPED, **experts), seed=1)
    elif kind == "t5":
        made = T5.from_config(T5Config(**SIZES, intermediate_size=96), seed=1)
    elif kind == "dynamic":
        scaling = {"kind": "dynamic", "factor": 2.0}
        made = Llama.from_config(
            LlamaConfig(**GROUPED, rope_scaling=scaling, max_seq_len=32), seed=1
        )
    else:
        made = Llama.from_config(LlamaConfig(**{**GROUPED, **more}), seed=1)
    for name, parameter in made.named_parameters():  # so that tokens differ from each other
        if name.endswith("proj.weight") or "embed" in name:
            parameter.data.mul_(4)
    return made.eval()


def opened(model: Any, **requests: Any) -> Engine:
    config = EngineConfig(max_tokens=128, requests=RequestsConfig(**requests))
    return Engine(model, config=config)


def greedy(**options: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": NEW, "eos_token_id": (), "logprobs": 3, **options})


def drawn(seed: int, **options: Any) -> GenerationConfig:
    return greedy(do_sample=True, temperature=0.9, top_p=0.9, seed=seed, **options)


def ask(engine: Engine, requests: Sequence[Request]) -> list[list[Completion]]:
    handles = [engine.submit(request) for request in requests]
    return [handle.wait(60) for handle in handles]


def say(completions: list[Completion]) -> list[Any]:
    """What must be the same bits: tokens, and how likely each was and its neighbours were."""
    return [(c.ids, c.logprobs, c.finish_reason, c.text) for c in completions]


def alone(model: Any, prompt: Sequence[int], **options: Any) -> torch.Tensor:
    """What `generate` writes; no id of a prompt is padding."""
    ids = torch.tensor([prompt])
    return generate(model, ids, torch.ones_like(ids), **options)


LONG_SCHEMES = ("int4", "bf16", "fp16")
ALL = ["llama", "gpt2", "opt", "window", "mixtral", "dynamic"]


@pytest.mark.parametrize("kind", [*ALL, "t5"])
def test_answers_are_those_of_generate(kind: str) -> None:
    """Greedily, of every kind of model, all at once."""
    model = make(kind)
    with opened(model) as engine:
        found = ask(engine, [Request(prompt, greedy()) for prompt in PROMPTS])
    for prompt, (answer,) in zip(PROMPTS, found, strict=True):
        want = alone(model, prompt, max_new_tokens=NEW, eos_token_id=())
        assert list(answer.ids) == want[0, -NEW:].tolist(), len(prompt)
        assert answer.finish_reason == "length"
        assert answer.prompt_tokens == len(prompt)


def beside(kind: str) -> list[Request]:
    """Requests of which some are greedy, some draw, one several times."""
    found = [Request(prompt, greedy()) for prompt in PROMPTS]
    found += [Request(prompt, drawn(seed)) for seed, prompt in enumerate(PROMPTS)]
    found += [Request(PROMPTS[4], drawn(3, num_return_sequences=3))]
    return found


@pytest.mark.parametrize(
    "scheme", ["", "int8", *(pytest.param(s, marks=pytest.mark.long) for s in LONG_SCHEMES)]
)
@pytest.mark.parametrize("kind", ALL)
def test_the_same_bits_beside_others(kind: str, scheme: str) -> None:
    """Alone, among all others, in steps of few tokens, with few pages, and behind a prefix."""
    model = make(kind)
    if scheme in ("int8", "int4"):
        quantize_(model, scheme)
    elif scheme:
        model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[scheme])
    requests = beside(kind)
    with opened(model, enable_prefix_caching=False) as engine:
        singly = [say(engine.submit(request).wait(60)) for request in requests]
    settings = [
        {},
        {"max_num_batched_tokens": 19, "enable_prefix_caching": False},
        {"max_num_seqs": 5, "max_num_batched_tokens": 7},
        {"total_tokens": 160, "enable_prefix_caching": False},
        {"use_speculation": True, "max_num_seqs": 9},
    ]
    for number, setting in enumerate(settings):
        with opened(model, **setting) as engine:
            for _ in range(2 if number == 0 else 1):  # the second time prefixes are there
                found = [say(answers) for answers in ask(engine, requests)]
                assert found == singly, setting


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("is_native", [True, False])
def test_pages_of_other_kinds(monkeypatch: pytest.MonkeyPatch, dtype: Any, is_native: bool) -> None:
    """Smaller pages: the same bits beside others, and near what the model's own kind gives."""
    if not is_native:
        monkeypatch.setattr(native_step, "load_step", lambda: None)
    requests = [Request(prompt, greedy(max_new_tokens=1)) for prompt in PROMPTS]
    found = []
    for kv_cache_dtype in ("fp32", dtype):
        with opened(
            make("window"), kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False
        ) as engine:
            singly = [say(engine.submit(request).wait(60)) for request in requests]
        with opened(
            make("window"), kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=23
        ) as engine:
            for _ in range(2):
                assert [say(answers) for answers in ask(engine, requests)] == singly
        found.append([one[0][1][0].logprob for one in singly])
    off = {"bf16": 6e-3, "fp16": 1e-3, "int8": 2e-2}[dtype]
    assert found[0] == pytest.approx(found[1], abs=off)
    assert found[0] != found[1]
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp64'"):
        RequestsConfig(kv_cache_dtype="fp64")  # type: ignore[arg-type]


def test_a_prefix_is_computed_once() -> None:
    """A prompt that begins as an earlier one did is told how much was there; other salts not."""
    prompt = [*PROMPTS[5], *PROMPTS[4]]
    with opened(make("llama")) as engine:
        first = engine.submit(Request(prompt, greedy())).wait(60)[0]
        again = engine.submit(Request(prompt, greedy())).wait(60)[0]
        longer = engine.submit(Request([*prompt, *first.ids, 5], greedy())).wait(60)[0]
        salted = engine.submit(Request(prompt, greedy(), cache_salt="other")).wait(60)[0]
        status = engine.requests_status()
    assert first.cached_tokens == salted.cached_tokens == 0
    assert again.cached_tokens == (len(prompt) - 1) // 16 * 16
    if load_step() is not None:
        assert longer.cached_tokens == (len(prompt) + NEW - 1) // 16 * 16
    assert first.ids == again.ids == salted.ids
    assert (status.running, status.waiting, status.pages_used) == (0, 0, 0)


def test_guesses_save_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that repeats itself takes fewer steps, token for token the same; also where drawn."""
    if load_step() is None:
        pytest.skip("no compiler here")
    steps: list[int] = []
    run = PackedStep.run

    def count(self: Any, rows: Any, tokens: Any, *more: Any) -> Any:
        steps.append(sum(map(len, tokens)))
        return run(self, rows, tokens, *more)

    monkeypatch.setattr(PackedStep, "run", count)
    prompt, model, found = PROMPTS[1] * 3, make("llama"), []
    for use_speculation in (False, True):
        for options in (greedy(), drawn(5)):
            with opened(model, use_speculation=use_speculation) as engine:
                steps.clear()
                asked = Request(prompt, options.replace(max_new_tokens=80))
                found.append((say(engine.submit(asked).wait(60)), len(steps)))
    assert found[0][0] == found[2][0]
    assert found[1][0] == found[3][0]
    assert found[0][1] == 80
    assert found[2][1] < 60, "a greedy answer of random weights goes round in circles"


def test_pieces_joined_are_the_whole() -> None:
    with opened(make("llama")) as engine:
        for options in (greedy(), drawn(1, num_return_sequences=3)):
            handle = engine.submit(Request(PROMPTS[2], options))
            pieces = list(handle)
            for answer in handle.wait(1):
                mine = [piece for piece in pieces if piece.index == answer.index]
                assert sum((piece.ids for piece in mine), ()) == answer.ids
                assert sum((piece.logprobs or () for piece in mine), ()) == answer.logprobs
                assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
                assert mine[-1].finish_reason == answer.finish_reason
            assert handle.done
            assert not handle.unread


def test_logprobs_are_the_models() -> None:
    """Of the scores as they are, whatever options do to them."""
    model = make("llama")
    with opened(model) as engine:
        options = greedy(repetition_penalty=3.0, logprobs=4)
        (answer,) = engine.submit(Request(PROMPTS[1], options)).wait(60)
    row = torch.tensor([[*PROMPTS[1], *answer.ids]])
    with torch.no_grad():
        want = model(row).logits[0, len(PROMPTS[1]) - 1 : -1].log_softmax(-1)
    assert answer.logprobs is not None
    for place, told in enumerate(answer.logprobs):
        assert told.logprob == pytest.approx(float(want[place, told.id]), abs=1e-4)
        best = want[place].topk(4)
        assert [one.id for one in told.top] == best.indices.tolist()
        assert [one.logprob for one in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_options_are_those_of_generate(kind: str) -> None:
    """Penalties and what is forbidden, of each request its own."""
    model = make(kind)
    choices: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"logit_bias": {3: 4.0, 9: -100.0}},
        {"bad_words_ids": ((5,), (7, 8))},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    ]
    prompt = PROMPTS[3]
    with opened(model) as engine:
        plain = {"max_new_tokens": 24, "eos_token_id": (11, 12)}
        asked = [Request(prompt, GenerationConfig(**plain, **choice)) for choice in choices]
        found = ask(engine, asked)
    for choice, answers in zip(choices, found, strict=True):
        want = alone(model, prompt, **plain, **choice)
        for answer, row in zip(answers, want, strict=True):
            new = row[1 if kind == "t5" else len(prompt) :].tolist()
            assert list(answer.ids) == new[: len(answer.ids)], choice
            assert all(id in (11, 12) for id in new[len(answer.ids) :])


def test_ends() -> None:
    """End tokens end answers, and are among the ids."""
    model = make("llama")
    want = alone(model, PROMPTS[0], max_new_tokens=NEW, eos_token_id=())
    new = want[0, 1:].tolist()
    with opened(model) as engine:
        (answer,) = engine.submit(Request(PROMPTS[0], greedy(eos_token_id=new[4]))).wait(60)
    assert list(answer.ids) == new[: new.index(new[4]) + 1]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["llama", "mixtral", "t5"])
def test_cancelled_and_late(kind: str) -> None:
    """Between steps a request ends; its pages are free, and others go on."""
    model = make(kind)
    seen = threading.Event()
    with opened(model) as engine:
        long = greedy(max_new_tokens=50)
        cancelled = engine.submit(Request(PROMPTS[2], long))
        late = engine.submit(Request(PROMPTS[2], long, deadline_s=1e-9))
        other = engine.submit(Request(PROMPTS[3], greedy()))

        def stop() -> None:
            cancelled.cancel()
            seen.set()

        cancelled.watch(stop)
        assert seen.wait(60)
        (answer,) = cancelled.wait(60)
        assert answer.finish_reason == "cancelled"
        assert len(answer.ids) < 50
        assert late.wait(60)[0].finish_reason == "deadline"
        (whole,) = other.wait(60)
        assert len(whole.ids) == NEW
        assert engine.requests_status().pages_used == 0
    want = alone(model, PROMPTS[2], max_new_tokens=50, eos_token_id=())
    assert list(answer.ids) == want[0, -50:].tolist()[: len(answer.ids)]


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_what_watches_ends_its_own_request(kind: str) -> None:
    """It raises whatever it is told: its request ends with that, another and the next do not."""
    with opened(make(kind)) as engine:
        other = engine.submit(Request(PROMPTS[1], greedy()))
        watched = engine.submit(Request(PROMPTS[0], greedy(max_new_tokens=60)))
        calls = []

        def watch() -> None:
            calls.append(1)
            raise ZeroDivisionError("what watches is broken")

        with suppress(ZeroDivisionError):  # of a piece that was there already
            watched.watch(watch)
        with pytest.raises(ZeroDivisionError, match="is broken"):
            watched.wait(60)
        assert len(other.wait(60)[0].ids) == NEW
        assert len(engine.submit(Request(PROMPTS[1], greedy())).wait(60)[0].ids) == NEW
        assert len(calls) in (2, 3)
        assert engine.requests_status().pages_used == 0


def test_bad_input_is_refused_before_anything_runs() -> None:
    model = make("gpt2")
    bad: list[tuple[Any, Any, str]] = [
        ([], {}, "a non-empty list of token ids"),
        ("text", {}, "tokenizer"),
        ([1, 97], {}, "ids from 1 to 97"),
        ([-1], {}, "ids from -1"),
        ([1] * 125, {}, "max_seq_len=128"),
        ([1], {"stop_strings": ("a",)}, "stop_strings need a tokenizer"),
        ([1], {"num_beams": 2, "stop_strings": ("a",)}, "token-by-token"),
        ([1], {"do_sample": True, "num_return_sequences": 17}, "max_num_seqs=16"),
        ([1], {"min_new_tokens": 3}, "min_new_tokens=3 has no effect"),
        ([1], {"logit_bias": {97: 1.0}}, "contains id 97"),
        ([1], {"bad_words_ids": ((3, 200),)}, "contains id 200"),
    ]
    with opened(model) as engine:
        for prompt, options, match in bad:
            with pytest.raises((ConfigError, ShapeError), match=match):
                engine.submit(Request(prompt, GenerationConfig(**{"max_new_tokens": 4, **options})))
        assert engine.requests_status().running == 0
    with (
        opened(model, total_tokens=32) as engine,
        pytest.raises(ConfigError, match="KV cache has 32"),
    ):
        engine.submit(Request([1] * 30, greedy()))
    with pytest.raises(ConfigError, match="deadline_s=0"):
        Request([1], deadline_s=0)
    with pytest.raises(ConfigError, match="closed"):
        engine.submit(Request([1]))
    with opened(model, max_queue_size=1, max_num_seqs=1) as engine:
        long = Request([1], greedy(max_new_tokens=100))
        with pytest.raises(ConfigError, match="are waiting"):
            [engine.submit(long) for _ in range(50)]


def test_who_waits_gets_the_engines_error() -> None:
    """A model that fails fails those that ran; the next request is answered."""
    model = make("llama")
    with opened(model) as engine:
        (before,) = engine.submit(Request(PROMPTS[1], greedy())).wait(60)
        norm, model.norm = model.norm, torch.nn.Identity()
        model.norm.forward = lambda x: 1 // 0  # type: ignore[method-assign]
        handles = [engine.submit(Request(prompt, greedy())) for prompt in PROMPTS[:3]]
        for handle in handles:
            with pytest.raises(ZeroDivisionError):
                handle.wait(60)
            with pytest.raises(ZeroDivisionError):
                list(handle)
        model.norm = norm
        (after,) = engine.submit(Request(PROMPTS[1], greedy())).wait(60)
        assert after.ids == before.ids
        assert engine.requests_status().pages_used == 0
        handle = engine.submit(Request(PROMPTS[1], greedy(max_new_tokens=100)))
    with pytest.raises(RuntimeError, match="closed while the request was running"):
        handle.wait(60)


def test_everything_else_between_steps() -> None:
    """`call` reaches the model while requests run; what takes it for itself says that it is not."""
    model = make("llama")
    ids = torch.tensor([PROMPTS[1]])
    want = generate(model, ids, max_new_tokens=5, eos_token_id=())
    with opened(model) as engine:
        begun = threading.Event()
        handle = engine.submit(Request(PROMPTS[2], greedy(max_new_tokens=80)))
        handle.watch(begun.set)
        assert begun.wait(60)
        got = engine.call(lambda: engine.generate(ids, max_new_tokens=5, eos_token_id=()))
        assert torch.equal(got, want)
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda: 1 // 0)
        (answer,) = handle.wait(60)
        assert len(answer.ids) == 80


def test_a_budget_holds_requests(tmp_path: Any) -> None:
    """Blocks that come from disk serve several requests at once, in the planned room."""
    model = make("llama", num_layers=5)
    model.save_pretrained(tmp_path)
    config = EngineConfig(max_rows=3, max_tokens=64)
    with pytest.raises(ConfigError) as caught:
        Engine(tmp_path, device_budget_bytes=1, config=config)
    least = int(str(caught.value).split("too small: ")[1].split()[0])
    with Engine(tmp_path, device_budget_bytes=least, config=config) as engine:
        assert engine.plan.moved_bytes
        found = ask(engine, [Request(prompt, greedy()) for prompt in PROMPTS if len(prompt) < 50])
        with pytest.raises(ConfigError, match="max_tokens=64"):
            engine.submit(Request([1] * 60, greedy()))
        with pytest.raises(ConfigError, match="num_beams=2 is not supported"):
            engine.submit(Request([1], GenerationConfig(num_beams=2)))
        short = [prompt for prompt in PROMPTS if len(prompt) < 50]
        for prompt, (answer,) in zip(short, found, strict=True):
            want = engine.generate(torch.tensor([prompt]), max_new_tokens=NEW, eos_token_id=())
            assert list(answer.ids) == want[0, -NEW:].tolist()
    too_much = EngineConfig(max_tokens=64, requests=RequestsConfig(total_tokens=65))
    with (
        Engine(tmp_path, device_budget_bytes=least, config=too_much) as engine,
        pytest.raises(ConfigError, match="total_tokens=65 is more"),
    ):
        engine.submit(Request([1]))


def test_threads_ask_at_once() -> None:
    model = make("llama")
    want = [
        alone(model, prompt, max_new_tokens=NEW, eos_token_id=())[0, -NEW:] for prompt in PROMPTS
    ]
    wrong: list[Any] = []
    with opened(model, max_num_seqs=3) as engine:

        def work(number: int) -> None:
            for turn in range(4):
                at = (number + turn) % len(PROMPTS)
                (answer,) = engine.submit(Request(PROMPTS[at], greedy())).wait(60)
                if list(answer.ids) != want[at].tolist():
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?()-._"


def test_texts_that_have_a_form_of_their_own() -> None:
    """CPM-Bee's documents, and CPM-Ant's texts, greedily and with beams, are the engine's."""
    bee = CPMBeeTokenizer([*BEE_MARKS, *LETTERS])
    config = CPMBeeConfig(
        vocab_size=len(bee), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        head_dim=6, num_buckets=16, num_relations=64, max_seq_len=64,
    )  # fmt: skip
    ant = CPMAntTokenizer("\n".join([*BEE_MARKS, *LETTERS, "</s>2"]).encode())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
    prompts: dict[str, Any] = {"head_dim": 6, "prompt_types": 3, "prompt_length": 4}
    cases: list[tuple[Any, Any]] = [
        (CPMBee.from_config(config, seed=1), bee),
        (CPMAnt.from_config(CPMAntConfig(vocab_size=len(ant), **sizes, **prompts), seed=1), ant),
    ]
    for model, tokenizer in cases:
        with torch.no_grad():
            model.embed.weight.mul_(30.0)
        with Engine(model.eval(), tokenizer=tokenizer) as engine:
            for options in ({"num_beams": 3}, {"do_sample": False, "num_beams": 1}):
                request = Request("tell it", GenerationConfig(max_new_tokens=8, **options))
                handles = [engine.submit(request) for _ in range(2)]
                texts = [handle.wait(60)[0].text for handle in handles]
                want = engine.generate("tell it", max_new_tokens=8, **options)
                assert texts[0] == texts[1]
                assert want.endswith(texts[0])
                assert texts[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_flood_leaves_nothing_behind(kind: str) -> None:
    """Hundreds of requests, many cancelled or late: others' bits are the same, pages all free."""
    model, before = make(kind), set(threading.enumerate())
    want = {}
    with opened(model, enable_prefix_caching=False) as engine:
        for number, prompt in enumerate(PROMPTS):
            for seed in range(3):
                asked = Request(prompt, drawn(seed, num_return_sequences=1 + seed))
                want[number, seed] = say(engine.submit(asked).wait(60))
    wrong: list[Any] = []
    with opened(
        model, max_num_seqs=6, max_num_batched_tokens=24, total_tokens=400, use_speculation=True
    ) as engine:

        def work(worker: int) -> None:
            draw = random.Random(worker)
            for _ in range(30):
                number, seed = draw.randrange(len(PROMPTS)), draw.randrange(3)
                options = drawn(seed, num_return_sequences=1 + seed)
                late = draw.choice([None, None, 0.01])
                handle = engine.submit(Request(PROMPTS[number], options, deadline_s=late))
                if draw.random() < 0.3:
                    next(iter(handle), None)
                    handle.cancel()
                for mine, theirs in zip(say(handle.wait(120)), want[number, seed], strict=True):
                    whole = mine[2] == "length" and mine == theirs
                    cut = mine[2] in ("cancelled", "deadline")
                    if not whole and not (cut and mine[0] == theirs[0][: len(mine[0])]):
                        wrong.append((number, seed, mine, theirs))

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status = engine.requests_status()
        assert (status.running, status.waiting, status.pages_used) == (0, 0, 0)
    assert not wrong
    assert set(threading.enumerate()) <= before
