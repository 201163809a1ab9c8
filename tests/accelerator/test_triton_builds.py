"""Every Triton kernel compiles for every kind of GPU, without spills or fused operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

from compiled_kernels import (
    Launch,
    compile_launch,
    others,
    product,
    read_machine_code,
    three_products,
)
from triton.backends.compiler import GPUTarget

from bmforge.nn.packing import QuantSpec
from bmforge.nn.triton_kernels.launch import TritonKernels

NVIDIA = (75, 80, 86, 89, 90, 100, 120)
AMD = ("gfx90a", "gfx942")
SPECS = {
    "int4": QuantSpec(4, 32),
    "int8": QuantSpec(8, 32),
    "int4-128": QuantSpec(4, 128),
    "int4-asym": QuantSpec(4, 128, symmetric=False, scale_dtype="float32"),
    "int8-dynamic": QuantSpec(8, 0, scale_dtype="float32"),
}
OTHERS = (
    "quantize", "gate and quantize", "dequantize", "norm", "norm and quantize", "rotate", "store",
    "rotate and store", "silu", "loss", "checksum", "attend", "attend int8", "join",
)  # fmt: skip
# Every kernel once and every kind of GPU twice; the whole product is long.
QUICK = {
    75: ("int4 x 1", "dequantize"),
    80: ("int4 x 1", "int4 x 4", "int4 x 16", "three int4 x 1"),
    86: ("int8 x 1", "attend", "rotate and store", "checksum"),
    89: ("int4-asym x 16", "quantize", "rotate"),
    90: (
        "int4 x 1",
        "gate and quantize",
        "three int4 x 16",
        "attend int8",
        "store",
        "loss",
        "rotate and store",
    ),
    100: ("int8 x 16", "norm", "norm and quantize", "silu"),
    120: ("int8-dynamic x 4", "join"),
    "gfx90a": ("int4 x 1", "attend"),
    "gfx942": ("int8-dynamic x 1", "int8 x 16"),
}


def all_launches(target: int | str) -> dict[str, Launch]:
    """Return the launches of every kernel by name, as chosen for a kind of GPU."""
    has_tensor_cores = target != 75
    kernels = TritonKernels(isinstance(target, str), has_tensor_cores)
    found = {
        f"{name} x {tokens}": product(spec, tokens, kernels)
        for name, spec in SPECS.items()
        for tokens in (1, 2, 4, 16)
    }
    for name in ("int4", "int8"):
        for tokens in (1, 16):
            found[f"three {name} x {tokens}"] = three_products(SPECS[name], tokens, kernels)
    for dtype, suffix in ((torch.float16, ""), (torch.bfloat16, " bf16")):
        found |= {name + suffix: call for name, call in others(kernels, dtype).items()}
    if not has_tensor_cores:  # attention is torch's there, and bf16 is emulated
        found = {n: call for n, call in found.items() if not n.startswith(("attend", "join"))}
        found = {n: call for n, call in found.items() if not n.endswith("bf16")}
    return found


def check(target: int | str, name: str, call: Launch, path: Path) -> None:
    """Compile a launch, and assert the properties of its machine code."""
    if isinstance(target, str):
        assert "hsaco" in compile_launch(call, GPUTarget("hip", target, 64)).asm
        return
    compiled = compile_launch(call, GPUTarget("cuda", target, 32))
    machine = read_machine_code(compiled, path / "kernel.cubin")
    assert not machine.count("STL|LDL"), f"{name} spills registers on sm_{target}"
    assert machine.registers <= 255
    if " x " not in name:
        return
    # Fused multiply-adds round once where the CPU rounds twice.
    assert not machine.count("FFMA"), f"{name} fuses multiplications and additions"
    assert machine.count("IDP") or machine.count("IMMA|I?MMA|IGMMA|HGMMA|.*MMA"), name
    if target >= 80:
        # Weights are read by asynchronous copies of 128 bits.
        assert machine.count(r"(LDGSTS.*\.128|UBLKCP|UTMALDG)"), (name, machine.counts)


@pytest.mark.parametrize("target", QUICK, ids=str)
def test_kernels_compile(target: Any, tmp_path: Path) -> None:
    launches = all_launches(target)
    for name in QUICK[target]:
        check(target, name, launches[name], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", [*NVIDIA, *AMD], ids=str)
def test_all_kernels_compile(target: Any, tmp_path: Path) -> None:
    for name, call in all_launches(target).items():
        check(target, name, call, tmp_path)


def test_the_quick_selection_has_every_kernel() -> None:
    assert set(QUICK) == {*NVIDIA, *AMD}
    names = {name for names in QUICK.values() for name in names}
    assert set(OTHERS) <= names
    launches = (all_launches(t)[n] for t, names in QUICK.items() for n in names)
    kinds = {value for launch in launches for value in launch.arguments if type(value) is str}
    assert kinds == {"few", "tiles", "wide"}


def test_fused_multiplication_would_be_seen(tmp_path: Path) -> None:
    """Attention may fuse, so its code has the instruction that products must not have."""
    call = all_launches(80)["join"]
    compiled = compile_launch(call, GPUTarget("cuda", 80, 32))
    assert read_machine_code(compiled, tmp_path / "kernel.cubin").count("FFMA")
