"""Checkpoints of ModelCenter give ModelCenter's numbers: unused weights, dropout, GELU's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

import bmforge.compat.model_center.model as old
from bmforge.models.formats.model_center_config import OLD_FAMILIES
from bmforge.nn.mlp import ACTIVATIONS

IDS = torch.arange(12).reshape(2, 6) % 7 + 3


def tiny_bert(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a tiny tied encoder in ModelCenter's form; return its tensors."""
    sizes = {"vocab_size": 32, "dim_model": 16, "num_heads": 2, "dim_head": 8, "dim_ff": 32}
    segments = 2 if name == "Bert" else 1
    config = getattr(old, f"{name}Config")(
        **sizes, num_layers=1, position_size=24, type_size=segments, dropout_p=0.0
    )
    config.to_json_file(folder / "config.json")
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "input_embedding.weight": (32, 16),
        "position_embedding.weight": (24, 16),
        "token_type_embedding.weight": (segments, 16),
        "encoder.output_layernorm": (16,),
        "pooler.dense": (16, 16),
        "lm_head.dense": (16, 16),
        "lm_head.layer_norm": (16,),
        "lm_head.decoder": (32, 16),
    }
    layer = "encoder.layers.0"
    shapes[f"{layer}.self_att.layernorm_before_attention"] = (16,)
    shapes[f"{layer}.ffn.layernorm_before_ffn"] = (16,)
    for part in ("project_q", "project_k", "project_v", "attention_out"):
        shapes[f"{layer}.self_att.self_attention.{part}"] = (16, 16)
    shapes[f"{layer}.ffn.ffn.w_in.w"] = (32, 16)
    shapes[f"{layer}.ffn.ffn.w_out"] = (16, 32)
    tensors = {}
    for key, shape in shapes.items():
        if key.endswith("embedding.weight"):
            tensors[key] = torch.randn(shape, generator=generator)
        else:
            tensors[f"{key}.weight"] = torch.randn(shape, generator=generator) / 4 + (
                len(shape) == 1
            )
            tensors[f"{key}.bias"] = torch.randn(shape[0], generator=generator) / 4
    tensors["lm_head.decoder.weight"] = tensors["input_embedding.weight"].clone()
    return tensors


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_a_tied_encoder_ignores_the_decoder_weight(name: str, tmp_path: Path) -> None:
    """ModelCenter trains the embedding alone, so the saved copy is out of date."""
    tensors = tiny_bert(tmp_path, name)
    torch.save(tensors, tmp_path / "pytorch_model.pt")
    call: dict[str, Any] = {"input_ids": IDS, "length": torch.tensor([6, 4])}
    with torch.no_grad():
        expected = getattr(old, name).from_pretrained(tmp_path)(**call, output_logits=True)
        tensors["lm_head.decoder.weight"] += 0.1
        torch.save(tensors, tmp_path / "pytorch_model.pt")
        found = getattr(old, name).from_pretrained(tmp_path)(**call, output_logits=True)
    assert torch.equal(found.logits, expected.logits)


def test_an_opened_t5_has_no_dropout_unless_the_program_asks(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2, feed_forward_proj="gated-gelu")
    assert config.dropout_rate == 0.1
    reference = transformers.T5ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(input_ids=IDS, decoder_input_ids=IDS).logits
        model = old.T5.from_pretrained(tmp_path)
        assert model.training
        found = model(input_ids=IDS, decoder_input_ids=IDS, output_logits=True).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    config = old.T5Config.from_pretrained(tmp_path, dropout_p=0.3)
    assert old.T5.from_pretrained(tmp_path, config=config).model.config.dropout == 0.3


@pytest.mark.parametrize("family", ["Bert", "GPT2", "GPTJ", "CPM2", "GLM"])
def test_gelu_is_the_exact_one(family: str) -> None:
    """As in ModelCenter's feed-forward layer; "gelu_new" is the tanh form."""
    table = OLD_FAMILIES[family].activations
    name = "gated_gelu" if family == "CPM2" else "gelu"
    x = torch.linspace(-4, 4, 101)
    assert torch.equal(ACTIVATIONS[table[name]](x), F.gelu(x))
    tanh = ACTIVATIONS[table["gated_gelu_new" if family == "CPM2" else "gelu_new"]](x)
    torch.testing.assert_close(tanh, F.gelu(x, approximate="tanh"))


def test_the_gate_of_t5_is_exact_here_and_in_transformers() -> None:
    ours = OLD_FAMILIES["T5"].activations["gated_gelu"]
    config = transformers.T5Config(feed_forward_proj=ours)
    x = torch.linspace(-4, 4, 101)
    assert config.is_gated_act
    theirs = transformers.activations.ACT2FN[config.dense_act_fn]
    torch.testing.assert_close(theirs(x), F.gelu(x))
    assert torch.equal(ACTIVATIONS[config.dense_act_fn](x), F.gelu(x))
