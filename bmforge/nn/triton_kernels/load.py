"""Loads the Triton kernels for a device and compares their results with the CPU's once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.device import device_name, triton_features
from bmforge.native import say_once
from bmforge.nn.packing import (
    PackedMatrix,
    QuantSpec,
    pack_matrix,
    quantize_groups,
    unpack_matrix,
)
from bmforge.nn.plain_products import multiply_plain
from bmforge.nn.plain_rows import plain_rotate

if TYPE_CHECKING:
    from bmforge.nn.triton_kernels.launch import TritonKernels

__all__ = ["find_difference", "find_loss_difference", "load_loss_kernels", "load_triton"]

# Together the schemes reach every branch of the kernels: both widths, one group per row (kind
# "wide"), and groups with minima.
_SPECS = (
    QuantSpec(8, 32),
    QuantSpec(4, 32),
    QuantSpec(8, 0, scale_dtype="float32"),
    QuantSpec(4, 128, symmetric=False, scale_dtype="float32"),
)
# One token, several, and more than a tile of the tensor cores.
_TOKENS = (1, 3, 17)


@cache
def load_triton(device: torch.device) -> TritonKernels | None:
    """Return the Triton kernels for an accelerator; None if torch computes instead.

    If the device supports them but they are not used, a warning states the reason. The first call
    compiles the kernels and compares their results with the CPU's.
    """
    features = triton_features(device)
    if features is None:
        return None
    if find_spec("triton") is None:
        say_once(
            "Triton is not installed, so torch computes quantized products and paged "
            f"attention on {device_name(device)}, many times slower. Install the version of "
            "triton that this torch release requires."
        )
        return None
    from bmforge.nn.triton_kernels.launch import TritonKernels

    has_dot4, has_tensor_cores = features
    kernels = TritonKernels(emulates=not has_dot4, has_tensor_cores=has_tensor_cores)
    return _checked(kernels, device, find_difference, "quantized products and paged attention")


@cache
def load_loss_kernels(device: torch.device) -> TritonKernels | None:
    """Return the Triton kernels for the loss; None if torch computes it.

    Unlike `load_triton` it compiles and checks the loss only, in about a second.
    """
    features = triton_features(device)
    if features is None or find_spec("triton") is None:
        return None
    from bmforge.nn.triton_kernels.launch import TritonKernels

    kernels = TritonKernels(emulates=not features[0], has_tensor_cores=features[1])
    return _checked(kernels, device, find_loss_difference, "the loss")


def _checked(
    kernels: TritonKernels,
    device: torch.device,
    find: Callable[[TritonKernels, torch.device], str],
    task: str,
) -> TritonKernels | None:
    """Return the kernels if `find` finds no difference to the CPU; else warn and return None."""
    difference = find(kernels, device)
    if difference:
        say_once(
            f"the Triton kernels for {task} are not used on {device_name(device)}: {difference}. "
            "Torch computes instead, much slower. Try another version of Triton."
        )
        return None
    return kernels


def find_difference(kernels: TritonKernels, device: torch.device) -> str:
    """Return a description of the first result that differs from the CPU's; "" if all are equal.

    If a kernel raises an error, the description is its message.

    Args:
        kernels: kernels to check.
        device: device that runs the kernels.
    """
    comparisons = [
        _compare_products,
        _compare_joint_products,
        _compare_norm,
        _compare_heads,
        _compare_attention,
    ]
    return _first_difference(comparisons, kernels, device)


def find_loss_difference(kernels: TritonKernels, device: torch.device) -> str:
    """Return how the loss differs from the CPU's; see `find_difference`."""
    return _first_difference([_compare_loss], kernels, device)


def _first_difference(
    comparisons: Iterable[Callable[[TritonKernels, torch.device], str]],
    kernels: TritonKernels,
    device: torch.device,
) -> str:
    try:
        return next(filter(None, (compare(kernels, device) for compare in comparisons)), "")
    except Exception as error:  # the compiler's and the driver's errors have no common class
        return f"a kernel failed ({type(error).__name__}: {error})".splitlines()[0]


def _random() -> partial[Tensor]:
    return partial(torch.randn, generator=torch.Generator().manual_seed(0))


def _compare_products(kernels: TritonKernels, device: torch.device) -> str:
    return next(filter(None, (_compare_product(kernels, device, spec) for spec in _SPECS)), "")


def _compare_product(kernels: TritonKernels, device: torch.device, spec: QuantSpec) -> str:
    # 37 rows leave the last panel of 16 rows partly filled, which checks the masks.
    draw, rows, columns = _random(), 37, 384
    matrix = pack_matrix(quantize_groups(draw(rows, columns), spec), spec)
    # Tokens of very different magnitudes show if a token is multiplied by the scale of another one.
    x, bias = draw(_TOKENS[-1], columns) * torch.logspace(-4, 4, _TOKENS[-1])[:, None], draw(rows)
    device_matrix = PackedMatrix(*(None if t is None else t.to(device) for t in matrix))  # type: ignore[arg-type]
    name = f"int{spec.bits} in groups of {spec.group_of(columns)}"
    for tokens in _TOKENS:
        want = multiply_plain(x[:tokens], matrix, rows, spec, bias)
        got = kernels.multiply(x[:tokens].to(device), device_matrix, rows, spec, bias.to(device))
        if not torch.equal(got.cpu(), want):
            return f"the product of {tokens} tokens with {name} differs from the CPU's result"
    got = kernels.dequantize(device_matrix, rows, spec, torch.float32).cpu()
    same = torch.equal(got, unpack_matrix(matrix, rows, spec))
    return "" if same else f"the dequantized {name} differs from the CPU's result"


def _compare_joint_products(kernels: TritonKernels, device: torch.device) -> str:
    """Compare the products of several matrices, and of a quantized norm, with separate kernels."""
    draw, spec, heights = _random(), QuantSpec(4, 32), (37, 37, 16)
    matrices = [pack_matrix(quantize_groups(draw(rows, 384), spec), spec) for rows in heights]
    factors = [
        (PackedMatrix(m.packed.to(device), m.scales.to(device), None), rows, None)
        for m, rows in zip(matrices, heights, strict=True)
    ]
    x, weight = draw(1, 384).to(device), draw(384).to(device)
    normed = kernels.add_rms_norm(x, None, weight, 1e-5)[1]
    quantized = kernels.quantize_norm(x, None, weight, 1e-5, 32)[1:]
    got = kernels.multiply_quantized(quantized, factors, spec, x.dtype)
    want = [
        multiply_plain(normed.cpu(), matrix, rows, spec, None)
        for matrix, rows in zip(matrices, heights, strict=True)
    ]
    same = all(torch.equal(left.cpu(), right) for left, right in zip(got, want, strict=True))
    gated = kernels.quantize(got[0][:, :32].contiguous(), 32, got[1][:, :32].contiguous())
    want_gated = kernels.multiply_by_silu(got[0], got[1])[:, :32].contiguous()
    pairs = zip(gated, kernels.quantize(want_gated, 32), strict=True)
    same = same and all(torch.equal(left, right) for left, right in pairs)
    return "" if same else "the product of several matrices differs from the CPU's result"


def _compare_norm(kernels: TritonKernels, device: torch.device) -> str:
    draw = _random()
    x, residual, weight = draw(3, 100), draw(3, 100), draw(100)
    total, out = kernels.add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    # The kernel adds the squares in another order than torch, so only the sum with the residual can
    # be compared bit for bit.
    want = torch.nn.functional.rms_norm(residual + x, (100,), weight, 1e-5)
    same = torch.equal(total.cpu(), residual + x)
    return (
        ""
        if same and torch.allclose(out.cpu(), want)
        else "the RMS norm differs from the CPU's result"
    )


def _compare_heads(kernels: TritonKernels, device: torch.device) -> str:
    """Compare rotated heads, keys and values in pages, and gates."""
    draw = _random()
    x, other, cos, sin = draw(3, 2, 80), draw(3, 2, 80), draw(3, 40), draw(3, 40)
    for is_interleaved in (False, True):
        got = kernels.rotate(x.to(device), cos.to(device), sin.to(device), is_interleaved)
        if not torch.equal(got.cpu(), plain_rotate(x, cos[:, None], sin[:, None], is_interleaved)):
            return "heads with rotary positions differ from the CPU's result"
    # Two tokens share page 4, and slot 15 is the last one of a page.
    slots = torch.tensor([4, 0, 4]), torch.tensor([15, 0, 3])
    stored = torch.zeros(5, 2, 16, 80), torch.zeros(5, 2, 16, 80)
    written = stored[0].to(device), stored[1].to(device)
    kernels.store(
        (x.to(device), other.to(device)), written, (slots[0].to(device), slots[1].to(device))
    )
    for pages, new, got in zip(stored, (x, other), written, strict=True):
        pages[slots[0], :, slots[1]] = new
        if not torch.equal(got.cpu(), pages):
            return "the pages of the KV cache differ from the CPU's"
    query, new = x.to(device), (other.to(device), x.to(device))
    rope, places = (
        (cos.to(device), sin.to(device), False),
        (slots[0].to(device), slots[1].to(device)),
    )
    rotated = kernels.rotate_and_store((query, *new), rope, written, places)
    stored[0][slots[0], :, slots[1]] = plain_rotate(other, cos[:, None], sin[:, None], False)
    stored[1][slots[0], :, slots[1]] = x
    same = torch.equal(rotated, kernels.rotate(query, *rope))
    if not (same and all(torch.equal(w.cpu(), s) for w, s in zip(written, stored, strict=True))):
        return "rotated heads in the KV cache differ from the CPU's"
    got, want = kernels.multiply_by_silu(x.to(device), other.to(device)).cpu(), F.silu(x) * other
    return "" if torch.allclose(got, want) else "the SiLU gate differs from the CPU's result"


def _compare_attention(kernels: TritonKernels, device: torch.device) -> str:
    # 10 pages of a sequence are one part, 20 pages are two parts that a second kernel joins.
    return next(filter(None, (_compare_pages(kernels, device, pages) for pages in (10, 20))), "")


def _compare_pages(kernels: TritonKernels, device: torch.device, pages: int) -> str:
    draw, count = _random(), 2 * pages
    query, keys, values = draw(2, 4, 64), draw(count, 2, 16, 64), draw(count, 2, 16, 64)
    tables = torch.randperm(count, generator=torch.Generator().manual_seed(0)).view(2, pages)
    ends = torch.tensor([7, 15 * pages])
    got = kernels.attend(
        query.to(device),
        (keys.to(device), values.to(device)),
        None,
        tables.to(device, torch.int32),
        ends.to(device, torch.int32),
        0.125,
        None,
    )
    want = []
    for row, table, end in zip(query, tables, ends.tolist(), strict=True):
        seen = (t[table].transpose(0, 1).flatten(1, 2)[:, :end] for t in (keys, values))
        k, v = (t.repeat_interleave(2, 0) for t in seen)
        weights = ((row[:, None] @ k.transpose(1, 2)) * 0.125).softmax(-1)
        want.append((weights @ v)[:, 0])
    same = torch.allclose(got.cpu(), torch.stack(want), rtol=1e-4, atol=1e-5)
    return "" if same else "paged attention differs from the CPU's result"


def _compare_loss(kernels: TritonKernels, device: torch.device) -> str:
    logits, labels = _random()(3, 5000), torch.tensor([0, 4999, IGNORE_INDEX])
    want = logits.clone().requires_grad_()
    with torch.enable_grad():  # the first call comes from a forward pass without gradients
        losses = F.cross_entropy(want, labels, reduction="none", ignore_index=IGNORE_INDEX)
        losses.sum().backward()
    tile = logits.to(device)
    got = kernels.cross_entropy_(tile, labels.to(device), None, has_gradient=True)
    same = torch.allclose(got.cpu(), losses, atol=1e-5)
    assert want.grad is not None
    same = same and torch.allclose(tile.cpu(), want.grad, atol=1e-6)
    return "" if same else "the loss differs from the CPU's"
