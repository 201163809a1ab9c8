"""Deltas by request: each answers with the bits that it has where they alone are switched on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request
from bmforge.models import (
    GPT2,
    T5,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
)
from bmforge.shards import is_streamed
from bmforge.tune.delta import (
    IA3,
    Adapter,
    Delta,
    Lora,
    Prefix,
    SoftPrompt,
    list_deltas,
    use_deltas,
)

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_heads": 4, "num_layers": 2}
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(1, 96, (n,), generator=GENERATOR).tolist() for n in (1, 20, 40, 33)]
NEW = 6
CONFIG = EngineConfig(max_rows=4)


def make(kind: str) -> Any:
    made: Any
    if kind == "gpt2":
        made = GPT2.from_config(GPT2Config(**SIZES, max_seq_len=128), seed=1)
    elif kind == "llama":
        made = Llama.from_config(LlamaConfig(**SIZES, intermediate_size=48), seed=1)
    elif kind == "mixtral":
        more = {"intermediate_size": 48, "num_kv_heads": 2}
        made = Mixtral.from_config(MixtralConfig(**SIZES, **more), seed=1)
    else:
        made = T5.from_config(T5Config(**SIZES, intermediate_size=48, head_dim=8), seed=1)
    return made.eval()


def stir_(delta: Delta, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in delta.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.3)


def put_deltas(model: Any, kind: str = "") -> Any:
    """Four of several types, all switched off."""
    stir_(Lora(model, ["attn.q", "attn.v", "mlp.down"], name="low", rank=4), 1)
    stir_(Adapter(model, name="narrow", width=3), 2)
    stir_(IA3(model, name="gain"), 3)
    stir_(Prefix(model, name="front", length=3), 4)
    if kind == "prompt":
        stir_(SoftPrompt(model, name="words", length=4), 5)
    use_deltas(model, ())
    return model


def ask(delta: Any, prompt: Sequence[int] = PROMPTS[1], **more: Any) -> Request:
    options = {"max_new_tokens": NEW, "eos_token_id": (), "logprobs": 3, **more}
    if options.get("num_beams", 1) > 1:
        del options["logprobs"]
    return Request(prompt, GenerationConfig(**options), delta=delta)


def told(answers: Any) -> Any:
    return [(answer.ids, answer.logprobs) for answer in answers]


def alone(kind: str, requests: Sequence[Request], put: str = "") -> list[Any]:
    """What a model of its own says that has the deltas of each switched on, one after the other."""
    model, found = put_deltas(make(kind), put), []
    with Engine(model, config=CONFIG) as engine:
        for request in requests:
            use_deltas(model, request.delta or ())
            plain = Request(request.prompt, request.options)
            found.append(told(engine.submit(plain).wait(60)))
    return found


def find_least(model: Any, config: EngineConfig) -> int:
    """The smallest budget, as the refusal of a smaller one says it."""
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        Engine(model, device_budget_bytes=1, config=config)
    return int(str(caught.value).split("too small: ")[1].split()[0])


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("t5", marks=pytest.mark.long)])
def test_each_request_has_its_own(kind: str) -> None:
    choices: list[Any] = [None, "low", "narrow", "gain", "front", ("low", "narrow"), ()]
    model = put_deltas(make(kind))
    with Engine(model, config=CONFIG) as engine:
        asked = [ask(delta, prompt) for prompt in PROMPTS[:2] for delta in choices]
        handles = [engine.submit(request) for request in asked]
        found = {
            (r.delta, tuple(r.prompt)): told(h.wait(60))
            for r, h in zip(asked, handles, strict=True)
        }
    for request, want in zip(asked, alone(kind, asked), strict=True):
        assert found[request.delta, tuple(request.prompt)] == want
    assert len({str(answer) for answer in found.values()}) == 2 * (len(choices) - 1)
    assert all(delta.weight == 0 for delta in list_deltas(model).values())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_other_families_and_searches(kind: str) -> None:
    model = put_deltas(make(kind))
    kinds: list[dict[str, Any]] = [{"do_sample": True, "seed": 3, "num_return_sequences": 2}]
    kinds += [{}, {"num_beams": 2}]
    with Engine(model, config=CONFIG) as engine:
        asked = [ask(d, PROMPTS[2], **k) for k in kinds for d in ("low", "narrow", None, "front")]
        handles = [engine.submit(request) for request in asked]
        found = [told(handle.wait(60)) for handle in handles]
    assert alone(kind, asked) == found


def test_prefixes_are_of_a_delta() -> None:
    """What was computed for one is not another's, and is found again by the same."""
    model = put_deltas(make("gpt2"))
    long = [*PROMPTS[2], *PROMPTS[3], *PROMPTS[1][:5]]  # longer than a stretch
    with Engine(model, config=CONFIG) as engine:
        cached = [
            engine.submit(ask(delta, long)).wait(60)[0].cached_tokens
            for delta in (None, "low", "narrow", "low", (), ["narrow"], ["low", "narrow"])
        ]
    assert cached == [0, 0, 0, 64, 64, 64, 0]


def test_what_is_switched_on_holds_where_nothing_is_said() -> None:
    model = put_deltas(make("gpt2"))
    use_deltas(model, ["low"], weights=[0.5])
    with Engine(model, config=CONFIG) as engine:
        half, same, other, none = (
            told(engine.submit(ask(delta)).wait(60)) for delta in (None, "low", "narrow", ())
        )
    assert half == same
    assert [other, none] == alone("gpt2", [ask("narrow"), ask(())])
    assert list_deltas(model)["low"].weight == 0.5


@pytest.mark.long
def test_a_soft_prompt_stands_in_front() -> None:
    """As `generate` puts it there; the tokens of a prompt are counted with its rows."""
    model = put_deltas(make("gpt2"), "prompt")
    with Engine(model, config=CONFIG) as engine:
        requests = [engine.submit(ask(delta)) for delta in ("words", None, "low")]
        found = [handle.wait(60) for handle in requests]
    assert found[0][0].prompt_tokens == len(PROMPTS[1]) + 4
    want = alone("gpt2", [ask(delta) for delta in ("words", (), "low")], "prompt")
    assert [told(got) for got in found] == want
    use_deltas(model, "words")
    options = {"max_new_tokens": NEW, "eos_token_id": ()}
    with Engine(model, config=CONFIG) as engine:
        ids = engine.generate(torch.tensor([PROMPTS[1]]), **options)
    assert list(found[0][0].ids) == ids[0, -NEW:].tolist()


@pytest.mark.long
def test_where_sequences_share_passes(tmp_path: Path) -> None:
    """Blocks that stream run once for all rows of a choice."""
    model = put_deltas(make("gpt2"))
    make("gpt2").save_pretrained(tmp_path)
    config = EngineConfig(max_rows=4, max_tokens=64)
    least, found = find_least(tmp_path, config), []
    with (
        Engine(model, config=config) as whole,
        Engine(tmp_path, device_budget_bytes=least, config=config) as limited,
    ):
        limited.model.takes_parts = True
        put_deltas(limited.model)
        for engine in (whole, limited):
            asked = [ask(d, p) for d in ("low", "narrow", None) for p in PROMPTS[:2]]
            handles = [engine.submit(request) for request in asked]
            found.append([handle.wait(60)[0].ids for handle in handles])
    assert found[0] == found[1]
    assert len(set(found[0])) > 3


@pytest.fixture
def six_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that blocks have to come and go."""
    monkeypatch.setitem(SIZES, "num_layers", 6)


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(k, marks=pytest.mark.long) for k in ("llama", "mixtral", "t5"))]
)
def test_a_module_with_them_in_a_budget(six_layers: None, kind: str) -> None:
    """Its blocks come and go, its deltas stay, and the same is written."""
    config = EngineConfig(max_rows=4, max_tokens=64)
    least = find_least(put_deltas(make(kind)), config)
    model, found = put_deltas(make(kind)), []
    brought = {name for delta in list_deltas(model).values() for name in delta.names()}
    with (
        Engine(put_deltas(make(kind)), config=config) as whole,
        Engine(model, device_budget_bytes=least, config=config) as limited,
    ):
        assert limited.plan.on_disk
        moving = {name for name, p in model.named_parameters() if is_streamed(p)}
        assert moving
        assert not moving & brought
        for engine in (whole, limited):
            asked = [ask(d, p) for d in ("low", "front", "gain", None) for p in PROMPTS[:2]]
            handles = [engine.submit(request) for request in asked]
            found.append([handle.wait(60)[0].ids for handle in handles])
    assert found[0] == found[1]
    assert len(set(found[0])) > 3


def test_they_are_trained_in_a_budget(six_layers: None) -> None:
    """An optimizer changes what the next call reads, as without a budget."""

    def make_one() -> Any:
        model = put_deltas(make("gpt2")).requires_grad_(False)
        use_deltas(model, ["low"])
        return model

    config, losses = EngineConfig(max_rows=1, max_tokens=64), []
    for budget in (None, find_least(make_one(), config)):
        model = make_one()
        with Engine(model, device_budget_bytes=budget, config=config) as engine:
            assert bool(engine.plan.on_disk) == (budget is not None)
            low = [p.requires_grad_() for p in list_deltas(model)["low"].parameters()]
            optimizer = torch.optim.SGD(low, lr=0.5)
            ids = torch.tensor([PROMPTS[1]])
            for _ in range(3):
                loss = engine.model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert losses[2] < losses[0] - 0.01


def test_room_for_what_comes_later(six_layers: None) -> None:
    """It is left free in the plan, and the smallest budget is larger by it."""
    plain = EngineConfig(max_rows=1, max_tokens=64)
    more = EngineConfig(max_rows=1, max_tokens=64, adapter_bytes=50_000)
    least = find_least(make("gpt2"), plain)
    assert find_least(make("gpt2"), more) == least + 50_000
    with Engine(make("gpt2"), device_budget_bytes=least + 50_000, config=more) as engine:
        assert len(engine.plan.on_disk) == 6
        assert engine.plan.used_bytes <= engine.plan.budget_bytes == engine.plan.smallest_bytes
        assert "later adapters" in str(engine.plan)
    with pytest.raises(ConfigError, match="adapter_bytes=-1"):
        EngineConfig(adapter_bytes=-1)


def test_encoders_take_them() -> None:
    config = BertConfig(**SIZES, intermediate_size=48, max_seq_len=64)
    model = put_deltas(Bert.from_config(config, seed=1).eval())
    ids = torch.tensor([PROMPTS[1], PROMPTS[1][::-1]])
    with Engine(model, config=CONFIG) as engine:
        found = {delta: engine.embed(ids, delta=delta) for delta in (None, "low", "front", ())}
        for delta, got in found.items():
            use_deltas(model, delta or ())
            assert torch.equal(engine.embed(ids), got)
    assert torch.equal(found[None], found[()])
    assert not torch.equal(found["low"], found["front"])


class Numbers:
    """A tokenizer of numbers with spaces between them."""

    eos_id, bos_id, pad_id = 96, None, 0

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    encode_prompt = encode
    prompt_prefix = ()

    def decode(self, ids: Any) -> str:
        return " ".join(str(int(id)) for id in ids)

    decode_written = decode

    def __len__(self) -> int:
        return 97


def test_everything_takes_them() -> None:
    model, text = put_deltas(make("gpt2"), "prompt"), "1 2 3 4 5 6"
    asks: dict[str, Any] = {
        "ids": lambda e, **d: e.generate(
            torch.tensor([PROMPTS[1]]), max_new_tokens=NEW, **d
        ).tolist(),
        "text": lambda e, **d: e.generate(text, max_new_tokens=NEW, **d),
        "stream": lambda e, **d: "".join(e.stream(text, max_new_tokens=NEW, **d)),
        "score": lambda e, **d: e.score([(text, "7 8 9")], **d),
        "embed": lambda e, **d: e.embed([PROMPTS[1]], **d).tolist(),
    }
    with Engine(model, config=CONFIG, tokenizer=Numbers()) as engine:
        for name, ask_one in asks.items():
            found = {d: ask_one(engine, delta=d) for d in (None, "low", "words", "front", ())}
            for delta, got in found.items():
                use_deltas(model, delta or ())
                assert ask_one(engine) == got, (name, delta)
            use_deltas(model, ())
            assert found[None] == found[()]
            assert len({str(got) for got in found.values()}) > 2, name
        with pytest.raises(ConfigError, match="no adapter 'x'"):
            engine.generate(torch.tensor([PROMPTS[1]]), delta="x")


def test_what_does_not_fit_is_said() -> None:
    model = put_deltas(make("gpt2"))
    list_deltas(model)["narrow"].detach()
    with Engine(model, config=CONFIG) as engine:
        with pytest.raises(ConfigError, match=r"no adapter 'lwo'\. Did you mean 'low'"):
            engine.submit(ask("lwo"))
        with pytest.raises(ConfigError, match="'narrow' is detached"):
            engine.submit(ask(["low", "narrow"]))
        with pytest.raises(ConfigError, match="no adapter 'x'"):
            engine.embed(torch.tensor([PROMPTS[1]]), delta="x")
        assert engine.submit(ask("low")).wait(60)
