"""Converts the metadata of a GGUF file to the fields of config.json, with lookup tables.

The families then validate these fields. An architecture's metadata key that is in no table keeps
its name, so that the families reject it as an unknown field.

Source: ``constants.py`` of the ``gguf`` package (Keys); the defaults that an architecture implies
are from llama.cpp's ``llama-model.cpp`` and ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.errors import CheckpointError, suggest
from bmforge.gguf_header import GgufHeader, read_gguf_header
from bmforge.models.formats.gguf_architectures import (
    ARCHITECTURES,
    CAPS,
    LAYER_NORM,
    Architecture,
)
from bmforge.models.formats.gguf_rope import read_rope

__all__ = [
    "SAMPLING_KEYS",
    "find_architecture",
    "read_gguf_config",
    "to_raw",
]

_MAX_NUMBER = 1 << 31
# Optional metadata key -> key whose value is the default, or None for no default.
_OPTIONAL = {
    "attention.head_count_kv": "attention.head_count",
    "decoder_block_count": "block_count",
    "attention.key_length": None,
    "decoder_start_token_id": None,
    "feed_forward_length": None,
    **dict.fromkeys(CAPS),
}
# Metadata of an architecture that is redundant, or does not affect the outputs.
_SAID_ELSEWHERE = (
    *("vocab_size", "tensor_data_layout", "pooling_type"),
    "rope.scaling.finetuned",
)


def find_architecture(header: GgufHeader) -> Architecture:
    """Return the architecture of a file's model.

    Raises:
        CheckpointError: the architecture is missing or not supported.
    """
    kind = header.metadata.get("general.architecture")
    kinds = sorted({architecture.kind for architecture in ARCHITECTURES.values()})
    if not isinstance(kind, str) or kind not in kinds:
        raise CheckpointError(
            f"{str(header.path)!r} has the unsupported architecture {kind!r} (supported: "
            f"{', '.join(kinds)}).{suggest(str(kind), kinds)}"
        )
    experts = header.metadata.get("llama.expert_count", 0)
    if kind == "llama" and (type(experts) is not int or experts > 0):
        return ARCHITECTURES["mixtral"]
    if kind == "olmo2" and "olmo2.attention.sliding_window" in header.metadata:
        return ARCHITECTURES["olmo3"]
    return next(
        architecture for architecture in ARCHITECTURES.values() if architecture.kind == kind
    )


def read_gguf_config(path: str | Path) -> dict[str, Any]:
    """Return the equivalent of config.json for the model of a GGUF file.

    Raises:
        CheckpointError: the file is damaged, its architecture is unknown, or a size is missing.
    """
    return to_raw(read_gguf_header(path))


def to_raw(header: GgufHeader) -> dict[str, Any]:
    """Return the equivalent of config.json for a parsed header; see `read_gguf_config`."""
    architecture = find_architecture(header)
    own = _Metadata(header, architecture.kind)
    raw: dict[str, Any] = dict(architecture.raw)
    for key, name in architecture.keys.items():
        value = own.number(key)
        if value is not None:
            raw[name] = value
    own.check_heads(raw, architecture)
    raw["vocab_size"] = own.size("token_embd.weight", 0)
    raw |= {name: own.size(*tensor_dim) for name, tensor_dim in architecture.sizes.items()}
    if architecture.name != "bert":
        raw["tie_word_embeddings"] = "output.weight" not in header.tensors
    if architecture.rotary:
        rope, keys = read_rope(header, architecture.kind, raw.get("head_dim") or _head_dim(raw))
        raw |= rope
        own.taken |= keys
    _SPECIAL.get(architecture.name, _add_nothing)(raw, own)
    for key, value in architecture.required.items():
        if own.number(key, value) != value:
            own.taken.remove(key)
    own.check_layers()
    raw |= own.rest()
    generation = _read_generation(header)
    return {**raw, "generation_config": generation} if generation else raw


# Published sampling options: key after "general.sampling." -> transformers' field.
SAMPLING_KEYS = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}


def _read_generation(header: GgufHeader) -> dict[str, Any]:
    """Return the equivalent of generation_config.json: EOS tokens and sampling options."""
    metadata = header.metadata
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    fields: dict[str, Any] = {
        "eos_token_id": list(dict.fromkeys(id for id in ends if type(id) is int))
    }
    for key, name in SAMPLING_KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            fields[name] = float(str(np.float32(value))) if isinstance(value, float) else value
    if fields.keys() & {"top_k", "top_p", "min_p", "temperature"}:
        fields["do_sample"] = fields.get("temperature", 1.0) > 0
        if not fields["do_sample"]:
            del fields["temperature"]
    return {name: value for name, value in fields.items() if value != []}


def _head_dim(raw: dict[str, Any]) -> int:
    return int(raw["hidden_size"] // raw["num_attention_heads"])


class _Metadata:
    """Metadata of a file's architecture; each value is validated when it is read."""

    def __init__(self, header: GgufHeader, kind: str) -> None:
        self.header, self.kind = header, kind
        self.taken: set[str] = {*_SAID_ELSEWHERE, "expert_count", *_TENSOR_SIZES}

    def names(self) -> list[str]:
        """Return the architecture's metadata keys, without the architecture's name."""
        prefix = f"{self.kind}."
        return [k.removeprefix(prefix) for k in self.header.metadata if k.startswith(prefix)]

    def number(self, key: str, default: Any = None) -> Any:
        """Return a number or flag; for a missing optional key, its default or None."""
        self.taken.add(key)
        value = self.header.metadata.get(f"{self.kind}.{key}", default)
        if value is None and key in _OPTIONAL:
            other = _OPTIONAL[key]
            return None if other is None else self.number(other)
        if isinstance(value, int | float) and 0 <= value < _MAX_NUMBER:
            # The shortest decimal with this fp32 value is the original config value.
            return float(str(np.float32(value))) if isinstance(value, float) else value
        raise CheckpointError(
            f"{str(self.header.path)!r} has {self.kind}.{key}={value!r} (expected: one number from "
            f"0 to {_MAX_NUMBER}). The file is damaged, or its layers have different sizes, which "
            "is not supported."
        )

    def size(self, tensor: str, dim: int) -> int:
        """Return the size of a tensor in one dim."""
        entry = self.header.tensors.get(tensor)
        if entry is None or len(entry.shape) <= dim:
            raise CheckpointError(
                f"{str(self.header.path)!r} does not contain the tensor {tensor!r}, which a "
                f"{self.kind} needs. If the file is one part of a split model, merge the parts "
                "with llama.cpp's gguf-split --merge."
            )
        return entry.shape[dim]

    def check_heads(self, raw: dict[str, Any], architecture: Architecture) -> None:
        """Set the head dim in `raw`, and check the file's sizes against the tensor shapes.

        Keys that contradict the head dim stay in the metadata that was not read, so that the family
        rejects them as unknown fields.
        """
        heads, width = self.number("attention.head_count"), self.number("embedding_length")
        if type(heads) is not int or heads < 1:
            raise CheckpointError(
                f"{str(self.header.path)!r} has an invalid number of attention heads: {heads}. "
                "Download the file again."
            )
        implied = width // heads
        name = architecture.keys.get("attention.key_length")
        if name is not None:
            raw.setdefault(name, implied)
        width = implied if name is None else raw[name]
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            if key not in architecture.keys and self.number(key, width) != width:
                self.taken.remove(key)
        sizes = {"token_embd.weight": (1, self.number("embedding_length"))}
        if name is not None:
            sizes[f"{'enc.' * (architecture.name == 't5')}blk.0.attn_q.weight"] = (0, heads * width)
        if "expert_count" in architecture.keys:
            sizes["blk.0.ffn_gate_inp.weight"] = (0, self.number("expert_count"))
        if architecture.name == "mixtral":
            sizes["blk.0.ffn_up_exps.weight"] = (1, self.number("feed_forward_length"))
        for tensor, (dim, expected) in sizes.items():
            if self.size(tensor, dim) != expected:
                raise CheckpointError(
                    f"{str(self.header.path)!r} is damaged: according to its metadata, dim {dim} "
                    f"of {tensor} has the size {expected}, but the shape of the tensor is "
                    f"{self.header.tensors[tensor].shape}. Download the file again."
                )

    def check_layers(self) -> None:
        """Raise an error if the file has fewer tensors than layers, before layers are built."""
        for key in {"block_count", "decoder_block_count"} & self.taken:
            count = self.number(key, 0)
            if count > len(self.header.tensors):
                raise CheckpointError(
                    f"{str(self.header.path)!r} is damaged: {self.kind}.{key}={count} exceeds the "
                    f"{len(self.header.tensors)} tensors of the file. Download the file again."
                )

    def rest(self) -> dict[str, Any]:
        """Return the metadata that was not read but may affect outputs, under its original keys."""
        out = {}
        for key in self.names():
            value = self.header.metadata[f"{self.kind}.{key}"]
            if key.startswith("rope.") and isinstance(value, int | float) and not value:
                value = str(value)  # configs ignore unknown fields that are 0; a text is rejected
            if key not in self.taken:
                out[f"{self.kind}.{key}"] = value if not hasattr(value, "tolist") else "an array"
        return out


_TENSOR_SIZES = ("expert_feed_forward_length", "expert_shared_feed_forward_length")


def _add_nothing(raw: dict[str, Any], own: _Metadata) -> None:
    """Do nothing: the architecture needs no further fields."""


def _llama(raw: dict[str, Any], own: _Metadata) -> None:
    for name, tensor in (("attention_bias", "attn_output"), ("mlp_bias", "ffn_down")):
        raw[name] = f"blk.0.{tensor}.bias" in own.header.tensors


def _minicpm(raw: dict[str, Any], own: _Metadata) -> None:
    """Convert the residual and logit scales in the metadata to MiniCPM's config fields."""
    raw["scale_depth"] *= math.sqrt(raw["num_hidden_layers"])
    if not raw["dim_model_base"] > 0:
        raise CheckpointError(
            f"{str(own.header.path)!r} has an invalid minicpm.logit_scale (allowed: numbers above "
            "0). Convert the original model to GGUF again."
        )
    raw["dim_model_base"] = round(raw["hidden_size"] / raw["dim_model_base"])


def _t5(raw: dict[str, Any], own: _Metadata) -> None:
    gated = "enc.blk.0.ffn_gate.weight" in own.header.tensors
    raw["feed_forward_proj"] = "gated-gelu" if gated else "relu"
    raw["scale_decoder_outputs"] = raw["tie_word_embeddings"]
    own.number(LAYER_NORM, 0.0)  # marked as read: a copy of the RMS epsilon
    for role, key in (("pad", "padding"), ("eos", "eos")):
        id = own.header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(id) is int:
            raw[f"{role}_token_id"] = id


def _bert(raw: dict[str, Any], own: _Metadata) -> None:
    if "cls.output.weight" in own.header.tensors:
        raw["architectures"] = ["BertForSequenceClassification"]
        raw["num_labels"] = own.size("cls.output.weight", 0)


def _glm4(raw: dict[str, Any], own: _Metadata) -> None:
    raw["partial_rotary_factor"] = own.number("rope.dimension_count") / raw["head_dim"]
    raw["attention_bias"] = "blk.0.attn_q.bias" in own.header.tensors


def _gpt_neox(raw: dict[str, Any], own: _Metadata) -> None:
    raw["rotary_pct"] = own.number("rope.dimension_count") / _head_dim(raw)
    raw["attention_bias"] = "blk.0.attn_qkv.bias" in own.header.tensors


def _falcon(raw: dict[str, Any], own: _Metadata) -> None:
    """Set the fields that distinguish Falcon-7B from later models with grouped-query attention."""
    raw["num_kv_heads"] = raw.pop("num_key_value_heads")
    raw["bias"] = "blk.0.attn_qkv.bias" in own.header.tensors
    if raw["num_kv_heads"] > 1:
        norms = 2 if "blk.0.attn_norm_2.weight" in own.header.tensors else 1
        raw |= {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}


def _gpt_oss(raw: dict[str, Any], own: _Metadata) -> None:
    """Set the fields that llama.cpp implies; without scaling, rope_type is "default"."""
    raw["attention_bias"] = "blk.0.attn_q.bias" in own.header.tensors
    scaling = raw["rope_scaling"] or {"rope_type": "default"}
    is_yarn = scaling["rope_type"] == "yarn"
    raw["rope_scaling"] = {**scaling, "truncate": False} if is_yarn else scaling


def _tied(raw: dict[str, Any], own: _Metadata) -> None:
    """Set the fields that llama.cpp implies for models whose head is the embedding."""
    raw["tie_word_embeddings"] = True


# Number of layers of Gemma 2 and 3 27B, whose attention scale llama.cpp derives differently.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _gemma(raw: dict[str, Any], own: _Metadata) -> None:
    """Set the fields that llama.cpp implies for Gemma 2 and 3."""
    if own.kind == "gemma2":
        raw["tie_word_embeddings"] = True
    is_27b = raw["num_hidden_layers"] == _LAYERS_OF_27B[own.kind]
    raw["query_pre_attn_scalar"] = _head_dim(raw) if is_27b else raw["head_dim"]
    if own.kind == "gemma3":
        raw["rope_local_base_freq"] = float(own.number("rope.freq_base_swa", 10000.0))


def _olmo3(raw: dict[str, Any], own: _Metadata) -> None:
    raw["rope_local_base_freq"] = float(own.number("rope.freq_base", 10000.0))


_SPECIAL = {
    "llama": _llama,
    "minicpm": _minicpm,
    "t5": _t5,
    "bert": _bert,
    "glm4": _glm4,
    "gpt-oss": _gpt_oss,
    "granite": _llama,
    **dict.fromkeys(("gemma", "cohere", "cohere2"), _tied),
    "gemma2": _gemma,
    "gemma3": _gemma,
    "olmo3": _olmo3,
    "gptneox": _gpt_neox,
    "falcon": _falcon,
}
