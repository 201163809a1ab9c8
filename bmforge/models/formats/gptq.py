"""Reads GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ) checkpoints of 4- or 8-bit integers.

A linear layer X has ``X.qweight``, ``X.qzeros``, ``X.scales`` (and, with GPTQ, ``X.g_idx``) instead
of ``X.weight``. Weights are ``scale * (q - zero)``, with a scale and a zero point per group of
inputs. ``g_idx`` contains each input's group index; with ``desc_act``, the inputs of a group are
not consecutive.

Source: the layouts of AutoGPTQ, GPTQModel and AutoAWQ ("gemm"); Frantar et al., "GPTQ" (2022), Lin
et al., "AWQ" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.models.formats.gguf_blocks import QuantizedGroups
from bmforge.models.formats.packed_config import leave_out_packing, read_raw_config
from bmforge.models.formats.safe_file import TensorFile, read_slice
from bmforge.nn.packing import QuantSpec

__all__ = ["Packing", "PackedLinears", "find_packing", "without_packing"]

_METHODS = ("gptq", "awq")
# For each nibble of AWQ's int32, lowest first: which of eight adjacent outputs it contains.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = ("qweight", "qzeros", "scales")
# Fields of calibration and kernels, which do not affect how the tensors are decoded.
_WITHOUT_EFFECT = frozenset(
    [
        "damp_percent",
        "damp_auto_increment",
        "static_groups",
        "true_sequential",
        "model_name_or_path",
        "dataset",
        "meta",
        "model_file_base_name",
        "modules_to_not_convert",
        "is_marlin_format",
        "exllama_config",
        "use_exllama",
        "block_name_to_quantize",
        "modules_in_block_to_quantize",
        "tokenizer",
        "pad_token_id",
        "cache_block_outputs",
        "batch_size",
        "module_name_preceding_first_block",
        "backend",
        "lm_head",
        "do_fuse",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "max_input_length",
        "model_seqlen",
        "use_cuda_fp16",
        "pack_impl",
        "hyb_act",
        "act_group_aware",
        "mse",
        "activation_weighted_mse",
        "v2",
        "v2_alpha",
        "gptaq",
        "foem",
        "hessian",
        "fallback",
        "failsafe",
        "gc_mode",
        "wait_for_submodule_finalizers",
        "auto_forward_data_parallel",
        "dense_vram_strategy",
        "dense_vram_strategy_devices",
        "moe_vram_strategy",
        "moe_vram_strategy_devices",
        "moe",
        "vram_strategy",
        "offload_to_disk",
        "offload_to_disk_path",
        "calibration_data_device",
        "uri",
        "quantizer",
        "device",
    ]
)
# Fields whose values are used or validated below.
_READ = frozenset(
    [
        "quant_method",
        "method",
        "bits",
        "w_bit",
        "group_size",
        "q_group_size",
        "desc_act",
        "sym",
        "checkpoint_format",
        "format",
        "version",
        "zero_point",
        "pack_dtype",
        "dynamic",
    ]
)


@dataclass(frozen=True)
class Packing:
    """Layout of a checkpoint's packed integers.

    Args:
        method: "gptq" or "awq".
        bits: bits per integer: 4, or 8 for GPTQ.
        group_size: number of inputs that share a scale; -1 for all inputs.
        zero_offset: offset added to the stored zero points.
    """

    method: str
    bits: int
    group_size: int
    zero_offset: int


def without_packing(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without its `quantization_config`, as for an unquantized model.

    Raises:
        ConfigError: the packing is not supported.
    """
    return leave_out_packing(raw, _find)


def find_packing(directory: Path) -> Packing | None:
    """Return the packing of a checkpoint's weights; None if they are not packed.

    Raises:
        ConfigError: the packing is not supported.
    """
    return _find(read_raw_config(directory))


def _find(raw: Mapping[str, Any]) -> Packing | None:
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method = quantization.get("quant_method", quantization.get("method"))
    if method not in _METHODS:
        return None
    bits: Any = quantization.get("bits", quantization.get("w_bit", 4))
    group: Any = quantization.get("group_size", quantization.get("q_group_size", 128))
    understood = _WITHOUT_EFFECT | _READ
    problems = [
        f"{name}={quantization[name]!r}"
        for name in quantization
        if name not in understood and quantization[name]
    ]
    if bits not in ((4, 8) if method == "gptq" else (4,)):
        problems.append(f"bits={bits!r}")
    if type(group) is not int or (group < 1 and group != -1):
        problems.append(f"group_size={group!r}")
    form, more = _find_format(quantization, method)
    problems += more
    if quantization.get("pack_dtype", "int32") != "int32":
        problems.append(f"pack_dtype={quantization['pack_dtype']!r}")
    # A "-:" pattern excludes layers from quantization; other patterns override bits or group size.
    overrides = [name for name in quantization.get("dynamic") or {} if not name.startswith("-:")]
    if overrides:
        problems.append(f"dynamic={overrides[0]!r}")
    if method == "awq" and quantization.get("zero_point") is False:
        problems.append("zero_point=False")
    if problems:
        raise ConfigError(
            f"the quantization_config of this {method} checkpoint has unsupported fields: "
            f"{', '.join(problems)} (supported: GPTQ of 4 or 8 bits in the formats 'gptq' and "
            "'gptq_v2', AWQ of 4 bits in the format 'gemm'). Use a checkpoint with a supported "
            "scheme, or the unquantized model."
        )
    return Packing(method, bits, group, int(method == "gptq" and form == "gptq"))


def _find_format(quantization: Mapping[str, Any], method: str) -> tuple[str, list[str]]:
    """Return the format name, and an error message for each unsupported format field."""
    old, usual = ("checkpoint_format", "gptq") if method == "gptq" else ("version", "gemm")
    supported = ("gptq", "gptq_v2") if method == "gptq" else ("gemm",)
    names = {
        field: str(quantization[field]).lower()
        for field in (old, "format")
        if quantization.get(field)
    }
    problems = [f"{field}={name!r}" for field, name in names.items() if name not in supported]
    if len(set(names.values())) > 1 and not problems:
        problems.append(" and ".join(f"{field}={name!r}" for field, name in names.items()))
    return next(iter(names.values()), usual), problems


class PackedLinears:
    """Packed linear layers of a checkpoint, read as float weights; see `TensorFile`.

    Args:
        files: mapping from tensor name to the file with the tensor.
        packing: layout of the packed integers.

    Raises:
        CheckpointError: tensors of a layer are missing, or their shapes contradict each other.
    """

    def __init__(self, files: Mapping[str, TensorFile], packing: Packing) -> None:
        self.files, self.packing = files, packing
        self.per_word = 32 // packing.bits
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._specs: dict[str, QuantSpec | None] = {}
        self._orders: dict[str, Tensor] = {}  # layer -> group index of each input (desc_act)
        self.parts: set[str] = set()
        for name in files:
            stem, _, part = name.rpartition(".")
            if part == "qweight":
                self.shapes[f"{stem}.weight"] = self._check(stem)
                self.parts |= {f"{stem}.{part}" for part in (*_PARTS, "g_idx")}

    def dtype(self, name: str) -> torch.dtype:
        """Return fp32, the dtype of the dequantized values."""
        return torch.float32

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Dequantize a slice into `target`, a contiguous fp32 CPU tensor of the same shape."""
        inputs, group = slices[1], self._group(self.shapes[name][1])
        values, zeros, scales = self._read_parts(name, slices)
        order = self._orders.get(name.removesuffix(".weight"))
        of = torch.arange(inputs.start, inputs.stop) // group - inputs.start // group
        of = of if order is None else order[inputs]
        target.copy_(((values - zeros[of]).float() * scales[of]).t())

    def stored_spec(self, name: str) -> QuantSpec | None:
        """Return the QuantSpec equivalent to a layer's quantization, or None if there is none.

        The spec is symmetric if every zero point is the middle of the integer range.
        """
        if name not in self._specs:
            self._specs[name] = self._find_spec(name)
        return self._specs[name]

    def _find_spec(self, name: str) -> QuantSpec | None:
        columns = self.shapes[name][1]
        group = max(0, self.packing.group_size)
        is_ordered = name.removesuffix(".weight") in self._orders
        if group % 32 or (group and columns % group) or is_ordered:
            return None
        zeros = self._read_zeros(name, slice(0, -(-columns // self._group(columns))))
        is_symmetric = bool((zeros == 1 << (self.packing.bits - 1)).all())
        scales = f"{name.removesuffix('.weight')}.scales"
        is_half = self.files[scales].dtype(scales) == torch.float16
        kind: Any = "float16" if is_symmetric and is_half else "float32"
        spec = QuantSpec(self.packing.bits, group, is_symmetric, scale_dtype=kind)
        return spec if spec.fits(columns) else None

    def read_groups(self, name: str, slices: tuple[slice, ...]) -> QuantizedGroups:
        """Return the stored integers, scales and minima of complete rows.

        Args:
            name: name of a layer that has a `stored_spec`.
            slices: slice of rows, and a slice of all columns.
        """
        values, zeros, scales = (part.t() for part in self._read_parts(name, slices))
        middle = 1 << (self.packing.bits - 1)
        spec = self.stored_spec(name)
        assert spec is not None
        is_signed = spec.symmetric or spec.bits == 8
        integers = (values - middle if is_signed else values).to(torch.int8)
        minima = None
        if not spec.symmetric:
            minima = -((zeros - middle * is_signed).float() * scales)
        return QuantizedGroups(integers.unflatten(1, (scales.shape[1], -1)), scales, minima)

    def _read_parts(self, name: str, slices: tuple[slice, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return integers (inputs, outputs), and zero points and scales (groups, outputs)."""
        stem, (rows, inputs) = name.removesuffix(".weight"), slices
        group = self._group(self.shapes[name][1])
        groups = slice(inputs.start // group, (inputs.stop - 1) // group + 1)
        if stem in self._orders:  # an input may belong to any group
            groups = slice(0, -(-self.shapes[name][1] // group))
        scales = self._read(f"{stem}.scales", (groups, rows)).float()
        zeros = self._read_zeros(name, groups)[:, rows]
        along = self._outputs if self.packing.method == "awq" else self._inputs
        return along(f"{stem}.qweight", inputs, rows), zeros, scales

    def _read_zeros(self, name: str, groups: slice) -> Tensor:
        """Return the zero points of a slice of groups as a (groups, outputs) tensor."""
        outputs = slice(0, self.shapes[name][0])
        zeros = self._outputs(f"{name.removesuffix('.weight')}.qzeros", groups, outputs)
        return zeros + self.packing.zero_offset

    def _check(self, stem: str) -> tuple[int, int]:
        """Validate the tensors of a layer; return the shape of its weight."""
        shapes = {part: self._shape(f"{stem}.{part}") for part in _PARTS}
        rows, columns = shapes["qweight"]
        is_awq = self.packing.method == "awq"
        outputs, inputs = (columns, rows) if not is_awq else (columns * self.per_word, rows)
        inputs = inputs if is_awq else inputs * self.per_word
        groups = -(-inputs // self._group(inputs))
        expected = {"qzeros": (groups, outputs // self.per_word), "scales": (groups, outputs)}
        if outputs % self.per_word or any(shapes[part] != expected[part] for part in expected):
            raise CheckpointError(
                f"the packed tensors of {stem} have inconsistent shapes: {shapes}. Download the "
                "checkpoint again."
            )
        self._find_order(stem, inputs, groups)
        return outputs, inputs

    def _find_order(self, stem: str, inputs: int, groups: int) -> None:
        """Store the group index of each input if the inputs of a group are not consecutive."""
        name = f"{stem}.g_idx"
        if name not in self.files:
            return
        order = self._read(name, (slice(0, inputs),)).to(torch.int64)
        if torch.equal(order, torch.arange(inputs) // self._group(inputs)):
            return
        if not bool(((order >= 0) & (order < groups)).all()):
            raise CheckpointError(
                f"{name} contains group indices outside of the layer's {groups} groups. "
                "Download the checkpoint again."
            )
        self._orders[stem] = order

    def _group(self, inputs: int) -> int:
        return inputs if self.packing.group_size == -1 else self.packing.group_size

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.files[name].shapes[name] if name in self.files else ()
        if len(shape) != 2:
            raise CheckpointError(
                f"the tensor {name} of a packed layer is missing or is not a matrix (shape "
                f"{shape}). Download the checkpoint again."
            )
        return shape

    def _read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        return read_slice(self.files[name], name, slices)

    def _inputs(self, name: str, inputs: slice, outputs: slice) -> Tensor:
        """Return an (inputs, outputs) slice of integers that are packed along the inputs."""
        count = self.per_word
        words = slice(inputs.start // count, -(-inputs.stop // count))
        unpacked = self._unpack(self._read(name, (words, outputs)))
        integers = unpacked.transpose(1, 2).flatten(0, 1)
        first = words.start * count
        return integers[inputs.start - first : inputs.stop - first]

    def _outputs(self, name: str, rows: slice, outputs: slice) -> Tensor:
        """Return a (rows, outputs) slice of integers that are packed along the outputs."""
        count = self.per_word
        words = slice(outputs.start // count, -(-outputs.stop // count))
        unpacked = self._unpack(self._read(name, (rows, words)))
        if self.packing.method == "awq":
            unpacked = unpacked[..., torch.tensor(_AWQ_ORDER).argsort()]
        first = words.start * count
        return unpacked.flatten(1)[:, outputs.start - first : outputs.stop - first]

    def _unpack(self, words: Tensor) -> Tensor:
        """Unpack each word's integers into a new last dim, lowest bits first."""
        shifts = torch.arange(0, 32, self.packing.bits, dtype=torch.int32)
        return words[..., None] >> shifts & (1 << self.packing.bits) - 1
