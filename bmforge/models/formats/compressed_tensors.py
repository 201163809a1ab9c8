"""Reads checkpoints in vLLM's compressed-tensors format; `compressed_write.py` writes them.

A linear layer X has either ``X.weight`` in int8 and ``X.weight_scale``, or ``X.weight_packed``
(32-bit words of 4- or 8-bit integers), ``X.weight_scale`` and ``X.weight_shape``. Asymmetric layers
also have ``X.weight_zero_point``, packed along the rows. Weights are ``scale * (q - zero)``, with
one scale per row or per group of inputs.

Source: files written by the package compressed-tensors (0.20).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

__all__ = [
    "CompressedTensorsScheme",
    "INT_FORMAT",
    "METHOD",
    "PACKED_FORMAT",
    "CompressedLinears",
    "find_compression",
    "pack_words",
    "unpack_words",
    "without_compression",
]

METHOD = "compressed-tensors"
INT_FORMAT, PACKED_FORMAT = "int-quantized", "pack-quantized"
_WORD_BITS = 32


@dataclass(frozen=True)
class _IntegerFormat:
    """Storage of a layer's integers: bits per integer, and whether they are packed into words."""

    bits: int
    is_packed: bool


@dataclass(frozen=True)
class CompressedTensorsScheme:
    """Quantization scheme of a compressed-tensors checkpoint.

    Args:
        bits: bits per packed integer.
        group_size: number of inputs that share a scale; 0 means all inputs of a row.
        rounds_tokens: quantize activations to 8 bits, with one scale per token.
        symmetric: True if weights have no zero points.
    """

    bits: int
    group_size: int
    rounds_tokens: bool = True
    symmetric: bool = True


def without_compression(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without its `quantization_config`, as for an uncompressed model.

    Raises:
        ConfigError: the compression is not supported.
    """
    return leave_out_packing(raw, _find)


def find_compression(directory: Path) -> CompressedTensorsScheme | None:
    """Return the quantization scheme of a checkpoint; None if it has a different format.

    Raises:
        ConfigError: the scheme is not supported.
    """
    return _find(read_raw_config(directory))


def _find(raw: Mapping[str, Any]) -> CompressedTensorsScheme | None:
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return None
    groups = quantization.get("config_groups")
    problems: list[str] = []
    forms: set[tuple[Any, Any, bool, bool]] = set()
    if not isinstance(groups, dict) or not groups:
        groups = {}
        problems.append("no config_groups")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            problems.append(f"{name} without weights")
            continue
        tokens = group.get("input_activations") or {}
        is_symmetric = weights.get("symmetric", True) is not False
        forms.add((weights.get("num_bits"), weights.get("group_size"), bool(tokens), is_symmetric))
        problems += [f"{name}: {problem}" for problem in _weight_problems(weights)]
        problems += [f"{name}: input_activations.{problem}" for problem in _token_problems(tokens)]
        if group.get("output_activations"):
            problems.append(f"{name}: output_activations")
    form = quantization.get("format")
    if form not in (INT_FORMAT, PACKED_FORMAT):
        problems.append(f"format={form!r}")
    if quantization.get("quantization_status", "compressed") != "compressed":
        problems.append(f"quantization_status={quantization['quantization_status']!r}")
    problems += [
        f"{name}={quantization[name]!r}"
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config")
        if quantization.get(name)
    ]
    if len(forms) > 1:
        problems.append(
            "more than one scheme: (bits, group size, activations, "
            f"symmetric)={sorted(map(str, forms))}"
        )
    if problems:
        raise ConfigError(
            f"the quantization_config of this {METHOD} checkpoint has unsupported fields: "
            f"{'; '.join(problems)} (supported: 4-bit or 8-bit integer weights, per group or per "
            "channel, also with dynamic per-token int8 activations). Use a checkpoint with a "
            "supported scheme, or the unquantized model."
        )
    bits, group, has_tokens, is_symmetric = forms.pop()
    return CompressedTensorsScheme(int(bits), max(0, group or 0), has_tokens, is_symmetric)


def _token_problems(tokens: Mapping[str, Any]) -> list[str]:
    """Return an error message for each field that contradicts dynamic per-token int8."""
    required = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    usual = {"type": "int", "symmetric": True}
    if not tokens:
        return []
    return [
        f"{name}={value!r}"
        for name, want in required.items()
        if (value := tokens.get(name, usual.get(name))) != want
    ]


def _weight_problems(weights: Mapping[str, Any]) -> list[str]:
    allowed: dict[str, tuple[Any, ...]] = {
        "num_bits": (4, 8),
        "type": ("int",),
        "symmetric": (True, False),
        "strategy": ("channel", "group"),
        "dynamic": (False,),
    }
    usual = {"type": "int", "symmetric": True, "dynamic": False}
    problems = [
        f"{name}={value!r}"
        for name, supported in allowed.items()
        if (value := weights.get(name, usual.get(name))) not in supported
    ]
    if weights.get("actorder") in ("group", True):
        problems.append(f"actorder={weights['actorder']!r}")
    return problems


class CompressedLinears:
    """Compressed linear layers of a checkpoint, read as float weights; see `TensorFile`.

    Args:
        files: mapping from tensor name to the file with the tensor.
        how: quantization scheme of the checkpoint.

    Raises:
        CheckpointError: tensors of a layer are missing, or their shapes contradict each other.
    """

    def __init__(self, files: Mapping[str, TensorFile], how: CompressedTensorsScheme) -> None:
        self.files, self._how = files, how
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parts: set[str] = set()
        self._kinds: dict[str, _IntegerFormat] = {}
        for name in files:
            stem, _, part = name.rpartition(".")
            if part != "weight_scale":
                continue
            weight, packed = f"{stem}.weight", f"{stem}.weight_packed"
            is_packed = packed in files
            self._kinds[weight] = _IntegerFormat(how.bits if is_packed else 8, is_packed)
            self.shapes[weight] = self._check(stem, self._kinds[weight])
            self.parts |= {name, weight, packed, f"{stem}.weight_shape"}
            self.parts.add(f"{stem}.weight_zero_point")

    def _check(self, stem: str, kind: _IntegerFormat) -> tuple[int, int]:
        """Validate the tensors of a layer; return the shape of its weight."""
        weight_part, scale = (
            "weight_packed" if kind.is_packed else "weight",
            self._shape(stem, "scale"),
        )
        name = f"{stem}.{weight_part}"
        stored_shape = self.files[name].shapes[name] if name in self.files else ()
        shape = tuple(stored_shape)
        if kind.is_packed:
            shape = tuple(self._read(f"{stem}.weight_shape", (slice(0, 2),)).tolist())
            words = -(-shape[1] * kind.bits // _WORD_BITS) if len(shape) == 2 else 0
            if tuple(stored_shape) != (shape[0], words):
                shape = ()
        elif name in self.files and self.files[name].dtype(name) != torch.int8:
            shape = ()
        fits = len(shape) == 2 and len(scale) == 2 and scale[0] == shape[0]
        if not fits or not scale[1] or shape[1] % scale[1]:
            raise CheckpointError(
                f"the compressed tensors of {stem} have inconsistent shapes: {weight_part} has "
                f"{tuple(stored_shape)}, and weight_scale has {scale}. Download the checkpoint "
                "again."
            )
        return shape[0], shape[1]

    def _shape(self, stem: str, part: str) -> tuple[int, ...]:
        name = f"{stem}.weight_{part}"
        return tuple(self.files[name].shapes[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return fp32, the dtype of the dequantized values."""
        return torch.float32

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Dequantize a slice into `target`, a contiguous fp32 CPU tensor of the same shape."""
        rows, columns = slices
        all_columns = slice(0, self.shapes[name][1])
        integers, scales = self._read_integers(name, (rows, all_columns))
        if not self._how.symmetric:
            integers = integers - self._read_zeros(name, rows)[..., None].to(torch.int16)
        target.copy_((integers * scales[..., None]).flatten(1)[:, columns])

    def stored_spec(self, name: str) -> QuantSpec | None:
        """Return the QuantSpec equivalent to a layer's quantization, or None if there is none."""
        stem, columns = name.removesuffix(".weight"), self.shapes[name][1]
        groups = self._shape(stem, "scale")[1]
        group, bits = columns // groups, self._kinds[name].bits
        if groups == 1 and group != self._how.group_size:
            group = 0
        if group % (32 if bits == 4 else 16):
            return None
        scale = f"{stem}.weight_scale"
        if not self._how.symmetric:
            activations = "int8" if group or self._how.rounds_tokens else "float"
            wide = QuantSpec(bits, group, False, activations, scale_dtype="float32")  # type: ignore[arg-type]
            return wide if wide.fits(columns) else None
        is_half = self.files[scale].dtype(scale) == torch.float16
        if not is_half:  # lossless if fp16 represents all scales exactly
            values = self._read_whole(scale).float()
            is_half = bool(group) and torch.equal(values.half().float(), values)
        spec = QuantSpec(
            bits,
            group,
            activations="int8" if group or self._how.rounds_tokens else "float",
            scale_dtype="float16" if is_half else "float32",
        )
        return spec if spec.fits(columns) else None

    def read_groups(self, name: str, slices: tuple[slice, ...]) -> QuantizedGroups:
        """Return the stored integers, scales and minima of complete rows.

        Args:
            name: Hugging Face name of a layer's weight.
            slices: slice of rows, and a slice of all columns.
        """
        integers, scales = self._read_integers(name, slices)
        if self._how.symmetric:
            return QuantizedGroups(integers, scales, None)
        zeros = self._read_zeros(name, slices[0])
        if self._kinds[name].bits == 4:  # bmforge stores them unsigned
            integers, zeros = integers + 8, zeros + 8
        return QuantizedGroups(integers, scales, (0 - zeros.float()) * scales)  # no -0.0

    def _read_integers(self, name: str, slices: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """Return the integers (R, G, W) of complete rows, and their fp32 scales (R, G)."""
        rows, columns = slices[0], self.shapes[name][1]
        stem, kind = name.removesuffix(".weight"), self._kinds[name]
        groups = self._shape(stem, "scale")[1]
        scales = self._read(f"{stem}.weight_scale", (rows, slice(0, groups))).float()
        if kind.is_packed:
            words = self.files[f"{stem}.weight_packed"].shapes[f"{stem}.weight_packed"][1]
            packed = self._read(f"{stem}.weight_packed", (rows, slice(0, words)))
            values = unpack_words(packed, kind.bits)[:, :columns]
        else:
            values = self._read(f"{stem}.weight", (rows, slice(0, columns)))
        return values.unflatten(1, (groups, -1)), scales

    def _read_zeros(self, name: str, rows: slice) -> Tensor:
        """Return the signed zero points of rows as an int8 tensor (R, G)."""
        stem, kind = name.removesuffix(".weight"), self._kinds[name]
        stored = self._read_whole(f"{stem}.weight_zero_point")
        if kind.is_packed:  # a word contains the zero points of several rows
            stored = unpack_words(stored.t().contiguous(), kind.bits).t()
        if stored.shape[1:] != self._shape(stem, "scale")[1:] or stored.shape[0] < rows.stop:
            raise CheckpointError(
                f"{stem}.weight_zero_point has the unpacked shape {tuple(stored.shape)}, but "
                f"weight_scale has the shape {tuple(self._shape(stem, 'scale'))}. The file is "
                "damaged. Download or quantize the model again."
            )
        return stored[rows]

    def _file(self, name: str) -> TensorFile:
        if name not in self.files:
            raise CheckpointError(
                f"the tensor {name} of a compressed layer is missing. Download the checkpoint "
                "again."
            )
        return self.files[name]

    def _read_whole(self, name: str) -> Tensor:
        return self._read(name, [slice(0, n) for n in self._file(name).shapes[name]])

    def _read(self, name: str, slices: Sequence[slice]) -> Tensor:
        return read_slice(self._file(name), name, slices)


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Pack integers into 32-bit words, the first integer in the lowest bits.

    Shape:
        values: (rows, columns) int8, with values of 4 or 8 bits; returns (rows, words) int32
    """
    each = _WORD_BITS // bits
    wide = values.to(torch.int64) + (1 << (bits - 1))
    wide = torch.nn.functional.pad(wide, (0, -values.shape[1] % each))
    shifts = torch.arange(0, _WORD_BITS, bits)
    words = (wide.unflatten(1, (-1, each)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << _WORD_BITS), words).to(torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack the integers of 32-bit words, including padding columns.

    Shape:
        words: (rows, words) int32; returns (rows, columns) int8
    """
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    integers = words[..., None] >> shifts & (1 << bits) - 1
    return (integers - (1 << (bits - 1))).to(torch.int8).flatten(1)
