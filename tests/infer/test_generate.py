"""`generate` against transformers' ``generate`` on the same weights, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import GenerationConfig, generate
from bmforge.infer.beam import beam_search
from bmforge.infer.decoder import Decoder
from bmforge.models import GPT2, Change, GPT2Config, Llama, LlamaConfig
from bmforge.testing.reference_pair import Twin, make_twin

# A small vocabulary, so that end tokens come up often.
VOCAB = 20
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (
        GPT2,
        transformers.GPT2LMHeadModel,
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 40,
            "bos_token_id": 1,
            "eos_token_id": 3,
            "pad_token_id": 0,
            "initializer_range": 0.3,
        },
    ),
    "llama_two_ends": (
        Llama,
        transformers.LlamaForCausalLM,
        {**LLAMA, "eos_token_id": [3, 7], "pad_token_id": 0},
    ),
    "llama_dynamic": (
        Llama,
        transformers.LlamaForCausalLM,
        {
            **LLAMA,
            "max_position_embeddings": 10,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
            "eos_token_id": 3,
        },
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy_penalty": {"repetition_penalty": 1.5},
    "greedy_shortest": {"min_new_tokens": 6},
    "sample": {"do_sample": True, "top_k": 0},
    "sample_all": {"do_sample": True, "temperature": 0.7, "top_k": 8, "top_p": 0.8},
    "sample_hot": {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "top_k": 0},
    "sample_rows": {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
    "beam": {"num_beams": 3},
    "beam_rows": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0},
    "beam_early": {"num_beams": 3, "early_stopping": True, "num_return_sequences": 3},
    "beam_never": {"num_beams": 3, "early_stopping": "never", "length_penalty": -0.5},
    "beam_never_long": {"num_beams": 3, "early_stopping": "never", "length_penalty": 1.5},
    "beam_penalty": {"num_beams": 3, "repetition_penalty": 1.5, "min_new_tokens": 3},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """Both models of a family."""
    return make_twin(*FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model() -> GPT2:
    """A small GPT-2 of ours, with dropout."""
    config = GPT2Config(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, max_seq_len=24, dropout=0.5
    )
    return GPT2.from_config(config)


def make_prompts(seed: int, padded: bool) -> tuple[Tensor, Tensor]:
    """Return three prompts of six tokens and their mask; two of them shorter when `padded`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (3, 6), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
        mask[1, :5] = 0
    return ids * mask, mask


def is_dynamic(twin: Twin) -> bool:
    """Return True if rotary frequencies depend on the length.

    transformers then takes the longest row's for all rows of a batch; here each row has its own.
    """
    return "dynamic" in str(getattr(twin.model.config, "rope_scaling", None))


def plain_cache(twin: Twin) -> dict[str, Any]:
    """Options of transformers' `generate`: no cache if its keys become stale when a row grows."""
    return {"use_cache": False} if is_dynamic(twin) else {}


def check_against_transformers(twin: Twin, options: dict[str, Any], seed: int) -> None:
    """Generate with both models from the same prompts and the same state of the generator."""
    ids, mask = make_prompts(seed, padded=seed % 2 == 1 and not is_dynamic(twin))
    torch.manual_seed(seed)
    theirs = twin.reference.generate(
        ids, attention_mask=mask, max_new_tokens=12, **options, **plain_cache(twin)
    )
    torch.manual_seed(seed)
    ours = generate(twin.model, ids, mask, max_new_tokens=12, **options)
    assert torch.equal(ours, theirs), f"seed {seed}"


@pytest.mark.parametrize("name", list(OPTIONS))
def test_equals_transformers(twin: Twin, name: str) -> None:
    """Ids are those of transformers, padded and unpadded."""
    for seed in range(2):
        check_against_transformers(twin, OPTIONS[name], seed)


@pytest.mark.long
@pytest.mark.parametrize("name", list(OPTIONS))
def test_equals_transformers_often(twin: Twin, name: str) -> None:
    """The same for many prompts."""
    for seed in range(2, 30):
        check_against_transformers(twin, OPTIONS[name], seed)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n.startswith("beam")])
def test_beam_scores_equal_transformers(twin: Twin, name: str) -> None:
    """Scores of all returned rows are transformers', in its order."""
    options = {**OPTIONS[name], "num_return_sequences": OPTIONS[name]["num_beams"]}
    ids, mask = make_prompts(1, padded=not is_dynamic(twin))
    theirs = twin.reference.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
        **plain_cache(twin),
    )
    eos = twin.model.config.raw["eos_token_id"]
    eos = tuple(eos) if isinstance(eos, list) else eos
    config = GenerationConfig(max_new_tokens=12, **{**options, "eos_token_id": eos})
    with torch.no_grad():
        decoder = Decoder(twin.model, mask, 18)
        rows, scores = beam_search(decoder, ids, mask.argmax(1), config)
    assert torch.equal(rows, theirs.sequences)
    torch.testing.assert_close(scores, theirs.sequences_scores, rtol=1e-5, atol=1e-5)
    assert bool((scores.unflatten(0, (3, -1)).diff(dim=1) <= 0).all())


def test_end_token_given_or_switched_off(twin: Twin) -> None:
    """End tokens given replace the model's; () means none."""
    ids, mask = make_prompts(0, padded=False)
    theirs = twin.reference.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        eos_token_id=[5, 9],
        pad_token_id=2,
        **plain_cache(twin),
    )
    ours = generate(twin.model, ids, mask, max_new_tokens=12, eos_token_id=(5, 9), pad_token_id=2)
    assert torch.equal(ours, theirs)
    assert generate(twin.model, ids, mask, max_new_tokens=12, eos_token_id=()).shape == (3, 18)


def test_padding_is_found_by_its_token(twin: Twin) -> None:
    """Without a mask, `pad_token_id` marks the padding."""
    ids, mask = make_prompts(1, padded=True)
    expected = generate(twin.model, ids, mask, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(generate(twin.model, ids, max_new_tokens=8, pad_token_id=0), expected)


def test_padding_changes_nothing(twin: Twin) -> None:
    """A prompt gives the same tokens alone and padded among others."""
    ids, mask = make_prompts(3, padded=True)
    both = generate(twin.model, ids, mask, max_new_tokens=4, eos_token_id=())
    for row, first in enumerate(mask.argmax(1).tolist()):
        alone = generate(twin.model, ids[row : row + 1, first:], max_new_tokens=4, eos_token_id=())
        assert torch.equal(alone[0], both[row, first:])


def test_seed_decides(model: GPT2) -> None:
    """A seed gives the same tokens again and leaves torch's generator alone."""
    ids, _ = make_prompts(0, padded=False)
    state = torch.get_rng_state()
    first = generate(model, ids, max_new_tokens=9, do_sample=True, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generate(model, ids, max_new_tokens=9, do_sample=True, seed=4), first)
    assert not torch.equal(generate(model, ids, max_new_tokens=9, do_sample=True, seed=5), first)
    torch.manual_seed(4)
    assert torch.equal(generate(model, ids, max_new_tokens=9, do_sample=True), first)


def test_on_token_sees_every_step(model: GPT2) -> None:
    """The callback gets the tokens that are returned, step by step."""
    ids, _ = make_prompts(0, padded=False)
    seen: list[Tensor] = []
    out = generate(model, ids, max_new_tokens=5, on_token=seen.append)
    assert torch.equal(torch.stack(seen, 1), out[:, 6:])


def test_modes_and_gradients_are_left_alone(model: GPT2) -> None:
    """Dropout is off while generating; every module has its own mode afterwards."""
    model.train()
    model.layers["0"].eval()
    modes = [module.training for module in model.modules()]
    ids, _ = make_prompts(0, padded=False)
    first = generate(model, ids, max_new_tokens=9)
    assert torch.equal(generate(model, ids, max_new_tokens=9), first)
    assert [module.training for module in model.modules()] == modes
    assert not first.is_inference()
    assert all(p.grad is None for p in model.parameters())


def test_mode_comes_back_after_an_error(model: GPT2) -> None:
    """A callback that fails leaves the model as it was."""
    model.train()

    def fail(_: Tensor) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        generate(model, make_prompts(0, False)[0], max_new_tokens=3, on_token=fail)
    assert all(module.training for module in model.modules())


def test_config_and_options(model: GPT2) -> None:
    """Options replace a config's fields; one config serves many calls."""
    ids, _ = make_prompts(0, padded=False)
    config = GenerationConfig(max_new_tokens=4, num_beams=2)
    assert generate(model, ids, config=config).shape == (3, 10)
    assert generate(model, ids, config=config, max_new_tokens=2).shape == (3, 8)
    assert config.max_new_tokens == 4


def test_full_context(model: GPT2) -> None:
    """All positions can be used; one more is refused with the numbers."""
    ids, _ = make_prompts(0, padded=False)
    assert generate(model, ids, max_new_tokens=18).shape == (3, 24)
    with pytest.raises(ConfigError, match=r"6 prompt tokens.*max_new_tokens=19.*max_seq_len=24"):
        generate(model, ids, max_new_tokens=19)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_token": 3}, "Did you mean 'max_new_tokens'"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"do_sample": True, "temperature": -0.5}, "at least 0 and finite"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5"),
        ({"do_sample": True, "top_k": -1}, "top_k=-1"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"early_stopping": "sometimes", "num_beams": 2}, "early_stopping='sometimes'"),
        ({"num_beams": 2, "do_sample": True}, "cannot be used together"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "above max_new_tokens=4"),
        ({"min_new_tokens": 2}, "min_new_tokens=2 has no effect"),
        ({"temperature": 0.5}, "temperature=0.5 needs do_sample=True"),
        ({"top_k": 5, "seed": 1}, "top_k=5 needs do_sample=True; seed=1 needs"),
        ({"length_penalty": 2.0}, "need num_beams above 1"),
        ({"num_beams": 2, "on_token": print}, "on_token and stop cannot be used with num_beams=2"),
    ],
)
def test_bad_options(model: GPT2, options: dict[str, Any], message: str) -> None:
    """Unknown, impossible and idle options are named."""
    with pytest.raises(ConfigError, match=message):
        generate(model, make_prompts(0, False)[0], **options)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(2, 0, dtype=torch.long), None, "at least one token"),
        (torch.zeros(4, dtype=torch.long), None, r"input_ids\[None\]"),
        (torch.zeros(1, 4), None, "integers"),
        (torch.tensor([[1, VOCAB]]), None, f"vocab_size={VOCAB}"),
        (torch.tensor([[1, -1]]), None, "ids from -1"),
        (torch.ones(2, 4, dtype=torch.long), torch.ones(2, 3), r"\(2, 3\)"),
        (
            torch.ones(2, 2, dtype=torch.long),
            torch.tensor([[1, 1], [1, 0]]),
            r"sequences \[1\] end with",
        ),
    ],
)
def test_bad_prompts(model: GPT2, ids: Tensor, mask: Tensor | None, message: str) -> None:
    """Prompts that cannot be continued say why."""
    with pytest.raises(ShapeError, match=message):
        generate(model, ids, mask, max_new_tokens=2)


def test_saved_and_opened_model_stops_at_its_end_token(tmp_path: Path) -> None:
    """The end token of config.json is used when none is given."""
    twin = make_twin(*FAMILIES["gpt2"], tmp_path / "a")
    twin.model.save_pretrained(tmp_path / "b")
    again = GPT2.from_pretrained(tmp_path / "b")
    ids, mask = make_prompts(0, padded=False)
    theirs = twin.reference.generate(ids, attention_mask=mask, max_new_tokens=30)
    assert torch.equal(generate(again, ids, max_new_tokens=30, pad_token_id=0), theirs)


def test_a_negative_padding_token_is_none() -> None:
    """As old configs have it; rows that end early are filled with the end token."""
    raw = {**LLAMA, "model_type": "llama", "eos_token_id": list(range(2, 12)), "pad_token_id": -1}
    model = Llama.from_config(LlamaConfig.from_hf(raw), seed=3)
    ids = torch.tensor([[1, 4], [12, 19]])
    found = generate(model, ids, max_new_tokens=12)
    assert torch.equal(found, generate(model, ids, max_new_tokens=12, pad_token_id=2))
    assert (found[:, 2:] == 2).any()


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 3.0}, {"num_beams": 3}], ids=str)
def test_rows_of_a_prompt_are_ids(options: dict[str, Any]) -> None:
    """They stand before the text as in the model's own forward, and no score is theirs."""
    config = GPT2Config(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, init_std=0.3)
    model = GPT2.from_config(config, dtype=torch.float64).eval()
    model.change_(Change("prompt", "embed", {"length": 3, "std": 1.0}))
    ids = torch.tensor([[VOCAB, VOCAB + 1, VOCAB + 2, 5, 6]])
    got = generate(model, ids, max_new_tokens=6, do_sample=False, eos_token_id=(), **options)
    if "num_beams" not in options:
        want = ids
        for _ in range(6):
            scores = model(want).logits[0, -1].detach().clone()
            for seen in {int(i) for i in want[0] if i < VOCAB}:
                scores[seen] *= options.get("repetition_penalty", 1.0) ** (-scores[seen].sign())
            want = torch.cat((want, scores.argmax().view(1, 1)), 1)
        assert torch.equal(got, want)
    assert got.shape == (1, 11)
    assert int(got[0, 5:].max()) < VOCAB
    with pytest.raises(ShapeError, match=r"vocab_size.*and a soft prompt of 3 vectors"):
        generate(model, ids + 1, max_new_tokens=2)


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-6])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"do_sample": False},
        {"do_sample": True, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3},
        {"num_beams": 3},
        {"repetition_penalty": 1.5},
    ],
)
def test_a_temperature_of_zero_is_greedy(
    model: GPT2, temperature: float, options: dict[str, Any]
) -> None:
    """As in vLLM: without the other sampling options, whatever the model's published ones are."""
    plain = {k: v for k, v in options.items() if k in ("num_beams", "repetition_penalty")}
    ids = torch.arange(12).view(2, 6)
    expected = generate(model, ids, do_sample=False, max_new_tokens=6, **plain)
    assert torch.equal(
        generate(model, ids, max_new_tokens=6, temperature=temperature, **options), expected
    )
    published = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    config = GenerationConfig(temperature=temperature, **options).with_defaults(published)
    assert config == GenerationConfig(do_sample=False, **plain)
