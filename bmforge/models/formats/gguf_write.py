"""Writes models as GGUF files for llama.cpp, with the package `gguf`.

Before any tensor is written, bmforge's own reader reads the metadata back: if GGUF cannot represent
the config, an error names the fields.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError, MissingDependencyError
from bmforge.files import check_place, partial_name, sync_directory
from bmforge.gguf_header import BLOCKS, GgufHeader, GgufTensor
from bmforge.logging import get_logger, track
from bmforge.models.base import Model
from bmforge.models.formats import gguf_values as packed
from bmforge.models.formats.gguf_architectures import ARCHITECTURES, Architecture
from bmforge.models.formats.gguf_config import to_raw
from bmforge.models.formats.gguf_names import (
    ROPE_TENSORS,
    find_rules,
    is_norm,
    is_permuted,
    permute_rows,
)
from bmforge.models.formats.gguf_rope import write_rope
from bmforge.models.rotary import rope_to_hf
from bmforge.models.weights import WeightRule, assemble_source, group_by_source
from bmforge.nn.mlp import ACTIVATIONS
from bmforge.provenance import to_metadata
from bmforge.records import find_parallel_record
from bmforge.surgery import persistent_tensors

__all__ = ["GgufType", "write_gguf"]

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}
# Tensors that llama.cpp requires in fp32, besides vectors.
_KEPT_WIDE = (
    *("ffn_gate_inp.weight", "position_embd.weight", "token_types.weight"),
    "_exps.bias",
)
_QUANTIZATION_VERSION = 2
# Config fields that do not affect a forward pass, or that are stored with the tokenizer.
_UNSAID = {
    *("raw", "head", "num_labels", "problem_type", "changes", "init_std", "model_type"),
    *("pad_token_id", "eos_token_id", "output_router_logits", "router_aux_loss_coef"),
}
_CLOSE = 1e-6
_FLOATS = (
    *("epsilon", "scale", "freq_base", "freq_base_swa", "factor", "beta_fast", "beta_slow"),
    "softcapping",
)
_WRITES_TEXT = ("language_model", "sequence_to_sequence")
_NO_TOKENS = {"tokenizer.ggml.model": "none"}


def write_gguf(
    model: Any,
    path: str | Path,
    kind: GgufType = "q8_0",
    *,
    tokens: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as a GGUF file; a temporary file is renamed when complete.

    Args:
        model: model of a family that GGUF supports, unmodified except for weight quantization.
        path: output file, which must end in ``.gguf``.
        kind: tensor type of matrices; vectors, routers and position tables are fp32. With
            "q4_0" the head (or tied embedding) is "q8_0". Matrices whose number of columns is not
            divisible by 32 are "f16".
        tokens: metadata of the tokenizer; None to omit it.
        overwrite: replace an existing file.

    Raises:
        CheckpointError: the file exists or cannot be written, or values exceed fp16.
        ConfigError: the file suffix or tensor type is wrong, or GGUF cannot represent the model.
        MissingDependencyError: `gguf` is not installed.

    Peak memory: one tensor, its encoded form, and some rows in fp32.
    """
    out = Path(path)
    check_target(out, kind, overwrite)
    architecture = _find(model)
    load, scales = packed.find_values(model, kind), packed.find_scales(model, kind)
    if model.config.changes:
        model = packed.describe_plain(model)
    values = _metadata(model, architecture)
    groups, left_out = _split_groups(find_rules(architecture.name, model))
    plan = _Plan(model, architecture, groups, kind, load)
    plan.scales = scales
    plan.extra = values.pop("tensors")
    _check_readable(model, architecture, values, plan)
    if left_out:
        get_logger().warning("GGUF %s does not store %s.", architecture.kind, ", ".join(left_out))
    values |= to_metadata(model.provenance)
    partial = out.with_name(partial_name(out.name))
    try:
        _write(partial, architecture, {**values, **(tokens or _NO_TOKENS)}, plan)
        os.replace(partial, out)
    except OSError as error:
        advice = "Free disk space, or choose another directory."
        raise CheckpointError(f"cannot write {str(out)!r} ({error}). {advice}") from error
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(out.absolute().parent)
    get_logger().info("%s: %s, %s", out, type(model).__name__, kind)
    return out


def check_target(out: Path, kind: str, overwrite: bool) -> None:
    """Raise an error if the file exists or cannot be written, or if the type is unknown."""
    if kind not in get_args(GgufType):
        raise ConfigError(
            f"type={kind!r} is not supported (supported: {', '.join(get_args(GgufType))})."
        )
    if out.suffix != ".gguf":
        raise ConfigError(f"the output file {str(out)!r} must have the extension .gguf.")
    if out.is_dir() or (out.exists() and not overwrite):
        raise CheckpointError(f"{str(out)!r} already exists. Choose another file name.")
    check_place(out, "target", is_file=True)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"the parent directory of {str(out)!r} does not exist. Create it first.")


def _find(model: Model) -> Architecture:
    """Return the GGUF architecture of a model.

    Raises:
        ConfigError: GGUF has no such architecture, or the model has changes that GGUF cannot
            represent.
    """
    kind = model.config.to_hf()["model_type"]
    kind = {"mt5": "t5"}.get(kind, kind)
    fitting = (entry for entry in ARCHITECTURES.values() if entry.raw["model_type"] == kind)
    architecture = next(fitting, None)
    name = type(model).__name__
    if architecture is None or not name.lower().startswith(_stem(architecture)):
        model_types = sorted(candidate.raw["model_type"] for candidate in ARCHITECTURES.values())
        raise ConfigError(
            f"{name} (model_type={kind!r}) is not supported in GGUF (supported: "
            f"{', '.join(model_types)})."
        )
    if any(change.kind != "quantize" for change in model.config.changes):
        raise ConfigError(
            f"this {name} has changes that GGUF does not support. Merge its adapters first."
        )
    if find_parallel_record(model) is not None:
        raise ConfigError(
            f"this {name} is parallelized. Save it with save_pretrained, and convert the "
            "saved model."
        )
    if architecture.name != "bert" and model.config.head not in _WRITES_TEXT:
        raise ConfigError(
            f"head={model.config.head!r} is not supported in GGUF (supported: heads that "
            "generate text). Load the model with such a head."
        )
    return architecture


def _stem(architecture: Architecture) -> str:
    """Return the lowercase prefix of the family's class name, derived from `model_type`."""
    kind = str(architecture.raw["model_type"]).removesuffix("_text").replace("_", "")
    return kind if "moe" in kind else kind.rstrip("23") if kind.startswith("qwen") else kind


def _metadata(model: Model, architecture: Architecture) -> dict[str, Any]:
    """Return the file's metadata and, under "tensors", RoPE factors that are stored as tensors."""
    config = model.config
    fields_by_hf_name = {
        **config.to_hf(),
        **{hf_name: getattr(config, field) for field, hf_name in config.hf_names.items()},
        **dict.fromkeys(("n_positions", "seq_length"), config.max_seq_len),
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    keys = {
        key: fields_by_hf_name[name]
        for key, name in architecture.keys.items()
        if fields_by_hf_name.get(name) is not None
    }
    keys["vocab_size"] = config.vocab_size
    if "attention.key_length" in keys:
        keys["attention.value_length"] = keys["attention.key_length"]
    keys |= _more(architecture, fields_by_hf_name, keys)
    tensors: dict[str, Tensor] = {}
    if architecture.rotary:
        rotary = rope_to_hf(config.rope_theta, config.rope_scaling)
        rope, tensors = write_rope({**fields_by_hf_name, **rotary}, config.head_dim)
        keys |= {"rope.dimension_count": config.rope_spec().rotary_dim, **rope}
        if architecture.local_base:
            keys["rope.freq_base_swa"] = config.local_rope_theta
    named = {f"{architecture.kind}.{key}": _typed(key, value) for key, value in keys.items()}
    return {"general.architecture": architecture.kind, **named, "tensors": tensors}


def _more(
    architecture: Architecture, hf_fields: dict[str, Any], keys: dict[str, Any]
) -> dict[str, Any]:
    """Return the metadata that an architecture's table `keys` does not cover."""
    if architecture.name == "minicpm":
        return {
            "residual_scale": hf_fields["scale_depth"] / math.sqrt(hf_fields["num_hidden_layers"]),
            "logit_scale": hf_fields["hidden_size"] / hf_fields["dim_model_base"],
        }
    if architecture.name == "t5":
        return {"attention.layer_norm_epsilon": keys["attention.layer_norm_rms_epsilon"]}
    more = dict(architecture.required)
    for name, key in (
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ):
        if name in architecture.sizes:
            more[key] = hf_fields[name]
    return more


def _typed(key: str, value: Any) -> Any:
    """Round a float to fp32, the precision of the file; return other values unchanged."""
    return float(np.float32(value)) if key.endswith(_FLOATS) else value


def _split_groups(
    rules: list[WeightRule],
) -> tuple[dict[str, list[WeightRule]], list[str]]:
    """Return a dict from GGUF name to `WeightRule`s, and the tensors without a GGUF name."""
    groups = group_by_source(rules)
    with_entry = {name: group for name, group in groups.items() if not name.startswith("bmforge.")}
    return with_entry, [g[0].parameter for name, g in groups.items() if name not in with_entry]


class _Plan:
    """Maps a model's tensors to the tensors of the file.

    Args:
        model: model to write.
        architecture: GGUF architecture of the model.
        groups: mapping from tensor name in the file to the `WeightRule`s of its parameters.
        kind: requested tensor type.
        values: function (tensor name) that returns the tensor.
    """

    def __init__(
        self,
        model: Model,
        architecture: Architecture,
        groups: dict[str, list[WeightRule]],
        kind: str,
        values: Callable[[str], Tensor],
    ) -> None:
        self.values = values
        self.tensors = persistent_tensors(model)
        self.architecture, self.groups, self.kind = architecture, groups, kind
        self.head_dim = model.config.head_dim
        self.extra: dict[str, Tensor] = {}
        self.scales: Callable[[str], Tensor | None] = lambda name: None
        self.head = "output.weight" if "output.weight" in groups else "token_embd.weight"

    def entries(self) -> dict[str, GgufTensor]:
        """Return a dict from tensor name to type, shape and byte size, in file order."""
        out = {}
        for name in (*self.extra, *self.groups):
            shape = self._shape(name)
            kind = self._kind_of(name, shape)
            values, block_bytes = BLOCKS[kind]
            out[name] = GgufTensor(kind, shape, 0, math.prod(shape) // values * block_bytes)
        return out

    def load(self, name: str) -> Tensor:
        """Return a complete tensor in the file's row order."""
        if name in self.extra:
            return self.extra[name]
        return self._assemble(name, self.values)

    def load_scales(self, name: str) -> Tensor | None:
        """Return the scale of every integer in a tensor; None if it is not stored as integers."""
        scales = {rule.parameter: self.scales(rule.parameter) for rule in self.groups.get(name, [])}
        existing = {key: scale for key, scale in scales.items() if scale is not None}
        complete = bool(existing) and len(existing) == len(scales)
        return self._assemble(name, existing.__getitem__) if complete else None

    def _assemble(self, name: str, values: Callable[[str], Tensor]) -> Tensor:
        tensor = assemble_source(self.groups[name], values)
        if self.architecture.permutes and is_permuted(name):
            tensor = permute_rows(tensor, self.head_dim)
        if self.architecture.norm_offset and is_norm(name):
            tensor = tensor.float() + self.architecture.norm_offset
        return tensor

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self.extra:
            return tuple(self.extra[name].shape)
        group = self.groups[name]
        return group[0].source_shape(tuple(self.tensors[group[0].parameter].shape))

    def _kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        is_row = len(shape) == 1 or shape[:-1] == (1,)
        if is_row or name in self.extra or name.endswith(_KEPT_WIDE):
            return "F32"
        kind = "q8_0" if self.kind == "q4_0" and name == self.head else self.kind
        has_blocks = shape[-1] % BLOCKS[kind.upper()][0] == 0
        return kind.upper() if has_blocks else "F16"


def _check_readable(
    model: Model, architecture: Architecture, values: dict[str, Any], plan: _Plan
) -> None:
    """Raise `ConfigError` if reading the file back would give a different config."""
    # RoPE scaling in tensors cannot be read back before they are written; `write_rope` checks it.
    tensors = {n: t for n, t in plan.entries().items() if n not in ROPE_TENSORS}
    if plan.extra:
        values = {key: value for key, value in values.items() if ".rope.scaling." not in key}
    config = model.config
    back = type(config).from_hf(to_raw(GgufHeader(Path("the new file"), values, tensors)))
    problems = []
    for field in fields(config):
        is_unsaid = field.name in _UNSAID or field.name.endswith("dropout")
        if is_unsaid or (field.name == "rope_scaling" and plan.extra):
            continue
        expected, got = getattr(config, field.name), getattr(back, field.name)
        if not _are_same(expected, got):
            problems.append(f"{field.name}={expected!r} (GGUF would store {got!r})")
    if problems:
        raise ConfigError(
            f"GGUF cannot represent these fields of a {architecture.kind}: "
            f"{'; '.join(problems)}. Keep the model in the Hugging Face format."
        )


def _are_same(first: Any, other: Any) -> bool:
    if isinstance(first, dict) and isinstance(other, dict):
        return first.keys() == other.keys() and all(_are_same(first[k], other[k]) for k in first)
    if isinstance(first, float) and isinstance(other, int | float):
        return math.isclose(first, other, rel_tol=_CLOSE)
    if isinstance(first, str) and first in ACTIVATIONS:
        return ACTIVATIONS[first] is ACTIVATIONS.get(other)
    return bool(first == other)


def _write(path: Path, architecture: Architecture, values: dict[str, Any], plan: _Plan) -> None:
    """Write metadata and tensors to `path`, and sync the file to disk."""
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError("gguf", "gguf", "Writing GGUF files") from error
    writer = gguf.GGUFWriter(path, architecture.kind)
    try:
        writer.add_file_type(_FILE_TYPES[plan.kind])
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        for key, value in values.items():
            if key != "general.architecture":  # written by GGUFWriter
                _add(writer, key, value)
        entries = plan.entries()
        for name, entry in entries.items():
            kind = gguf.GGMLQuantizationType[entry.kind]
            writer.add_tensor_info(
                name, entry.shape, np.dtype(np.float32), entry.size, raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, entry in track(list(entries.items()), "write tensors"):
            quantize = packed.make_quantizer(gguf, entry.kind)
            stored = np.empty(entry.size, np.uint8)
            done = 0
            scales = plan.load_scales(name) if entry.kind == "Q8_0" else None
            for part in packed.stored_parts(name, plan.load(name), entry.kind, quantize, scales):
                stored[done : done + part.size] = part
                done += part.size
            writer.write_tensor_data(stored)
        writer.flush()
        for file in writer.fout or ():
            os.fsync(file.fileno())
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a metadata value with the type that llama.cpp expects."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
