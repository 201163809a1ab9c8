"""Log-probabilities of sampled and of given tokens, batched token choice, and weight versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, RequestsConfig
from bmforge.infer.engine.batch_choice import Draw, choose_batch
from bmforge.infer.sampling import draw_token, narrow_scores
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig
from bmforge.parallel import Layout, parallelize

VOCAB = 96
PROMPT = torch.randint(4, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def _model(kind: str = "llama") -> Any:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2}
    if kind == "gpt2":
        return GPT2.from_config(GPT2Config(**sizes, num_heads=4, max_seq_len=128), seed=1).eval()
    sizes |= {"intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 128}
    return Llama.from_config(LlamaConfig(**sizes, init_std=0.3), seed=1).eval()


def _ask(engine: Engine, prompt: list[int], **options: Any) -> Any:
    given = {"max_new_tokens": 12, "eos_token_id": (), **options}
    return engine.submit(Request(prompt, GenerationConfig(**given))).wait()


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double()


_OPTIONS = st.fixed_dictionaries(
    {
        "do_sample": st.booleans(),
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "logprobs_mode": st.sampled_from(["processed_logprobs", "raw_logprobs"]),
        "eos_token_id": st.sampled_from([(), (1,), (0, 2)]),
    },
    optional={
        "top_k": st.sampled_from([1, 3, 50]),
        "top_p": st.sampled_from([0.2, 0.8]),
        "min_p": st.sampled_from([0.05, 0.5]),
    },
)


@settings(max_examples=40, deadline=None)
@given(st.lists(_OPTIONS, min_size=1, max_size=9), st.integers(0, 2**31), st.sampled_from([3, 700]))
def test_batched_choice_has_the_bits_of_single_choices(
    options: list[dict[str, Any]], seed: int, vocab: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    draws = []
    for fields in options:
        if not fields["do_sample"]:  # the other options are for sampling
            fields = {key: fields[key] for key in ("do_sample", "logprobs_mode", "eos_token_id")}
        config = GenerationConfig(**fields, logprobs=0, seed=1 if fields["do_sample"] else None)
        scores = torch.randn(vocab, generator=generator) * 4
        number = float(torch.rand((), generator=generator, dtype=torch.float64))
        draws.append(Draw(config, number, scores, config.eos_tokens))
    for draw, choice in zip(draws, choose_batch(draws), strict=True):
        config, row = draw.config, draw.scores.clone()
        row[list(draw.forbidden)] = -torch.inf
        row = narrow_scores(row[None], config)[0] if config.do_sample else row
        sampled = draw_token(row.softmax(-1), draw.number)
        assert choice is not None
        assert choice.token == (sampled if config.do_sample else int(row.argmax()))
        source = draw.scores if config.logprobs_mode == "raw_logprobs" else row
        assert choice.logprob == float(source.log_softmax(-1)[choice.token])


@pytest.mark.parametrize("samples", [False, True])
def test_answers_of_a_minimum_length_are_those_of_single_choices(samples: bool) -> None:
    model, ends = _model(), tuple(range(0, VOCAB, 2))
    options: dict[str, Any] = {"min_new_tokens": 5, "eos_token_id": ends}
    if samples:
        options |= {"do_sample": True, "seed": 3, "num_return_sequences": 3}
    with Engine(model, config=EngineConfig()) as engine:
        batched = _ask(engine, PROMPT, **options, logprobs=0)
        single = _ask(engine, PROMPT, **options, logprobs=1)  # alternatives are chosen one by one
    for answer, other in zip(batched, single, strict=True):
        assert answer.ids == other.ids
        assert len(answer.ids) >= 6
        assert not set(answer.ids[:5]) & set(ends)
        assert [t.logprob for t in answer.logprobs] == [t.logprob for t in other.logprobs]


def test_batched_choice_leaves_scores_that_are_not_finite() -> None:
    config = GenerationConfig(do_sample=True, seed=1)
    good, bad = torch.zeros(5), torch.tensor([0.0, float("nan"), 0.0, 0.0, 0.0])
    found = choose_batch([Draw(config, 0.5, good), Draw(config, 0.5, bad)])
    assert found[0] is not None
    assert found[0].token == 2
    assert found[1] is None


@pytest.mark.parametrize("use_speculation", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_processed_logprobs_are_those_of_the_sampled_distribution(
    kind: str, use_speculation: bool
) -> None:
    model = _model(kind)
    options = {"do_sample": True, "temperature": 0.6, "top_k": 20, "seed": 5, "logprobs": 0}
    requests = RequestsConfig(use_speculation=use_speculation)
    with Engine(model, config=EngineConfig(requests=requests)) as engine:
        answers = _ask(
            engine,
            PROMPT,
            **options,
            num_return_sequences=4,
            logprobs_mode="processed_logprobs",
        )
        raw = _ask(engine, PROMPT, **options, num_return_sequences=4)
    assert len({answer.ids for answer in answers}) == 4
    for answer, plain in zip(answers, raw, strict=True):
        assert answer.ids == plain.ids
        rows = _logits(model, [*PROMPT, *answer.ids])[len(PROMPT) - 1 : -1]
        kept = rows.masked_fill(rows < rows.topk(20).values[:, -1:], -torch.inf) / 0.6
        chosen = torch.tensor(answer.ids)[:, None]
        wanted = kept.log_softmax(-1).gather(1, chosen)[:, 0]
        found = torch.tensor([token.logprob for token in answer.logprobs], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
        unscaled = rows.log_softmax(-1).gather(1, chosen)[:, 0]
        found = torch.tensor([token.logprob for token in plain.logprobs], dtype=torch.float64)
        torch.testing.assert_close(found, unscaled, rtol=0, atol=2e-5)


def test_prompt_logprobs_are_the_models_and_have_the_bits_of_the_answers() -> None:
    model = _model()
    config = EngineConfig(requests=RequestsConfig(max_num_batched_tokens=16))  # several steps
    with Engine(model, config=config) as engine:
        first = _ask(engine, PROMPT, do_sample=True, seed=3, logprobs=0)[0]
        whole = [*PROMPT, *first.ids]
        scored = _ask(engine, whole, prompt_logprobs=2, max_new_tokens=1)[0]
        again = _ask(engine, whole, prompt_logprobs=0, max_new_tokens=1)[0]
    assert scored.prompt_logprobs[0] is None
    assert scored.cached_tokens == 0
    assert [t.id for t in scored.prompt_logprobs[1:]] == whole[1:]
    logprobs = _logits(model, whole)[:-1].log_softmax(-1)
    wanted = logprobs.gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
    found = [token.logprob for token in scored.prompt_logprobs[1:]]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=0, atol=2e-5)
    assert found == [token.logprob for token in again.prompt_logprobs[1:]]
    best = [tuple(t.id for t in token.top) for token in scored.prompt_logprobs[1:]]
    assert best == [tuple(row) for row in logprobs.topk(2).indices.tolist()]
    sampled = [token.logprob for token in first.logprobs]
    assert found[len(PROMPT) - 1 :] == sampled  # a prefill computes the bits of decoding


def test_every_answer_has_the_version_of_its_weights() -> None:
    model = _model()
    with Engine(model) as engine:
        assert _ask(engine, PROMPT)[0].weights_version == engine.weights_version == 0
        model.layers["0"].attn.k_proj.weight.data.add_(0.1)  # noticed by the next request
        second = _ask(engine, PROMPT)[0]
        assert (second.weights_version, second.cached_tokens) == (1, 0)
        assert engine.weights_changed() == engine.weights_version == 2
        third = _ask(engine, PROMPT)[0]
        assert (third.weights_version, third.cached_tokens) == (2, 0)
        assert _ask(engine, PROMPT)[0].cached_tokens > 0


def test_a_write_while_requests_run_is_noticed_by_weights_changed() -> None:
    model = _model()
    with Engine(model) as engine:
        handle = engine.submit(
            Request(PROMPT, GenerationConfig(max_new_tokens=60, eos_token_id=()))
        )
        next(iter(handle))

        def write() -> None:
            model.lm_head.weight.data.neg_()

        engine.call(write)
        engine.weights_changed()
        late = _ask(engine, PROMPT[::-1], logprobs=0)[0]
        handle.wait()
    with Engine(model) as fresh:
        alone = _ask(fresh, PROMPT[::-1], logprobs=0)[0]
    assert late.weights_version == 2  # `call` has noticed it already
    assert (late.ids, late.logprobs) == (alone.ids, alone.logprobs)


def test_a_model_laid_out_on_one_process_runs_in_an_engine() -> None:
    model = _model()
    with Engine(model) as engine:
        wanted = _ask(engine, PROMPT)[0].ids
    laid_out = parallelize(_model(), Layout(zero=0))
    with Engine(laid_out) as engine:
        assert _ask(engine, PROMPT)[0].ids == wanted
    with pytest.raises(ConfigError, match="parallelized or streamed"):
        Engine(parallelize(_model(), Layout(zero=0), precision="bf16"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logprobs_mode": "processed_logprobs"}, "has no effect without logprobs"),
        ({"num_beams": 2, "prompt_logprobs": 0}, "prompt_logprobs and num_beams"),
        ({"logprobs": 0, "logprobs_mode": "logits"}, "raw_logprobs or processed_logprobs"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GenerationConfig(**options)
