"""Rows of exactness: the Triton kernels and a whole model, compared with the CPU's results."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.measure import SkippedRowError, Values, config_of
from bmforge.device import default_device, triton_features
from bmforge.infer import generate
from bmforge.models import Llama
from bmforge.models.pack import quantize_
from bmforge.nn.packing import PackedMatrix, QuantSpec, pack_matrix, quantize_groups, unpack_matrix
from bmforge.nn.plain_products import multiply_plain
from bmforge.nn.triton_kernels.load import find_difference

__all__ = ["kernels", "products", "whole_model"]

SPECS = (
    QuantSpec(8, 32),
    QuantSpec(4, 32),
    QuantSpec(4, 128, symmetric=False),
    QuantSpec(8, 0, scale_dtype="float32"),
)


def open_kernels(device: torch.device) -> Any:
    """Return the Triton kernels for a device; a rehearsal on the CPU uses Triton's interpreter."""
    if find_spec("triton") is None:
        raise SkippedRowError("Triton is not installed")
    features = (False, False)
    if device.type != "cpu":
        supported = triton_features(device)
        if supported is None:
            raise SkippedRowError("the Triton kernels do not support this device")
        features = supported
    from bmforge.nn.triton_kernels.launch import TritonKernels

    is_host = device.type == "cpu"
    return TritonKernels(emulates=not features[0], has_tensor_cores=is_host or features[1])


def random(seed: int, *shape: int) -> Tensor:
    """Return random numbers of the CPU's generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def to_device(matrix: PackedMatrix, device: torch.device) -> PackedMatrix:
    """Return a packed matrix on a device."""
    tensors: list[Any] = [None if t is None else t.to(device) for t in matrix]
    return PackedMatrix(*tensors)


@torch.no_grad()
def products(rows: int, columns: int, tokens: tuple[int, ...] = (1, 3, 16, 17, 64)) -> Values:
    """Compare packed products and dequantized matrices with the CPU's, bit by bit."""
    device = default_device()
    kernels = open_kernels(device)
    yield {"path": "int4 and int8 products, dequantization", "size": f"{rows} x {columns}"}
    equal = tried = 0
    for spec in SPECS:
        matrix = pack_matrix(quantize_groups(random(0, rows, columns), spec), spec)
        on_device = to_device(matrix, device)
        for count in tokens:
            x = random(count, count, columns) * torch.logspace(-3, 3, count)[:, None]
            got = kernels.multiply(x.to(device), on_device, rows, spec, None)
            equal += torch.equal(got.cpu(), multiply_plain(x, matrix, rows, spec, None))
            tried += 1
        got = kernels.dequantize(on_device, rows, spec, torch.float32)
        equal += torch.equal(got.cpu(), unpack_matrix(matrix, rows, spec))
        tried += 1
        yield {"tried": tried, "equal bits": equal}


@torch.no_grad()
def kernels() -> Values:
    """Run the check at load, and compare paged attention with attention in fp64."""
    device = default_device()
    triton_kernels = open_kernels(device)
    yield {"path": "check at load, paged attention"}
    yield {"check at load": find_difference(triton_kernels, device) or "no difference"}
    worst = 0.0
    for group, width, window in itertools.product((1, 4), (64, 128), (None, 40)):
        shape = (20, 2, 16, width)
        query, keys, values = random(1, 2, 2 * group, width), random(2, *shape), random(3, *shape)
        tables, ends = torch.arange(20).view(2, 10), torch.tensor([7, 150])
        got = triton_kernels.attend(
            query.to(device),
            (keys.to(device), values.to(device)),
            None,
            tables.to(device, torch.int32),
            ends.to(device, torch.int32),
            width**-0.5,
            window,
        )
        want = attend_exactly(query, (keys, values), tables, ends.tolist(), window)
        worst = max(worst, (got.cpu().double() - want).abs().max().item())
    yield {"tried": 8, "largest difference": worst}


def attend_exactly(
    query: Tensor,
    pages: tuple[Tensor, Tensor],
    tables: Tensor,
    ends: list[int],
    window: int | None,
) -> Tensor:
    """Return the attention of single tokens to pages, in fp64."""
    outputs = []
    for row, table, end in zip(query.double(), tables, ends, strict=True):
        start = max(0, end - window) if window else 0
        k, v = (t[table].transpose(0, 1).flatten(1, 2)[:, start:end].double() for t in pages)
        repeats = len(row) // len(k)
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        weights = ((row[:, None] @ k.transpose(1, 2)) * row.shape[-1] ** -0.5).softmax(-1)
        outputs.append((weights @ v)[:, 0])
    return torch.stack(outputs)


@torch.no_grad()
def whole_model() -> Values:
    """Compare logits and greedy tokens of a small model in fp32, int8 and int4 with the CPU's."""
    device, config = default_device(), config_of("tiny")
    yield {"path": "small model: logits, 32 greedy tokens"}
    ids = torch.randint(5, 500, (2, 24), generator=torch.Generator().manual_seed(0))
    equal, worst = 0, 0.0
    for scheme in (None, "int8", "int4"):
        model = Llama.from_config(config, seed=0).eval()
        if scheme is not None:
            quantize_(model, scheme)
        want, tokens = model(ids).logits, generate(model, ids, max_new_tokens=32, eos_token_id=())
        model.to(device)
        got = model(ids.to(device)).logits.cpu()
        worst = max(worst, (got - want).abs().max().item())
        generated = generate(model, ids.to(device), max_new_tokens=32, eos_token_id=())
        equal += torch.equal(generated.cpu(), tokens)
    yield {"tried": 3, "equal tokens": equal, "largest difference": worst}
