"""Launches the Triton kernels: chooses tile sizes and allocates outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.nn.packing import PANEL_ROWS, PackedMatrix, QuantSpec
from bmforge.nn.triton_kernels.attention import attend_pages, join_parts
from bmforge.nn.triton_kernels.checksum import hash_words
from bmforge.nn.triton_kernels.joint_products import multiply_matrices
from bmforge.nn.triton_kernels.products import dequantize
from bmforge.nn.triton_kernels.rows import (
    add_rms_norm,
    multiply_by_silu,
    quantize_rows,
    rotate_and_store,
    rotate_heads,
    store_heads,
)
from bmforge.nn.triton_kernels.softmax import cross_entropy_rows
from bmforge.nn.triton_kernels.tiles import choose_tile, up_to_power

__all__ = ["TritonKernels"]

# A packed matrix, the number of its rows, and the bias of its products.
_Factor = tuple[PackedMatrix, int, Tensor | None]

_PART_TOKENS = 256
_GATE_VALUES = 1024
_HASHED_WORDS = 4096
# Separate multiplications and additions for bit-identity with the CPU; not needed for attention.
_EXACT, _FUSED = {"enable_fp_fusion": False}, {"enable_fp_fusion": True}


@dataclass(frozen=True)
class TritonKernels:
    """The kernels for one kind of device.

    Args:
        emulates: compute dot products of bytes without NVIDIA's dp4a instruction.
        has_tensor_cores: whether Triton can use the device's int8 tensor cores (sm_80 or later).
    """

    emulates: bool
    has_tensor_cores: bool = True

    def quantize(
        self, x: Tensor, group: int, up: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return integers, scales and sums of activations; see `quantize_activations`.

        If `up` is given, ``silu(x) * up`` is quantized.

        Shape:
            x, up: (T, columns), contiguous; returns (T, columns) int8, (T, groups) fp32 and int32
        """
        tokens, columns = x.shape
        groups, padded = columns // group, up_to_power(group)
        values = torch.empty_like(x, dtype=torch.int8)
        scales = x.new_empty(tokens, groups, dtype=torch.float32)
        sums = x.new_empty(tokens, groups, dtype=torch.int32)
        at_once = max(1, 1024 // padded)
        grid = (tokens, -(-groups // at_once))
        warps = 4 if padded <= 4096 else 16
        # Triton needs a valid pointer for `up` even if the kernel does not read it.
        quantize_rows[grid](
            x, x if up is None else up, values, scales, sums,
            columns, group, padded, at_once, up is not None, num_warps=warps, **_EXACT,
        )  # fmt: skip
        return values, scales, sums

    def multiply(
        self, x: Tensor, matrix: PackedMatrix, rows: int, spec: QuantSpec, bias: Tensor | None
    ) -> Tensor:
        """Return ``x @ matrix.T + bias`` with quantized activations, in the dtype of x.

        Shape:
            x: (T, columns), contiguous -> (T, rows)
        """
        if not len(x):
            return x.new_empty(0, rows)
        quantized = self.quantize(x, spec.group_of(x.shape[1]))
        return self.multiply_quantized(quantized, [(matrix, rows, bias)], spec, x.dtype)[0]

    def multiply_quantized(
        self,
        quantized: tuple[Tensor, Tensor, Tensor],
        factors: Sequence[_Factor],
        spec: QuantSpec,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return the products of quantized activations with one to three matrices.

        Args:
            quantized: result of `quantize`, for at least one token.
            factors: matrices of one scheme, with their numbers of rows and their biases; all or
                none have a bias.
            spec: quantization scheme.
            dtype: dtype of the products.

        Shape:
            returns (T, rows) for each matrix
        """
        values, value_scales, sums = quantized
        tokens, columns = values.shape
        is_plain, has_bias = factors[0][0].minima is None, factors[0][2] is not None
        heights = [height for _, height, _ in factors]
        group = spec.group_of(columns)
        # Up to 4 tokens, dp4a with one warp per panel is faster, because a tile of the tensor cores
        # has 16 tokens. Devices without dp4a use their tensor cores for any number of tokens.
        is_tiled = self.has_tensor_cores and (tokens > 4 or self.emulates)
        tile = choose_tile(tokens, spec, group, is_plain=is_plain, is_tiled=is_tiled)
        outs = [values.new_empty(tokens, height, dtype=dtype) for height in heights]
        arguments: list[Tensor] = []
        for number in range(3):  # the kernel ignores copies of the first matrix
            matrix, _, bias = factors[number if number < len(factors) else 0]
            scales, minima = _scales_of(matrix, tile.kind != "wide")
            words = torch.uint8 if tile.kind == "tiles" else torch.int32
            out = outs[number if number < len(factors) else 0]
            bias = value_scales if bias is None else bias
            arguments += [matrix.packed.view(words), scales, minima, bias, out]
        parts = sum(-(-out.shape[1] // (PANEL_ROWS * tile.panels)) for out in outs)
        multiply_matrices[parts, -(-tokens // tile.tokens)](
            *arguments, values.view(torch.int8 if tile.kind == "tiles" else torch.int32),
            value_scales, sums, tokens, *heights, *[0] * (3 - len(factors)), len(factors),
            tile.kind, columns, tile.tokens, spec.bits, group, is_plain, has_bias,
            arguments[1].dtype == torch.int32, self.emulates, tile.stages, tile.per_iteration,
            tile.panels, num_warps=tile.warps, **_EXACT,
        )  # fmt: skip
        return outs

    def dequantize(
        self, matrix: PackedMatrix, rows: int, spec: QuantSpec, dtype: torch.dtype
    ) -> Tensor:
        """Dequantize a packed matrix to a dtype, (rows, columns); see `packing.unpack_matrix`."""
        panels, blocks, _ = matrix.packed.shape
        columns = blocks * 32 // spec.bits
        out = matrix.packed.new_empty(rows, columns, dtype=dtype)
        minima = matrix.scales if matrix.minima is None else matrix.minima
        at_once = 32
        dequantize[(panels, -(-blocks // at_once))](
            matrix.packed, matrix.scales, minima, out, rows, columns, spec.bits,
            spec.group_of(columns), matrix.minima is None, at_once, num_warps=4, **_EXACT,
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``residual + x`` (x without a residual) and its RMS norm times the weight.

        Shape:
            x and residual: (..., D), contiguous, of the same dtype; weight: (D,)
        """
        width = x.shape[-1]
        total = x if residual is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=weight.dtype)
        padded = up_to_power(width)
        add_rms_norm[(x.numel() // width,)](
            x, x if residual is None else residual, weight, total, out, out, out, eps,
            width, padded, residual is not None, 0, num_warps=4 if padded <= 4096 else 8, **_EXACT,
        )  # fmt: skip
        return total, out

    def quantize_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, group: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sum of `add_rms_norm`, and its norm quantized like in `quantize`.

        Shape:
            x and residual: (T, D), contiguous, of the same dtype; weight: (D,); `group` is a power
            of two
        """
        tokens, width = x.shape
        total = x if residual is None else torch.empty_like(x)
        values = torch.empty_like(x, dtype=torch.int8)
        scales = x.new_empty(tokens, width // group, dtype=torch.float32)
        sums = x.new_empty(tokens, width // group, dtype=torch.int32)
        padded = up_to_power(width)
        add_rms_norm[(tokens,)](
            x, x if residual is None else residual, weight, total, values, scales, sums, eps,
            width, padded, residual is not None, group, num_warps=4 if padded <= 4096 else 8,
            **_EXACT,
        )  # fmt: skip
        return total, values, scales, sums

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
        """Return heads rotated by RoPE; see `position.apply_rope`.

        Shape:
            x: (T, N, H), contiguous; cos and sin: (T, R), contiguous; returns (T, N, H)
        """
        tokens, heads, width = x.shape
        out = torch.empty_like(x)
        rotate_heads[(tokens, heads)](
            x, cos, sin, out, heads, width, up_to_power(width), cos.shape[-1], is_interleaved,
            num_warps=1, **_EXACT,
        )  # fmt: skip
        return out

    def rotate_and_store(
        self,
        new: tuple[Tensor, Tensor, Tensor],
        rope: tuple[Tensor, Tensor, bool],
        stored: tuple[Tensor, Tensor],
        slots: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return rotated queries; write rotated keys, and values, to the pages of a cache.

        Args:
            new: queries, keys and values of the tokens, contiguous and of one dtype.
            rope, stored, slots: see `rotate` and `store`.

        Shape:
            new: (T, N, H), (T, K, H), (T, K, H); returns (T, N, H)
        """
        query, key, value = new
        cos, sin, is_interleaved = rope
        (tokens, heads, width), kv_heads = query.shape, key.shape[1]
        out = torch.empty_like(query)
        rotate_and_store[tokens, heads + kv_heads](
            query, key, value, cos, sin, out, *stored, *slots, heads, kv_heads, width,
            up_to_power(width), cos.shape[-1], is_interleaved, num_warps=1, **_EXACT,
        )  # fmt: skip
        return out

    def store(
        self, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], slots: tuple[Tensor, ...]
    ) -> None:
        """Write the keys and values of tokens to the pages of a cache.

        Args:
            new: keys and values of the tokens, contiguous.
            stored: keys and values of all pages, of the same dtype.
            slots: index of each token's page, and position in the page.

        Shape:
            new: (T, K, H) each; stored: (pages, K, 16, H) each; slots: (T,) int64 each
        """
        tokens, heads, width = new[0].shape
        store_heads[(tokens, heads)](
            *new, *stored, *slots, heads, width, up_to_power(width), num_warps=1, **_EXACT
        )

    def multiply_by_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` for contiguous tensors of the same shape and dtype."""
        out = torch.empty_like(gate)
        count = gate.numel()
        grid = (-(-count // _GATE_VALUES),)
        multiply_by_silu[grid](gate, up, out, count, _GATE_VALUES, num_warps=4, **_EXACT)
        return out

    def cross_entropy_(
        self, logits: Tensor, labels: Tensor, factor: Tensor | None, *, has_gradient: bool
    ) -> Tensor:
        """Return each row's cross-entropy; overwrite the logits with its gradient times `factor`.

        Args:
            logits: logits in fp32 or 16 bits; each row is contiguous.
            labels: target columns; -100 ignores a row.
            factor: 0-dim fp32 tensor; None means 1.
            has_gradient: compute the gradient; if False, the logits are not changed.

        Shape:
            logits: (N, V); labels: (N,) int64; returns (N,) in fp32
        """
        rows, columns = logits.shape
        losses = logits.new_empty(rows, dtype=torch.float32)
        if rows:
            cross_entropy_rows[(rows,)](
                logits, labels, losses, losses if factor is None else factor, columns,
                logits.stride(0), IGNORE_INDEX, factor is not None, has_gradient,
                min(2048, up_to_power(columns)), num_warps=8, **_FUSED,
            )  # fmt: skip
        return losses

    def checksum(self, tensors: Sequence[Tensor], steps: Sequence[int]) -> Tensor:
        """Return an int64 checksum of the bytes of all tensors, with few kernel launches.

        Args:
            tensors: contiguous tensors of at least one element.
            steps: stride of each tensor: 1 reads all of its words, n every n-th word.
        """
        words = [_as_words(tensor) for tensor in tensors]
        counts = [-(-w.numel() // step) for w, step in zip(words, steps, strict=True)]
        programs = [-(-count // _HASHED_WORDS) for count in counts]
        sums = tensors[0].new_empty(sum(programs), dtype=torch.int64)
        parts = sums.split(programs)
        for number, (own, part) in enumerate(zip(words, parts, strict=True)):
            # The salts are 2**40 apart, more than a tensor has words, so no two words of different
            # tensors have the same weight and swapped tensors change the sum.
            hash_words[(len(part),)](
                own, part, counts[number], steps[number], number << 40, _HASHED_WORDS, num_warps=8
            )
        return sums.sum()

    def attend(
        self,
        query: Tensor,
        pages: tuple[Tensor, Tensor],
        scales: tuple[Tensor, Tensor] | None,
        tables: Tensor,
        ends: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Compute attention of one token per sequence; see `device_kernels.attend_pages`.

        The queries are contiguous, and N is a multiple of K.
        """
        rows, heads, width = query.shape
        kv_heads, group = pages[0].shape[1], heads // pages[0].shape[1]
        # `tl.dot` needs at least 16 rows, so the heads that share a KV head are padded.
        padded = max(16, up_to_power(group))
        # The number of parts follows from the width of the tables, not from `ends`: reading `ends`
        # would wait for the device, and a CUDA graph has a fixed grid.
        parts = max(1, -(-tables.shape[1] * 16 // _PART_TOKENS))
        count = 0 if parts == 1 else parts
        part = query.new_empty(rows, kv_heads, count, padded, width, dtype=torch.float32)
        stats = query.new_empty(rows, kv_heads, count, padded, 2, dtype=torch.float32)
        out = torch.empty_like(query)
        sizes = (kv_heads, group, padded, width, max(16, up_to_power(width)))
        attend_pages[(rows, kv_heads, parts)](
            query, *pages, *(scales or pages), tables, ends, part, stats, out, scale,
            tables.shape[1], *sizes, _PART_TOKENS, window or 0, scales is not None,
            64 if scales is None else 32, 2, parts == 1, num_warps=4, **_FUSED,
        )  # fmt: skip
        if parts > 1:
            join_parts[(rows, kv_heads)](part, stats, out, parts, *sizes, num_warps=4, **_FUSED)
        return out


def _as_words(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as 64-bit integers if size and address allow."""
    data = tensor.detach().view(-1).view(torch.uint8)
    # Torch refuses to view bytes as int64 if their number or address is not a multiple of 8.
    aligned = data.numel() % 8 == 0 and data.data_ptr() % 8 == 0
    return data.view(torch.int64) if aligned else data


def _scales_of(matrix: PackedMatrix, in_pairs: bool) -> tuple[Tensor, Tensor]:
    """Return scales and minima; if `in_pairs`, with two fp16 values per 32-bit word.

    If the matrix has no minima, the scales are returned twice.
    """
    scales, minima = matrix.scales, matrix.minima
    minima = scales if minima is None else minima
    if scales.dtype != torch.float16 or not in_pairs:
        return scales, minima
    # Flat: a matrix with one group in each row can have strides that a wider dtype refuses.
    return scales.view(-1).view(torch.int32), minima.view(-1).view(torch.int32)
