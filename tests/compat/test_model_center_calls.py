"""How ModelCenter's models are called, in both of its versions, against formulas written anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_model_center_models import IDS, LENGTH, MASK, SMALL, small
from torch import Tensor

from bmforge.compat.model_center import model as old
from bmforge.errors import CheckpointError, ConfigError, ShapeError


@pytest.mark.parametrize("name", ["GPT2", "Llama", "T5", "Bert"])
def test_logits_are_there_and_made_when_they_are_read(name: str) -> None:
    """As in version 1.0, without an argument; a program that does not read them pays nothing."""
    model = small(name)
    calls: list[int] = []
    handle = model.head.register_forward_hook(lambda *_: calls.append(1))
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    if name == "T5":
        inputs |= {"decoder_input_ids": IDS, "decoder_attention_mask": MASK}
    out = model(**inputs)
    assert out.last_hidden_state.shape == (2, 12, 32)
    assert not calls
    assert out.logits is out["logits"]
    assert len(calls) == 1
    handle.remove()
    assert torch.equal(out.logits, model(**inputs, output_logits=True).logits)
    assert model(**inputs, output_logits=False).logits is None
    assert "logits" in out.keys()  # noqa: SIM118
    with torch.no_grad():
        out = model(**inputs)
    assert not out.logits.requires_grad  # as if made in the call
    assert model(**inputs).logits.requires_grad


def test_no_head_is_said_when_logits_are_read() -> None:
    model = small("Bert")
    model.head = None
    out = model(IDS, LENGTH)
    assert [value is None for value in out] == [False, False, True, True, True, True]
    with pytest.raises(ConfigError, match="no head for tokens"):
        out.logits  # noqa: B018


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_encoder_reads_on(name: str) -> None:
    """The original's test: pieces with random masks give what all of them give at once."""
    model, draw = small(name), torch.Generator().manual_seed(0)
    past, pieces, rows = None, [], []
    for start in range(0, 12, 4):
        mask = torch.randint(2, (2, 4, start + 4), generator=draw)
        mask[:, :, start] = 1  # what looks nowhere has no result to compare
        out = model(
            IDS[:, start : start + 4], attention_mask=mask, use_cache=True, past_key_values=past
        )
        past = out.past_key_values
        pieces.append(out.last_hidden_state)
        rows.append(F.pad(mask, (0, 8 - start)))
    whole = model(IDS, attention_mask=torch.cat(rows, 1)).last_hidden_state
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
    by_row = model(IDS, attention_mask=MASK).last_hidden_state
    spread = model(IDS, attention_mask=MASK[:, None].expand(-1, 12, -1)).last_hidden_state
    torch.testing.assert_close(spread, by_row)


def test_decoder_takes_a_mask_of_pairs() -> None:
    model = small("GPT2")
    pairs = torch.ones(12, 12).tril()[None].expand(2, -1, -1) * MASK[:, None]
    found, wanted = model(IDS, attention_mask=pairs), model(IDS, attention_mask=MASK)
    shown = MASK.bool()
    torch.testing.assert_close(found.logits[shown], wanted.logits[shown])


def test_patches_that_are_not_seen_have_no_effect() -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "hidden_size": 32, "num_layers": 2}
    config = old.VitConfig(**sizes, num_heads=4, mlp_size=64, num_classes=5)
    model, images = old.ViT(config).eval(), torch.randn(2, 3, 16, 16)
    other = images.clone()
    other[:, :, 8:, 8:] += 1.0
    mask = torch.tensor([[1, 1, 1, 1, 0]] * 2)
    found = model(images, attention_mask=mask)
    assert torch.equal(found, model(other, -1, mask))
    assert not torch.allclose(found, model(images))
    assert torch.equal(model(images, attention_mask=torch.ones(2, 5)), model(images))
    with pytest.raises(ShapeError, match=r"\(2, 5\)"):
        model(images, attention_mask=mask[:, :4])


def test_glm_as_its_test_calls_it() -> None:
    """What is left out of (ids, positions, places, sep) follows from the ids."""
    model = small("GLM")
    ids = torch.tensor([[5, 6, 98, 7, 97, 11, 12]])
    positions, places = torch.tensor([[0, 1, 2, 3, 2, 2, 2]]), torch.tensor([[0, 0, 0, 0, 1, 2, 3]])
    sep = torch.tensor([4])
    wanted = model(ids, positions, places, sep)
    assert wanted.shape == (1, 7, 99)
    for given in ({}, {"position_ids": positions}, {"block_position_ids": places}, {"sep": sep}):
        torch.testing.assert_close(model(ids, **given), wanted)
    # A part A that ends earlier, whatever the ids say: later tokens see what comes before.
    shorter = model(ids, positions, places, torch.tensor([2]))
    longer = ids.clone()
    longer[0, 6] = 13
    torch.testing.assert_close(model(longer, positions, places, sep)[:, :6], wanted[:, :6])
    changed = torch.tensor([[5, 6, 98, 8, 97, 11, 12]])
    found = model(changed, positions, places, torch.tensor([2]))
    torch.testing.assert_close(found[:, :3], shorter[:, :3])


def test_glm_rows_of_several_lengths() -> None:
    model = small("GLM")
    row = [5, 6, 98, 7, 97, 11, 12]
    ids = torch.tensor([[*row, 0, 0], [5, 98, 97, 11, 12, 13, 14, 15, 16]])
    length = torch.tensor([7, 9])
    alone = model(torch.tensor([row]))
    for found in (model(ids, length=length), model(ids, sep=torch.tensor([4, 2]), length=length)):
        torch.testing.assert_close(found[:1, :7], alone)


def relative_cpm1(model: Any, ids: Tensor, see: Tensor) -> Tensor:
    """ModelCenter's CPM1 by its formulas: T5's buckets, RMS norms, an exact GELU's gate."""
    values = {name: value.detach() for name, value in model.named_parameters()}
    x = values["model.embed.weight"][ids]
    width = ids.shape[1]
    distance = torch.arange(width)[None] - torch.arange(width)[:, None]
    far = 8 + torch.log(distance.abs().clamp(min=1) / 8) / torch.tensor(128 / 8).log() * 8
    bucket = torch.where(distance.abs() < 8, distance.abs(), far.long().clamp(max=15))
    bucket = bucket + (distance > 0) * 16
    bias = values["model.rel_bias.weight"][bucket].permute(2, 0, 1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * values[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ values[name].T).unflatten(-1, (4, 8)).transpose(1, 2)

    for number in range(2):
        at = f"model.layers.{number}."
        y = norm(x, f"{at}attn_norm")
        q, k, v = (heads(y, f"{at}attn.{part}_proj.weight") for part in "qkv")
        scores = (q @ k.transpose(2, 3) + bias).masked_fill(~see[:, None], -torch.inf)
        mixed = (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2).flatten(2)
        x = x + mixed @ values[f"{at}attn.o_proj.weight"].T
        y = norm(x, f"{at}mlp_norm")
        gate = F.gelu(y @ values[f"{at}mlp.gate_proj.weight"].T)
        up = y @ values[f"{at}mlp.up_proj.weight"].T
        x = x + (gate * up) @ values[f"{at}mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ values["head.weight"].T


def test_cpm1_of_modelcenter_packs_rows_with_context() -> None:
    """Its pretraining's call: several spans in a row, each with tokens that all see."""
    model = small("CPM1")
    draw = torch.Generator().manual_seed(1)
    context = torch.randint(2, (2, 12), generator=draw).bool()
    span = (torch.arange(12) >= 5).long()[None].expand(2, -1)
    real = MASK.bool()
    before = torch.ones(12, 12, dtype=torch.bool).tril()
    see = context[:, None] | (~context[:, :, None] & before)
    see = see & real[:, None] & real[:, :, None] & (span[:, None] == span[:, :, None])
    logits = model(IDS, LENGTH, context, span)
    wanted = relative_cpm1(model, IDS, see)
    torch.testing.assert_close(logits[real], wanted[real], rtol=1e-5, atol=1e-5)
    out = model(input_ids=IDS, length=LENGTH, context=context, span=span)
    assert torch.equal(out.logits, logits)
    left = model(input_ids=IDS, attention_mask=MASK).logits
    wanted = relative_cpm1(model, IDS, real[:, None] & before)
    torch.testing.assert_close(left[real], wanted[real], rtol=1e-5, atol=1e-5)


def test_modelcenters_directories_of_cpm1_and_cpm2(tmp_path: Path) -> None:
    """A CPM1 under the names of its own layers; the file that `bmt.save` wrote there."""
    wanted = small("CPM1")
    values = {name: value.detach() for name, value in wanted.named_parameters()}
    tensors = {
        "input_embedding.weight": values["model.embed.weight"],
        "position_bias.relative_attention_bias": values["model.rel_bias.weight"],
        "encoder.output_layernorm.weight": values["model.norm.weight"],
        "output_projection.weight": values["head.weight"],
    }
    names = {
        "attn_norm": "self_att.layernorm_before_attention",
        **{f"attn.{n}_proj": f"self_att.self_attention.project_{n}" for n in "qkv"},
        "attn.o_proj": "self_att.self_attention.attention_out",
        "mlp_norm": "ffn.layernorm_before_ffn",
        **{"mlp.gate_proj": "ffn.ffn.w_in.w_0", "mlp.up_proj": "ffn.ffn.w_in.w_1"},
        "mlp.down_proj": "ffn.ffn.w_out",
    }
    for i in range(2):
        for ours, theirs in names.items():
            source = values[f"model.layers.{i}.{ours}.weight"]
            tensors[f"encoder.layers.{i}.{theirs}.weight"] = source
    (tmp_path / "config.json").write_text(json.dumps({**SMALL["CPM1"], "half": False}))
    torch.save(tensors, tmp_path / "pytorch_model.pt")
    model = old.CPM1.from_pretrained(tmp_path).eval()
    assert torch.equal(model(IDS, LENGTH), wanted(IDS, LENGTH))
    del tensors["output_projection.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.pt")
    with pytest.raises(CheckpointError, match="missing: output_projection"):
        old.CPM1.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"bmt\.save"):
        model.save_pretrained(tmp_path / "out")


def test_cpm1_reads_on() -> None:
    model = small("CPM1")
    whole = model(input_ids=IDS, length=torch.tensor([12, 12])).logits
    first = model(input_ids=IDS[:, :5], use_cache=True)
    past = first.past_key_values
    rest = model(input_ids=IDS[:, 5:], use_cache=True, past_key_values=past)
    found = torch.cat((first.logits, rest.logits), 1)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


def test_cpm2_is_called_in_both_ways() -> None:
    model = small("CPM2")
    logits = model(IDS, LENGTH, IDS.flip(1), LENGTH)
    sources = {"input_ids": IDS, "length": LENGTH}
    out = model(**sources, decoder_input_ids=IDS.flip(1), decoder_length=LENGTH)
    assert torch.equal(out.logits, logits)
    assert out.encoder_last_hidden_state.shape == (2, 12, 32)
    by_name = model(enc_input=IDS, enc_length=LENGTH, dec_input=IDS.flip(1), dec_length=LENGTH)
    assert torch.equal(by_name, logits)


def test_fields_of_the_originals_configs() -> None:
    """They are accepted, kept, and told; what would change numbers is refused."""
    assert old.GLMConfig(eop_tok_id=3).eop_tok_id == 3
    assert old.GLMConfig().eop_tok_id == 50007
    assert old.OPTConfig(prefix="<s>").prefix == "<s>"
    assert old.OPTConfig().prefix == "</s>"
    assert old.CPM1Config().pos_bias_type == "relative"
    assert old.CPM1Config(dim_model=64, num_heads=2, pos_bias_type="none").pos_bias_type == "none"
    assert old.CPM2Config(pos_bias_type="relative", tied=False, norm_bias=False).dim_ff == 1920
    assert old.CPM3Config(max_exact_rate=0.25, length_scale=True).dim_model == 4096
    for kind, wrong in (
        (old.CPM1Config, {"pos_bias_type": "rotary"}),
        (old.CPM1Config, {"att_bias": True}),
        (old.CPM2Config, {"attn_scale": True}),
        (old.CPM3Config, {"max_distance_rate": 0.5}),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            kind(**wrong)


def test_submodules_of_the_originals() -> None:
    from bmforge.compat.model_center.model import config
    from bmforge.compat.model_center.model.config import CPM1Config, VitConfig

    assert VitConfig is old.ViTConfig is old.VitConfig
    assert CPM1Config is old.CPM1Config
    assert all(hasattr(config, name) for name in config.__all__)
