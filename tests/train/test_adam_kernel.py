"""The one-pass AdamW kernel: torch's bits, or it is not used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.train.optim import adam_kernel
from bmforge.train.optim.adam_kernel import load_adam_kernel, step_plain


@pytest.fixture(autouse=True)
def fresh() -> Any:
    load_adam_kernel.cache_clear()
    yield
    load_adam_kernel.cache_clear()


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler here")


@needs_compiler
@pytest.mark.parametrize("count", [1, 63, 64, 1000, 4096])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits_as_torch(
    count: int, weight_decay: float, scale: float, dtype: torch.dtype
) -> None:
    """Against torch's kernel, with the casts and the scaling as passes of their own."""
    kernel = load_adam_kernel()
    assert kernel is not None
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay}
    start = torch.randn(count)
    want = [start.clone(), torch.zeros(count), torch.zeros(count)]
    got = [start.clone(), torch.zeros(count), torch.zeros(count)]
    for step in range(1, 12):
        gradient = (torch.randn(count) * 10.0 ** (step % 5 - 3)).to(dtype)
        scaled = gradient.float() * scale if scale != 1.0 else gradient.float()
        step_plain(want[0], scaled, want[1], want[2], group, float(step))
        narrow = torch.empty(count, dtype=torch.bfloat16)
        kernel.step(
            got[0], gradient, got[1], got[2], group, float(step), scale=scale, narrow=narrow
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(narrow, want[0].bfloat16())


@needs_compiler
def test_not_a_number_stays_one() -> None:
    kernel = load_adam_kernel()
    assert kernel is not None
    weights = torch.full((64,), float("nan"))
    narrow = torch.empty(64, dtype=torch.bfloat16)
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    states = torch.zeros(64), torch.zeros(64)
    kernel.step(weights, torch.ones(64), *states, group, 1.0, narrow=narrow)
    assert narrow.isnan().all()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_kernel, "load_native", lambda name, source: None)
    assert load_adam_kernel() is None


@needs_compiler
def test_other_bits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fuses what torch does not: the plain step is taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wrong = adam_kernel._SOURCE.replace("* n.beta2)", "* n.beta2 * 1.0001f)")
    assert wrong != adam_kernel._SOURCE
    monkeypatch.setattr(adam_kernel, "_SOURCE", wrong)
    assert load_adam_kernel() is None
