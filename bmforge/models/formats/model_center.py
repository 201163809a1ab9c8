"""Reads ModelCenter checkpoints: `config.json` with its field names, `pytorch_model.pt`.

The weights are one pickled dict of tensors, usually fp16; it is memory-mapped and loaded with
`weights_only=True`. Source: ModelCenter's layers and its converters from Hugging Face, which this
module inverts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.logging import get_logger, track
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.formats.hf_format import read_pickle
from bmforge.models.formats.model_center_config import (
    OLD_FAMILIES,
    is_padded,
    read_old_config,
    tell_family,
)
from bmforge.models.hub import FAMILIES
from bmforge.models.init import materialize_

__all__ = [
    "apply_name_rules",
    "fill_model_center",
    "is_model_center",
    "load_model_center",
    "t5_factor",
    "model_center_name",
    "undo_factor",
]

_WEIGHTS = "pytorch_model.pt"
_T5_FACTOR = 100.0
# RMS threshold: T5's published embeddings have a larger RMS, scaled-down ones a smaller RMS.
_SMALL_EMBEDDING = 0.3
_ROWS = 4096
_LISTED = 20

# bmforge's names -> ModelCenter's, applied in this order; {up} is w_1 with a gate, else w.
_NAME_RULES = (
    (r"\.attn\.([qkv])_global_proj\.", r".self_att.self_attention.project_\1_global."),
    (r"\.attn\.([qkv])_proj\.", r".self_att.self_attention.project_\1."),
    (r"\.attn\.o_proj\.", r".self_att.self_attention.attention_out."),
    (r"\.cross_attn\.([qkv])_proj\.", r".cross_att.self_attention.project_\1."),
    (r"\.cross_attn\.o_proj\.", r".cross_att.self_attention.attention_out."),
    (r"\.cross_attn_norm\.", r".cross_att.layernorm_before_attention."),
    (r"\.attn_norm\.", r".self_att.layernorm_before_attention."),
    (r"\.mlp_norm\.", r".ffn.layernorm_before_ffn."),
    (r"\.mlp\.gate_proj\.", r".ffn.ffn.w_in.w_0."),
    (r"\.mlp\.up_proj\.", r".ffn.ffn.w_in.{up}."),
    (r"\.mlp\.down_proj\.", r".ffn.ffn.w_out."),
    (r"^rel_bias\.weight$", r"position_bias.relative_attention_bias"),
    (r"^(enc|dec)oder\.rel_bias\.weight$", r"position_bias_\1.relative_attention_bias"),
    (r"^norm\.", r"encoder.norm."),
    (r"^(encoder|decoder)\.norm\.", r"\1.output_layernorm."),
    (r"^layers\.", r"encoder.layers."),
    (r"^lm_head\.", r"output_projection."),
    (r"^mlm_head\.norm\.", r"lm_head.layer_norm."),
    (r"^mlm_head\.", r"lm_head."),
    (r"^embed\.", r"input_embedding."),
    (r"^embed_positions\.", r"position_embedding."),
    (r"^embed_prompt\.", r"prompt_embedding."),
    (r"^embed_segments\.", r"token_type_embedding."),
    (r"^embed_blocks\.", r"block_position_embedding."),
    (r"^embed_patches\.", r"patch_embed.proj."),
    (r"^embed_class$", r"patch_embed.cls_token"),
    (r"^embed_positions$", r"patch_embed.pos_embed"),
    (r"^pooler\.", r"pooler.dense."),
    (r"^classifier\.", r"cls_projection."),
)
# Names of older ModelCenter versions, and of its ViT -> the current names.
_OLD_NAMES = (
    (r"^(model|bert|roberta|longformer)\.", ""),
    (r"^output_projection\.w\.", "output_projection."),
    (r"^blocks\.", "encoder."),
    (r"^head\.", "cls_projection."),
)


def is_model_center(directory: Path) -> bool:
    """Return True if a directory contains a ModelCenter checkpoint."""
    return (directory / _WEIGHTS).is_file()


def load_model_center(
    directory: Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    allow_unknown: tuple[str, ...] = (),
) -> Model:
    """Load a ModelCenter checkpoint as a bmforge model, on the CPU.

    Args:
        directory: directory with `config.json` and `pytorch_model.pt`.
        family: a name in `FAMILIES`; if None, it is identified by the tensor names.
        dtype: dtype of the parameters (default: the file's, or fp32 for a T5 whose weights were
            scaled down for fp16).
        allow_unknown: names of unknown config fields to ignore.

    Raises:
        ConfigError: the family or a field is not supported.
        CheckpointError: tensors are missing, unexpected or have the wrong shape; all are listed.
    """
    raw = read_config_file(directory)
    tensors = _rename(read_pickle(directory / _WEIGHTS), _OLD_NAMES)
    family = family or tell_family(tensors, raw)
    if family not in OLD_FAMILIES or family not in FAMILIES:
        supported = sorted(OLD_FAMILIES.keys() & FAMILIES.keys())
        raise ConfigError(
            f"unsupported family: family={family!r} (supported: {', '.join(supported)})."
        )
    if family not in ("T5", "CPM2"):  # one stack, called "decoder" in old versions
        tensors = _rename(tensors, ((r"^decoder\.", "encoder."),))
    values = read_old_config(family, raw, tensors, allow_unknown)
    factor = 1.0
    if family == "T5":
        factor = t5_factor(raw, tensors)
        values |= _convert_t5(values, raw, tensors, factor)
    _drop_padding(family, tensors)
    config = _make_config(family, values)
    stored = next(iter(tensors.values())).dtype
    dtype = dtype or (stored if factor == 1.0 else torch.float32)
    model = FAMILIES[family].from_config(config, device="meta", dtype=dtype)
    if config.head == "token_classification":
        tensors.setdefault("cls_projection.bias", torch.zeros(config.num_labels))
    return _fill(model, family, tensors, directory, factor)


def fill_model_center(
    model: Model, directory: Path, absent: Mapping[str, Tensor] | None = None
) -> Model:
    """Load a ModelCenter checkpoint into a model on the meta device with the same tensor names.

    The compatibility classes use this; `load_model_center` builds models of bmforge's families.

    Args:
        model: model on the meta device.
        directory: directory of the checkpoint.
        absent: tensors that the checkpoint lacks, under ModelCenter's naming.

    Raises:
        CheckpointError: tensors are missing, unexpected or have the wrong shape; all are listed.
    """
    tensors = _rename(read_pickle(directory / _WEIGHTS), _OLD_NAMES)
    return _fill(model, "", {**(absent or {}), **tensors}, directory)


def _fill(
    model: Model, family: str, tensors: Mapping[str, Tensor], directory: Path, factor: float = 1.0
) -> Model:
    """Copy tensors into a model on the meta device; `factor` is the scale of T5's weights."""
    sources = {name: model_center_name(model, family, name) for name, _ in model.named_parameters()}
    _check_fit(model, sources, tensors, directory)
    materialize_(model)
    with torch.no_grad():
        for name, parameter in track(list(model.named_parameters()), "load weights"):
            source, undo = tensors[sources[name]], undo_factor(name, factor)
            parameter.copy_(source if undo == 1.0 else source.float() * undo)
    return model.eval()


def _rename(tensors: Mapping[str, Tensor], pairs: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = re.sub(old, new, name)
        out[name] = tensor
    return out


def _drop_padding(family: str, tensors: dict[str, Tensor]) -> None:
    """Remove the last row of GPT-2's vocabulary, which is padding to an even size."""
    if family == "GPT2" and is_padded(tensors["input_embedding.weight"]):
        for name in ("input_embedding.weight", "output_projection.weight"):
            if name in tensors:
                tensors[name] = tensors[name][:-1]


def _make_config(family: str, values: Mapping[str, Any]) -> ModelConfig:
    """Build the config from its field values."""
    config_class = FAMILIES[family].config_class
    if values.get("head", "") not in ("", *config_class.heads):
        raise ConfigError(
            f"cls_head is not supported, because {family} has no token classification head."
        )
    field_names = {f.name for f in fields(config_class) if f.init}
    return config_class(**{name: value for name, value in values.items() if name in field_names})


def model_center_name(model: Model, family: str, name: str) -> str:
    """Return ModelCenter's name for a parameter of bmforge."""
    if family in OLD_FAMILIES and OLD_FAMILIES[family].needed.get("post_layer_norm"):
        name = _place_post_norm(name, model.config.num_layers)
    return apply_name_rules(name, model.config.is_gated)


def apply_name_rules(name: str, is_gated: bool) -> str:
    """Replace the parts of a parameter name by ModelCenter's; `is_gated` is true for gated MLPs."""
    for own, old in _NAME_RULES:
        name = re.sub(own, old, name)
    return name.replace("{up}", "w_1" if is_gated else "w")


def _place_post_norm(name: str, num_layers: int) -> str:
    """Return the name that ModelCenter uses for a norm of a post-norm model.

    In ModelCenter every norm belongs to the layer after it: the embedding's norm to the first
    attention, the norm after attention to the MLP, and the norm after the MLP to the next block or,
    in the last block, to the end of the stack (the final norm).
    """
    match = re.fullmatch(r"(?:layers\.(\d+)\.(attn|mlp)|embed)_norm\.(\w+)", name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    if part == "attn":
        return f"layers.{layer}.mlp_norm.{kind}"
    following = 0 if layer is None else int(layer) + 1
    return f"norm.{kind}" if following == num_layers else f"layers.{following}.attn_norm.{kind}"


def _check_fit(
    model: Model, sources: Mapping[str, str], tensors: Mapping[str, Tensor], directory: Path
) -> None:
    """Raise an error for missing, unexpected or wrongly shaped tensors; log ignored ones.

    `sources` maps bmforge's parameter names to ModelCenter's.
    """
    shapes = {sources[name]: tuple(p.shape) for name, p in model.named_parameters()}
    missing = [name for name in shapes if name not in tensors]
    wrong = [
        f"{name} has shape {tuple(tensors[name].shape)}, but the config needs {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    unused = (
        {"lm_head.decoder.weight"} if getattr(model.config, "tie_word_embeddings", False) else ()
    )
    unread = [
        name
        for name in tensors
        if name not in shapes and name not in unused and not _is_copy(name, tensors)
    ]
    lacks_lm_head = model.config.head in ("none", "token_classification")
    others = ("pooler.", "lm_head.", "output_projection.") if lacks_lm_head else ("pooler.",)
    extra = [name for name in unread if not name.startswith(others)]
    if missing or wrong or extra:
        parts = (("missing", missing), ("unexpected", extra), ("wrong shape", wrong))
        text = "; ".join(f"{title}: {', '.join(n[:_LISTED])}" for title, n in parts if n)
        raise CheckpointError(
            f"the tensors in {str(directory / _WEIGHTS)!r} do not match {type(model).__name__}: "
            f"{text}. Check config.json, or copy the weight file again."
        )
    if unread:
        get_logger().info(
            "head %r does not use these tensors: %s", model.config.head, ", ".join(unread)
        )


def _is_copy(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return True if a tensor duplicates another: a tied head, or GPT-J's second norm."""
    if name in ("output_projection.weight", "lm_head.decoder.weight"):
        original = "input_embedding.weight"
    else:
        original = name.replace("ffn.layernorm_before_ffn", "self_att.layernorm_before_attention")
    if original == name or original not in tensors:
        return False
    return torch.equal(tensors[name], tensors[original])


def t5_factor(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> float:
    """Return the factor by which T5's residual stream was scaled down for fp16.

    Norms cancel the scale, so the config does not mention it. It is detected from the embedding,
    whose published values are 1 and more. (FLAN-T5 stayed in fp32 without scaling.)
    """
    embed = tensors["input_embedding.weight"][:_ROWS].float()
    is_small = embed.square().mean().sqrt().item() < _SMALL_EMBEDDING
    return _T5_FACTOR if raw.get("scale") or is_small else 1.0


def undo_factor(name: str, factor: float) -> float:
    """Return the factor that restores a parameter of a T5 that was scaled down for fp16.

    Outputs to the residual stream were divided by 100. The embedding and the output projection of
    attention were divided directly; the MLP's two matrices were divided by 10 each, which commutes
    with ReLU and with the linear half of a gated MLP.
    """
    if name == "embed.weight" or name.endswith("attn.o_proj.weight"):
        return factor
    return math.sqrt(factor) if name.endswith(("up_proj.weight", "down_proj.weight")) else 1.0


def _convert_t5(
    values: Mapping[str, Any], raw: Mapping[str, Any], tensors: dict[str, Tensor], factor: float
) -> dict[str, Any]:
    """Convert T5's relative position bias and head to Hugging Face's form; return config fields.

    T5 1.0, which has no gate, computes logits from hidden states h and the embedding E as
    D^-0.5 h E'. ModelCenter saved either only the scaled embedding and the factor 100 D^-0.5
    (`scale`), or a copy of E as the head. Later T5 versions do not scale, and have a separate head.
    """
    heads, buckets = values["num_heads"], values.get("num_buckets", 32)
    for name in ("position_bias_enc", "position_bias_dec"):
        bias = tensors.get(f"{name}.relative_attention_bias")
        # Early versions saved it transposed; a square matrix is assumed not to be transposed.
        if bias is not None and bias.shape == (heads, buckets) and heads != buckets:
            tensors[f"{name}.relative_attention_bias"] = bias.t()
    embed, own = tensors["input_embedding.weight"], tensors.get("output_projection.weight")
    scale = _T5_FACTOR / math.sqrt(embed.shape[1]) if raw.get("scale") else 1.0
    if own is None:
        is_tied = bool(values["tie_word_embeddings"])
        if is_tied and scale == 1.0 and factor != 1.0:
            tensors["output_projection.weight"] = embed
            return {"tie_word_embeddings": False, "scale_head": False}
        return {"tie_word_embeddings": is_tied, "scale_head": is_tied and scale != 1.0}
    is_copy = _are_near(own, embed, factor if scale == 1.0 else 1.0)
    if is_copy:
        del tensors["output_projection.weight"]
    elif scale != 1.0:
        tensors["output_projection.weight"] = own.float() * scale
    is_first = values["feed_forward"] == "relu" or scale != 1.0
    return {"tie_word_embeddings": is_copy, "scale_head": is_copy and is_first}


def _are_near(own: Tensor, embed: Tensor, factor: float) -> bool:
    """Return True if `own` equals `factor` times `embed`, up to fp16 rounding."""
    if own.shape != embed.shape:
        return False
    pieces = zip(own.split(_ROWS), embed.split(_ROWS), strict=True)
    return all(torch.allclose(a.float(), b.float() * factor, 2e-3, 1e-3) for a, b in pieces)
