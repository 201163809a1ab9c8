"""Rotary positions against transformers and against complex numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from bmforge.errors import ConfigError
from bmforge.models.llama import LlamaConfig
from bmforge.nn import RopeSpec, apply_rope, rope_frequencies, rope_table
from bmforge.testing import assert_close

HEAD_DIM = 16
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_implied_original": {"rope_type": "yarn", "factor": 4.0},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.4,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_attention": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3_implied_original": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + 0.9 * i for i in range(HEAD_DIM // 2)],
    },
    "longrope_implied_factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [2.0] * (HEAD_DIM // 2),
    },
    "longrope_attention": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "attention_factor": 1.7,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [2.0] * (HEAD_DIM // 2),
    },
}


def make_configs(name: str, theta: float = 5e3) -> tuple[Any, RopeSpec]:
    """Return transformers' config of a kind and our spec, read from it by the family file."""
    rope = {"rope_type": name, "rope_theta": theta, **KINDS[name]}
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "vocab_size": 8}
    theirs = TheirConfig(**sizes, max_position_embeddings=64, rope_parameters=dict(rope))
    raw = {**sizes, "max_position_embeddings": 64, "rope_parameters": rope}
    return theirs, LlamaConfig.from_hf(raw).rope_spec()


@pytest.mark.parametrize("length", [1, 20, 64, 200])
@pytest.mark.parametrize("name", [n for n in KINDS if n != "default"])
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    """Speeds and attention factor are transformers' for short and long sequences."""
    config, spec = make_configs(name)
    kind = config.rope_parameters["rope_type"]
    theirs, their_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    ours, factor = rope_frequencies(spec, torch.arange(length))
    assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    assert factor == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("name", list(KINDS))
def test_rotation_equals_transformers(name: str, length: int) -> None:
    """Tables and turned queries are transformers' for each row, with padded positions too."""
    config, spec = make_configs(name)
    positions = torch.stack((torch.arange(length), (torch.arange(length) - 3).clamp(min=0)))
    query, key = torch.randn(2, 4, length, HEAD_DIM), torch.randn(2, 2, length, HEAD_DIM)
    rows = [LlamaRotaryEmbedding(config)(query[:1], row[None]) for row in positions]
    cos, sin = (torch.cat(parts) for parts in zip(*rows, strict=True))
    table = rope_table(spec, positions, torch.float32)
    assert_close(table[0][:, 0], cos, atol=2e-5)
    assert_close(table[1][:, 0], sin, atol=2e-5)
    their_query, their_key = apply_rotary_pos_emb(query, key, cos, sin)
    assert_close(apply_rope(query, table), their_query, atol=1e-4)
    assert_close(apply_rope(key, table), their_key, atol=1e-4)


def rotate_complex(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Neighbouring pairs as complex numbers, times e^(i position speed): RoFormer's definition."""
    width = x.shape[-1]
    speed = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.polar(torch.ones_like(speed), positions[:, None].double() * speed)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2)


def test_interleaved_equals_complex_numbers() -> None:
    """Pairs of neighbours turn as complex numbers do."""
    spec = RopeSpec(HEAD_DIM, theta=100.0, interleaved=True)
    positions = torch.tensor([0, 1, 5, 17])
    x = torch.randn(2, 3, 4, HEAD_DIM)
    turned = apply_rope(x, rope_table(spec, positions[None], torch.float32), interleaved=True)
    assert_close(turned, rotate_complex(x, positions, 100.0).float(), atol=1e-5)


def test_halves_are_interleaved_after_a_permutation() -> None:
    """Llama's halves are GPT-J's neighbours in another order of the dims."""
    order = torch.arange(HEAD_DIM).view(2, -1).t().flatten()
    positions = torch.arange(6)[None]
    x = torch.randn(1, 2, 6, HEAD_DIM)
    halves = apply_rope(x, rope_table(RopeSpec(HEAD_DIM), positions, torch.float32))
    spec = RopeSpec(HEAD_DIM, interleaved=True)
    table = rope_table(spec, positions, torch.float32)
    assert_close(apply_rope(x[..., order], table, interleaved=True), halves[..., order])


def test_partial_rotation_leaves_the_rest() -> None:
    """Only the first rotary_dim dims turn."""
    positions = torch.arange(5)[None]
    x = torch.randn(1, 2, 5, HEAD_DIM)
    table = rope_table(RopeSpec(6), positions, torch.float32)
    turned = apply_rope(x, table)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert_close(turned[..., :6], apply_rope(x[..., :6].contiguous(), table))


def test_scores_depend_on_distance_only() -> None:
    """Moving query and key together changes no score."""
    spec = RopeSpec(HEAD_DIM)
    query, key = torch.randn(2, 1, 1, 1, HEAD_DIM)
    scores = []
    for start in (0, 40):
        at = [rope_table(spec, torch.tensor([[start + p]]), torch.float32) for p in (7, 2)]
        scores.append((apply_rope(query, at[0]) * apply_rope(key, at[1])).sum())
    assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_dim": 7}, "rotary_dim=7 must be even"),
        ({"kind": "yarn"}, "original_seq_len"),
        ({"kind": "lama3"}, "Did you mean 'llama3'"),
        (
            {"kind": "longrope", "original_seq_len": 8, "short_factor": (1.0,)},
            r"short_factor has 1 entries.*8",
        ),
    ],
)
def test_bad_specs(fields: dict[str, Any], message: str) -> None:
    """What would give wrong numbers raises."""
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(RopeSpec(HEAD_DIM), **fields)


@pytest.mark.parametrize("place", ["rope_parameters", ""])
def test_whole_heads_turned_in_so_many_words(place: str) -> None:
    """A factor of 1 says what its absence says."""
    said = {"rope_theta": 5e5, "partial_rotary_factor": 1.0}
    raw = {"hidden_size": 64, "num_attention_heads": 4}
    config = LlamaConfig.from_hf({**raw, **({place: said} if place else said)})
    assert config.rope_spec() == LlamaConfig.from_hf({**raw, "rope_theta": 5e5}).rope_spec()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "proportional", "factor": 2.0}, "proportional"),
        ({"rope_type": "linear"}, "needs the parameter factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary"),
    ],
)
def test_bad_scalings_in_a_config(rope: dict[str, Any], message: str) -> None:
    """A scaling that is unknown or incomplete is refused when a config is read."""
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_hf({"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": rope})


def test_old_and_new_config_forms_agree() -> None:
    """``rope_scaling`` with ``type`` (transformers 4) reads as ``rope_parameters`` does."""
    scaling = {"factor": 2.0}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, **scaling}}
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", **scaling}}
    assert LlamaConfig.from_hf(new) == LlamaConfig.from_hf(old)
