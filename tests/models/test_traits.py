"""What families say of themselves is what they do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError, ShapeError
from bmforge.models import GLM, GPT2, GLMConfig, GPT2Config
from bmforge.models.base import Model
from bmforge.models.hub import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "max_seq_len": 16,
    "dropout": 0.0,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rotary_dim": 8,
    "num_relations": 64,
    "intermediate_size": 128,
    "windows": (16,),
    "image_size": 8,
    "pad_token_id": 0,
    "patch_size": 4,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_size": 16,
    "num_buckets": 8,
    "expert_groups": 1,
    "top_groups": 1,
    "num_dense": 0,
    "q_rank": 0,
    "kv_rank": 16,
    "plain_dim": 8,
    "rope_dim": 8,
    "value_dim": 16,
}
LENGTH = 8


def build(family: type[Model], **changes: Any) -> Model:
    fields = {f.name: f for f in dataclasses.fields(family.config_class) if f.init}
    sizes = {name: value for name, value in SIZES.items() if name in fields}
    return family.from_config(family.config_class(**{**sizes, **changes})).eval()


def read(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """The states in which a family's text comes out of its blocks."""
    if model.traits.has_images:
        pixels = torch.randn(ids.shape[0], 3, 8, 8, generator=torch.Generator().manual_seed(0))
        pixels[:, :, -4:, -4:] = ids[:, -1, None, None, None].float()
        return model(pixels).last_hidden_state
    if model.traits.attention == "encoder-decoder":
        encode: Any = model.encode
        return encode(ids).last_hidden_state
    return model(ids).last_hidden_state


@pytest.mark.parametrize("name", FAMILIES)
def test_the_direction_of_reading(name: str) -> None:
    """Whether the first token's state depends on the last token."""
    traits = FAMILIES[name].family_traits
    if traits.attention == "prefix":
        return  # what they read in both directions is said with every text; see below
    heads = {"causal": {}, "bidirectional": {}, "encoder-decoder": {"head": "encoder"}}[
        traits.attention
    ]
    if "encoder" not in FAMILIES[name].config_class.heads:
        heads = {}
    model = build(FAMILIES[name], **heads)
    ids = torch.arange(4, 4 + LENGTH)[None].repeat(2, 1)
    ids[1, -1] = 40
    with torch.no_grad():
        first = read(model, ids)[:, 0]
    assert torch.equal(first[0], first[1]) is (traits.attention == "causal")


def test_blanks_are_read_both_ways_and_written_from_the_left() -> None:
    model = GLM.from_config(
        GLMConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, max_seq_len=16)
    ).eval()
    assert model.traits.attention == "prefix"
    ids = torch.arange(4, 12)[None].repeat(2, 1)
    for place, sees in ((3, True), (6, False)):  # part A has five tokens
        ids[1] = ids[0]
        ids[1, place + 1] = 40
        with torch.no_grad():
            states = model(ids, attention_mask=torch.tensor([5, 5])).last_hidden_state[:, place]
        assert torch.equal(states[0], states[1]) is not sees


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if not f.family_traits.has_images])
def test_positions_end_where_they_are_learned(name: str) -> None:
    family = FAMILIES[name]
    if family.family_traits.attention == "prefix":
        return  # what counts there are positions that the caller may give
    model = build(family)
    limit = model.traits.position_limit
    assert (limit == SIZES["max_seq_len"]) is (family.family_traits.positions == "learned")
    ids = torch.full((1, SIZES["max_seq_len"] + 8), 5)
    options = {"decoder_input_ids": ids} if model.traits.attention == "encoder-decoder" else {}
    with torch.no_grad():
        if limit is None:
            assert model(ids, **options).logits.shape[1] == ids.shape[1]
        else:
            with pytest.raises((ShapeError, ConfigError), match="max_seq_len=16"):
                model(ids)


def test_what_a_head_decides() -> None:
    sizes = GPT2Config(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, max_seq_len=16)
    assert GPT2.from_config(sizes).traits.can_generate
    bare = GPT2.from_config(sizes.replace(head="sequence_classification"))
    assert not bare.traits.can_generate
    assert bare.traits.attention == "causal"
