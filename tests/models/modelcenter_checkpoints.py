"""ModelCenter checkpoints made of transformers models, by its documented names.

There is no ModelCenter here, so the names, the scaling and the padding are written down once more,
from transformers' side: independent of the tables in `bmforge.models.formats.model_center`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

SCALE = 100


def save_model_center(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Write what ModelCenter's converters write."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.to(dtype).contiguous().clone() for name, tensor in tensors.items()}
    torch.save(kept, directory / "pytorch_model.pt")


def read_disk(model: Any, directory: Path) -> dict[str, Tensor]:
    """Return a transformers model's weights under the names that it publishes."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def _copy(out: dict[str, Tensor], ours: str, source: dict[str, Tensor], theirs: str) -> None:
    for kind in ("weight", "bias"):
        if f"{theirs}.{kind}" in source:
            out[f"{ours}.{kind}"] = source[f"{theirs}.{kind}"]


def gpt2(source: dict[str, Tensor], stack: str = "encoder") -> dict[str, Tensor]:
    """Fused and transposed weights taken apart, one row of zeros below the vocabulary."""
    source = {name.removeprefix("transformer."): tensor for name, tensor in source.items()}
    words = source["wte.weight"]
    out = {"input_embedding.weight": torch.cat([words, torch.zeros(1, words.shape[1])])}
    out["position_embedding.weight"] = source["wpe.weight"]
    _copy(out, f"{stack}.output_layernorm", source, "ln_f")
    for i in range(sum(name.endswith("ln_1.weight") for name in source)):
        to, of = f"{stack}.layers.{i}", f"h.{i}"
        _copy(out, f"{to}.self_att.layernorm_before_attention", source, f"{of}.ln_1")
        _copy(out, f"{to}.ffn.layernorm_before_ffn", source, f"{of}.ln_2")
        fused, bias = source[f"{of}.attn.c_attn.weight"], source[f"{of}.attn.c_attn.bias"]
        for part, w, b in zip("qkv", fused.chunk(3, 1), bias.chunk(3), strict=True):
            out[f"{to}.self_att.self_attention.project_{part}.weight"] = w.t()
            out[f"{to}.self_att.self_attention.project_{part}.bias"] = b
        for ours, theirs in (
            ("self_att.self_attention.attention_out", "attn.c_proj"),
            ("ffn.ffn.w_in.w", "mlp.c_fc"),
            ("ffn.ffn.w_out", "mlp.c_proj"),
        ):
            out[f"{to}.{ours}.weight"] = source[f"{of}.{theirs}.weight"].t()
            out[f"{to}.{ours}.bias"] = source[f"{of}.{theirs}.bias"]
    return out


def gptj(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """One norm of a layer, stored twice; an early version's name of the head."""
    out: dict[str, Tensor] = {}
    _copy(out, "input_embedding", source, "transformer.wte")
    _copy(out, "output_projection.w", source, "lm_head")
    _copy(out, "decoder.output_layernorm", source, "transformer.ln_f")
    for i in range(sum(name.endswith("ln_1.weight") for name in source)):
        to, of = f"decoder.layers.{i}", f"transformer.h.{i}"
        _copy(out, f"{to}.self_att.layernorm_before_attention", source, f"{of}.ln_1")
        _copy(out, f"{to}.ffn.layernorm_before_ffn", source, f"{of}.ln_1")
        for part in "qkv":
            name = f"{to}.self_att.self_attention.project_{part}"
            _copy(out, name, source, f"{of}.attn.{part}_proj")
        _copy(out, f"{to}.self_att.self_attention.attention_out", source, f"{of}.attn.out_proj")
        _copy(out, f"{to}.ffn.ffn.w_in.w", source, f"{of}.mlp.fc_in")
        _copy(out, f"{to}.ffn.ffn.w_out", source, f"{of}.mlp.fc_out")
    return out


def opt(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """OPT's stack is named decoder."""
    out: dict[str, Tensor] = {}
    _copy(out, "input_embedding", source, "model.decoder.embed_tokens")
    _copy(out, "position_embedding", source, "model.decoder.embed_positions")
    _copy(out, "decoder.output_layernorm", source, "model.decoder.final_layer_norm")
    for i in range(sum(name.endswith("fc1.weight") for name in source)):
        to, of = f"decoder.layers.{i}", f"model.decoder.layers.{i}"
        _copy(
            out, f"{to}.self_att.layernorm_before_attention", source, f"{of}.self_attn_layer_norm"
        )
        for part in "qkv":
            name = f"{to}.self_att.self_attention.project_{part}"
            _copy(out, name, source, f"{of}.self_attn.{part}_proj")
        _copy(
            out, f"{to}.self_att.self_attention.attention_out", source, f"{of}.self_attn.out_proj"
        )
        _copy(out, f"{to}.ffn.layernorm_before_ffn", source, f"{of}.final_layer_norm")
        _copy(out, f"{to}.ffn.ffn.w_in.w", source, f"{of}.fc1")
        _copy(out, f"{to}.ffn.ffn.w_out", source, f"{of}.fc2")
    return out


def llama(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Llama."""
    out: dict[str, Tensor] = {}
    _copy(out, "input_embedding", source, "model.embed_tokens")
    _copy(out, "output_projection", source, "lm_head")
    _copy(out, "encoder.output_layernorm", source, "model.norm")
    for i in range(sum(name.endswith("input_layernorm.weight") for name in source)):
        to, of = f"encoder.layers.{i}", f"model.layers.{i}"
        _copy(out, f"{to}.self_att.layernorm_before_attention", source, f"{of}.input_layernorm")
        for part in "qkv":
            name = f"{to}.self_att.self_attention.project_{part}"
            _copy(out, name, source, f"{of}.self_attn.{part}_proj")
        _copy(out, f"{to}.self_att.self_attention.attention_out", source, f"{of}.self_attn.o_proj")
        _copy(out, f"{to}.ffn.layernorm_before_ffn", source, f"{of}.post_attention_layernorm")
        _copy(out, f"{to}.ffn.ffn.w_in.w_0", source, f"{of}.mlp.gate_proj")
        _copy(out, f"{to}.ffn.ffn.w_in.w_1", source, f"{of}.mlp.up_proj")
        _copy(out, f"{to}.ffn.ffn.w_out", source, f"{of}.mlp.down_proj")
    return out


def encoder(source: dict[str, Tensor], stem: str, prefix: str = "") -> dict[str, Tensor]:
    """BERT and its relatives: each norm belongs to the part that follows it."""
    body = {n.removeprefix(f"{stem}."): t for n, t in source.items()}
    out: dict[str, Tensor] = {}
    _copy(out, f"{prefix}input_embedding", body, "embeddings.word_embeddings")
    _copy(out, f"{prefix}position_embedding", body, "embeddings.position_embeddings")
    _copy(out, f"{prefix}token_type_embedding", body, "embeddings.token_type_embeddings")
    layers = sum(name.endswith("intermediate.dense.weight") for name in body)
    for i in range(layers):
        to, of = f"{prefix}encoder.layers.{i}", f"encoder.layer.{i}"
        before = "embeddings.LayerNorm" if i == 0 else f"encoder.layer.{i - 1}.output.LayerNorm"
        _copy(out, f"{to}.self_att.layernorm_before_attention", body, before)
        for part, word in zip("qkv", ("query", "key", "value"), strict=True):
            name = f"{to}.self_att.self_attention.project_{part}"
            _copy(out, name, body, f"{of}.attention.self.{word}")
            _copy(out, f"{name}_global", body, f"{of}.attention.self.{word}_global")
        _copy(
            out, f"{to}.self_att.self_attention.attention_out", body, f"{of}.attention.output.dense"
        )
        _copy(out, f"{to}.ffn.layernorm_before_ffn", body, f"{of}.attention.output.LayerNorm")
        _copy(out, f"{to}.ffn.ffn.w_in.w", body, f"{of}.intermediate.dense")
        _copy(out, f"{to}.ffn.ffn.w_out", body, f"{of}.output.dense")
    last = f"encoder.layer.{layers - 1}.output.LayerNorm"
    _copy(out, f"{prefix}encoder.output_layernorm", body, last)
    words = body["embeddings.word_embeddings.weight"]
    head = "cls.predictions" if "cls.predictions.bias" in source else "lm_head"
    inner = "transform." if head == "cls.predictions" else ""
    norm = "LayerNorm" if inner else "layer_norm"
    _copy(out, "lm_head.dense", source, f"{head}.{inner}dense")
    _copy(out, "lm_head.layer_norm", source, f"{head}.{inner}{norm}")
    out["lm_head.decoder.weight"] = words
    out["lm_head.decoder.bias"] = source[f"{head}.bias"]
    out[f"{prefix}pooler.dense.weight"] = torch.zeros(words.shape[1], words.shape[1])
    out[f"{prefix}pooler.dense.bias"] = torch.zeros(words.shape[1])
    return out


def vit(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """ViT."""
    out = {
        "patch_embed.cls_token": source["vit.embeddings.cls_token"],
        "patch_embed.pos_embed": source["vit.embeddings.position_embeddings"],
    }
    _copy(out, "patch_embed.proj", source, "vit.embeddings.patch_embeddings.projection")
    _copy(out, "blocks.output_layernorm", source, "vit.layernorm")
    _copy(out, "head", source, "classifier")
    for i in range(sum(name.endswith("intermediate.dense.weight") for name in source)):
        to, of = f"blocks.layers.{i}", f"vit.encoder.layer.{i}"
        _copy(out, f"{to}.self_att.layernorm_before_attention", source, f"{of}.layernorm_before")
        for part, word in zip("qkv", ("query", "key", "value"), strict=True):
            name = f"{to}.self_att.self_attention.project_{part}"
            _copy(out, name, source, f"{of}.attention.attention.{word}")
        name = f"{to}.self_att.self_attention.attention_out"
        _copy(out, name, source, f"{of}.attention.output.dense")
        _copy(out, f"{to}.ffn.layernorm_before_ffn", source, f"{of}.layernorm_after")
        _copy(out, f"{to}.ffn.ffn.w_in.w", source, f"{of}.intermediate.dense")
        _copy(out, f"{to}.ffn.ffn.w_out", source, f"{of}.output.dense")
    return out


def t5(source: dict[str, Tensor], scale: int = SCALE, head: str = "own") -> dict[str, Tensor]:
    """T5, what writes to the residual stream divided by `scale`, the MLP's half of it each.

    Args:
        source: a transformers model's weights.
        scale: 1 for FLAN-T5, which was not divided.
        head: "own" stores one, a copy of the embedding where that is tied; "embedding" does not.
    """
    out = {"input_embedding.weight": source["shared.weight"] / scale}
    if head == "own":
        out["output_projection.weight"] = source.get("lm_head.weight", source["shared.weight"])
    for stack in ("encoder", "decoder"):
        out[f"{stack}.output_layernorm.weight"] = source[f"{stack}.final_layer_norm.weight"]
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        out[f"position_bias_{stack[:3]}.relative_attention_bias"] = source[bias]
        mlp = 1 if stack == "encoder" else 2
        for i in range(sum(n.endswith(f".layer.{mlp}.DenseReluDense.wo.weight") for n in source)):
            to, of = f"{stack}.layers.{i}", f"{stack}.block.{i}.layer"
            parts = [("self_att", f"{of}.0", "SelfAttention")]
            parts += [("cross_att", f"{of}.1", "EncDecAttention")] if mlp == 2 else []
            for ours, theirs, module in parts:
                _copy(
                    out, f"{to}.{ours}.layernorm_before_attention", source, f"{theirs}.layer_norm"
                )
                for part in "qkv":
                    name = f"{to}.{ours}.self_attention.project_{part}"
                    _copy(out, name, source, f"{theirs}.{module}.{part}")
                written = source[f"{theirs}.{module}.o.weight"] / scale
                out[f"{to}.{ours}.self_attention.attention_out.weight"] = written
            _copy(out, f"{to}.ffn.layernorm_before_ffn", source, f"{of}.{mlp}.layer_norm")
            dense, half = f"{of}.{mlp}.DenseReluDense", scale**0.5
            if f"{dense}.wi.weight" in source:
                out[f"{to}.ffn.ffn.w_in.w.weight"] = source[f"{dense}.wi.weight"] / half
            else:
                out[f"{to}.ffn.ffn.w_in.w_0.weight"] = source[f"{dense}.wi_0.weight"]
                out[f"{to}.ffn.ffn.w_in.w_1.weight"] = source[f"{dense}.wi_1.weight"] / half
            out[f"{to}.ffn.ffn.w_out.weight"] = source[f"{dense}.wo.weight"] / half
    return out
