"""`generate` of encoder-decoders against transformers' ``generate``, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import GenerationConfig, generate
from bmforge.infer.beam import beam_search
from bmforge.infer.decoder_factory import start_decoder
from bmforge.models.t5 import T5, T5Config
from bmforge.testing.reference_pair import Twin, build_reference

# A small vocabulary, so that end tokens come up often.
VOCAB = 20
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "initializer_factor": 0.5,
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "t5": (transformers.T5ForConditionalGeneration, TINY),
    # As all published ones: the start token is the padding token, and repeats inside beams.
    "t5_start_is_padding": (
        transformers.T5ForConditionalGeneration,
        {**TINY, "decoder_start_token_id": 0, "num_decoder_layers": 1},
    ),
    "mt5": (
        transformers.MT5ForConditionalGeneration,
        {**TINY, "feed_forward_proj": "gated-gelu"},
    ),
}
# Sharp enough to end, flat enough to leave a choice.
HEAD_SCALE = {"t5": 0.5, "t5_start_is_padding": 0.5, "mt5": 3.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy_penalty": {"repetition_penalty": 1.5},
    "greedy_shortest": {"min_new_tokens": 6},
    "sample": {"do_sample": True, "top_k": 0},
    "sample_all": {"do_sample": True, "temperature": 0.7, "top_k": 8, "top_p": 0.8},
    "sample_rows": {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
    "beam": {"num_beams": 3},
    "beam_rows": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0},
    "beam_early": {"num_beams": 3, "early_stopping": True, "num_return_sequences": 3},
    "beam_never": {"num_beams": 3, "early_stopping": "never", "length_penalty": -0.5},
    "beam_penalty": {"num_beams": 3, "repetition_penalty": 1.5, "min_new_tokens": 3},
}


@pytest.fixture(scope="module", params=list(CASES))
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """Both models of a case, with weights that make targets depend on everything.

    As it is drawn, a tiny T5 with a tied head repeats the token it has read.
    """
    hf_class, fields = CASES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    theirs = build_reference(hf_class, fields)
    theirs.lm_head.weight = nn.Parameter(torch.randn(VOCAB, 32) / HEAD_SCALE[request.param])
    theirs.save_pretrained(directory)
    return Twin(theirs, T5.from_pretrained(directory), directory)


@pytest.fixture(scope="module")
def model() -> T5:
    """A small T5 of ours, with dropout."""
    config = T5Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2,
        head_dim=4, dropout=0.5,
    )  # fmt: skip
    return T5.from_config(config)


def make_sources(seed: int, side: str) -> tuple[Tensor, Tensor]:
    """Return three sources of six tokens and their mask, two shorter and padded on a side."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (3, 6), generator=generator)
    mask = torch.ones_like(ids)
    if side:
        mask[0, :2] = 0
        mask[1, :5] = 0
    mask = mask.flip(1) if side == "right" else mask
    return ids * mask, mask


@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_equals_transformers(twin: Twin, name: str, side: str) -> None:
    """Ids are those of transformers, with padding on either side of the source or none."""
    for seed in range(2):
        ids, mask = make_sources(seed, side)
        torch.manual_seed(seed)
        theirs = twin.reference.generate(
            ids, attention_mask=mask, max_new_tokens=12, **OPTIONS[name]
        )
        torch.manual_seed(seed)
        ours = generate(twin.model, ids, mask, max_new_tokens=12, **OPTIONS[name])
        assert torch.equal(ours, theirs), f"seed {seed}"


def test_targets_are_worth_comparing(twin: Twin) -> None:
    """Different sources give different targets, some of which end."""
    targets = []
    for seed in range(4):
        targets += generate(twin.model, *make_sources(seed, ""), max_new_tokens=12).tolist()
    assert len({tuple(target) for target in targets}) >= 4
    assert any(3 in target for target in targets)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n.startswith("beam")])
def test_beam_scores_equal_transformers(twin: Twin, name: str) -> None:
    """Scores of all returned rows are transformers', in its order."""
    options = {**OPTIONS[name], "num_return_sequences": OPTIONS[name]["num_beams"]}
    ids, mask = make_sources(1, "right")
    theirs = twin.reference.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    config = GenerationConfig(max_new_tokens=12, eos_token_id=3, pad_token_id=0, **options)
    with torch.no_grad():
        decoder, start = start_decoder(twin.model, ids, mask, 12)
        rows, scores = beam_search(decoder, start, torch.zeros_like(start[:, 0]), config)
    assert torch.equal(rows, theirs.sequences)
    torch.testing.assert_close(scores, theirs.sequences_scores, rtol=1e-5, atol=1e-5)


def test_padding_is_found_by_its_token(twin: Twin) -> None:
    """Without a mask, the config's padding token marks the source's padding."""
    ids, mask = make_sources(1, "right")
    want = generate(twin.model, ids, mask, max_new_tokens=8)
    assert torch.equal(generate(twin.model, ids, max_new_tokens=8), want)


def test_padding_changes_nothing(twin: Twin) -> None:
    """A source gives the same tokens alone and padded among others."""
    ids, mask = make_sources(3, "right")
    both = generate(twin.model, ids, mask, max_new_tokens=6, eos_token_id=())
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = generate(twin.model, ids[row : row + 1, :length], max_new_tokens=6, eos_token_id=())
        assert torch.equal(alone[0], both[row])


def test_encoder_runs_once(model: T5) -> None:
    """The source is read once, and its keys and values are made once per layer."""
    calls = {"encoder": 0, "keys": 0}
    block = model.decoder.layers["0"]
    hooks = [
        model.encoder.register_forward_hook(lambda *_: calls.update(encoder=calls["encoder"] + 1)),
        block.cross_attn.k_proj.register_forward_hook(
            lambda *_: calls.update(keys=calls["keys"] + 1)
        ),
    ]
    out = generate(model, make_sources(0, "")[0], max_new_tokens=7, num_beams=3, eos_token_id=())
    for hook in hooks:
        hook.remove()
    assert out.shape == (3, 8)
    assert calls == {"encoder": 1, "keys": 1}


def test_callback_start_and_modes(model: T5) -> None:
    """Targets begin with the start token, `on_token` sees the rest; modes are left alone."""
    model.train()
    seen: list[Tensor] = []
    ids, _ = make_sources(0, "")
    out = generate(model, ids, max_new_tokens=5, on_token=seen.append)
    assert torch.equal(out[:, 0], torch.zeros(3, dtype=torch.long))
    assert torch.equal(torch.stack(seen, 1), out[:, 1:])
    assert all(module.training for module in model.modules())


def test_sources_are_as_long_as_one_likes(model: T5) -> None:
    """Relative positions go on beyond the length in the config."""
    ids = torch.full((1, 600), 5)
    assert generate(model, ids, max_new_tokens=2, eos_token_id=()).shape == (1, 3)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(2, 0, dtype=torch.long), None, "at least one token"),
        (torch.tensor([[1, VOCAB]]), None, f"vocab_size={VOCAB}"),
        (torch.ones(2, 4, dtype=torch.long), torch.ones(2, 3), r"\(2, 3\)"),
        (
            torch.ones(2, 2, dtype=torch.long),
            torch.tensor([[1, 1], [0, 0]]),
            r"sequences \[1\] contain only padding",
        ),
    ],
)
def test_bad_sources(model: T5, ids: Tensor, mask: Tensor | None, message: str) -> None:
    """Sources that cannot be read say why."""
    with pytest.raises(ShapeError, match=message):
        generate(model, ids, mask, max_new_tokens=2)


def test_a_head_that_does_not_write(model: T5) -> None:
    """A classifier cannot generate, and the right head is named."""
    encoder = T5.from_config(model.config.replace(head="encoder"))
    with pytest.raises(ConfigError, match=r"'encoder'.*'sequence_to_sequence'"):
        generate(encoder, torch.ones(1, 3, dtype=torch.long))
