"""Ahead-of-time compilation of the Triton kernels as `launch` launches them, without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmforge.nn.packing import PackedMatrix, QuantSpec, packed_shapes
from bmforge.nn.triton_kernels import launch
from bmforge.nn.triton_kernels.launch import TritonKernels

_DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
META = torch.device("meta")
SIZE = 4096


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments and options of one launch."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Recorder:
    """Replaces a kernel: records its launches instead of running them."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def record(*arguments: Any, **options: Any) -> None:
            self._launches.append(Launch(self._kernel, arguments, options))

        return record


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record all launches of `launch`."""
    launches: list[Launch] = []
    names = [n for n, value in vars(launch).items() if isinstance(value, triton.JITFunction)]
    recorders = {name: _Recorder(getattr(launch, name), launches) for name in names}
    with mock.patch.multiple(launch, **recorders):
        yield launches


def compile_launch(call: Launch, target: GPUTarget) -> Any:
    """Compile a kernel for a target as Triton would for this launch."""
    names, constants = call.kernel.arg_names, {}
    signature, attributes = {}, {}
    for place, parameter in enumerate(call.kernel.params):
        name, value = names[place], call.arguments[place]
        if parameter.is_constexpr:
            signature[name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(call.kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=call.options)


@dataclass(frozen=True)
class Machine:
    """What the machine code of a kernel uses.

    Args:
        registers: registers a thread.
        counts: number of instructions by operation with its modifiers.
    """

    registers: int
    counts: Counter[str]

    def count(self, pattern: str) -> int:
        """Return the number of instructions whose operation matches a pattern from its start."""
        return sum(n for name, n in self.counts.items() if re.match(pattern, name))


def read_machine_code(compiled: Any, path: Path) -> Machine:
    """Disassemble a kernel for NVIDIA's GPUs."""
    path.write_bytes(compiled.asm["cubin"])

    def dump(option: str) -> str:
        run = subprocess.run([_DUMP, option, path], capture_output=True, text=True, check=True)
        return run.stdout

    registers = re.search(r"REG:(\d+)", dump("-res-usage"))
    assert registers is not None
    line = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")
    counts = Counter(m[1] for m in map(line.search, dump("-sass").splitlines()) if m)
    return Machine(int(registers[1]), counts)


def _matrix(spec: QuantSpec) -> PackedMatrix:
    shapes = packed_shapes(SIZE, SIZE, spec)
    floats = {key: torch.empty(shapes[key], dtype=spec.scale_type, device=META)
              for key in shapes if key != "packed"}  # fmt: skip
    packed = torch.empty(shapes["packed"], dtype=torch.uint8, device=META)
    return PackedMatrix(packed, floats["scales"], floats.get("minima"))


def product(spec: QuantSpec, tokens: int, kernels: TritonKernels) -> Launch:
    """Return the launch of a product of 4,096 by 4,096 with tokens in fp16."""
    return _joint_product(spec, tokens, kernels, 1)


def three_products(spec: QuantSpec, tokens: int, kernels: TritonKernels) -> Launch:
    """Return the launch of three products with the same tokens."""
    return _joint_product(spec, tokens, kernels, 3)


def _joint_product(spec: QuantSpec, tokens: int, kernels: TritonKernels, count: int) -> Launch:
    x = torch.empty(tokens, SIZE, dtype=torch.float16, device=META)
    factors = [(_matrix(spec), SIZE, None)] * count
    with recorded() as launches:
        quantized = kernels.quantize(x, spec.group_of(SIZE))
        kernels.multiply_quantized(quantized, factors, spec, x.dtype)
    return launches[-1]


def others(kernels: TritonKernels, dtype: torch.dtype) -> dict[str, Launch]:
    """Return the launches of all other kernels for a 4-bit matrix and activations of a dtype."""
    spec = QuantSpec(4, 32)
    x = torch.empty(2, SIZE, dtype=dtype, device=META)
    with recorded() as launches:
        kernels.quantize(x, 32)
        kernels.quantize(x, 32, x)
        kernels.dequantize(_matrix(spec), SIZE, spec, dtype)
        kernels.add_rms_norm(x, x, x[0], 1e-5)
        kernels.quantize_norm(x, x, x[0], 1e-5, 32)
        heads = x.view(2, 32, 128)
        kernels.rotate(heads, x[:, :128].contiguous(), x[:, :128].contiguous(), False)
        cached = torch.empty(9, 32, 16, 128, dtype=dtype, device=META)
        place = torch.empty(2, dtype=torch.int64, device=META)
        kernels.store((heads, heads), (cached, cached), (place, place))
        rope = x[:, :128].contiguous(), x[:, :128].contiguous(), False
        kernels.rotate_and_store((heads,) * 3, rope, (cached, cached), (place, place))
        kernels.multiply_by_silu(x, x)
        labels = torch.empty(2, dtype=torch.int64, device=META)
        kernels.cross_entropy_(x, labels, None, has_gradient=True)
        kernels.checksum([x], [1])
    kinds = (
        "quantize",
        "gate and quantize",
        "dequantize",
        "norm",
        "norm and quantize",
        "rotate",
        "store",
        "rotate and store",
        "silu",
        "loss",
        "checksum",
    )
    names = dict(zip(kinds, launches, strict=True))
    for key, kind in (("attend", dtype), ("attend int8", torch.int8)):
        pages = torch.empty(9, 8, 16, 128, dtype=kind, device=META)
        scales = torch.empty(9, 8, 16, device=META) if kind == torch.int8 else None
        tables, ends = (torch.empty(n, dtype=torch.int32, device=META) for n in ((2, 512), 2))
        with recorded() as launches:
            kernels.attend(
                x.view(2, 32, 128), (pages, pages), None if scales is None else (scales, scales),
                tables, ends, 0.1, None,
            )  # fmt: skip
        names |= {key: launches[0], "join": launches[1]}
    return names
