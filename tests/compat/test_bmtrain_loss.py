"""FusedCrossEntropy, whole and over a divided vocabulary, against torch in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmforge.compat.bmtrain as bmt
from bmforge.errors import ShapeError
from bmforge.testing import run_distributed


def draw(classes: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(classes)
    logits = torch.randn(rows, classes, generator=random).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=random)
    target[torch.rand(rows, generator=random) < 0.5] = -100
    return logits, target


def compare(classes: int, dtype: torch.dtype, smoothing: float, weighted: bool, how: str) -> None:
    logits, target = draw(classes, 64, dtype)
    weight = torch.rand(classes, generator=torch.Generator().manual_seed(0)) if weighted else None
    ours = logits.clone().requires_grad_()
    loss = bmt.loss.FusedCrossEntropy(weight, label_smoothing=smoothing, reduction=how)(
        ours, target.int()
    )
    plain = logits.float().requires_grad_()
    want = F.cross_entropy(plain, target, weight, label_smoothing=smoothing, reduction=how)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    (loss.sum() * 32768).backward()
    (want.sum() * 32768).backward()
    torch.testing.assert_close(ours.grad.float(), plain.grad, rtol=1e-2, atol=1e-1)


def all_cases() -> None:
    bmt.init_distributed()
    for classes in (10, 50, 90, 100, 900, 1000, 30000):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            compare(classes, dtype, 0.0, False, "mean")
    for classes in (10, 100):
        for how in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                compare(classes, torch.float16, smoothing, True, how)


def test_against_torch() -> None:
    run_distributed(all_cases, 1)


def nothing_counts(parallel: bool) -> None:
    bmt.init_distributed(tp_size=2 if parallel else 1)
    logits = torch.randn(8, 5, requires_grad=True)
    loss = bmt.loss.FusedCrossEntropy(parallel=parallel)(logits, torch.full((8,), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(8, 5))
    with pytest.raises(ShapeError, match="Flatten"):
        bmt.loss.FusedCrossEntropy()(logits[None], torch.zeros(8))


@pytest.mark.parametrize("parallel", [False, True])
def test_a_batch_of_ignored_targets_has_no_loss(parallel: bool) -> None:
    run_distributed(nothing_counts, 2 if parallel else 1, parallel)


def divided() -> None:
    bmt.init_distributed(tp_size=4)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        torch.manual_seed(7)
        whole = bmt.nn.Projection(100, 64, dtype=dtype)
        part = bmt.nn.VPProjection(100, 64, dtype=dtype)
        bmt.init_parameters(whole)
        part.load_state_dict(whole.state_dict())
        x = torch.randn(110, 64).to(dtype)
        target = torch.cat((torch.arange(100).view(10, 10), torch.full((10, 1), -100)), 1).flatten()
        weight = torch.rand(100)
        for settings in ({}, {"label_smoothing": 0.1}, {"weight": weight, "label_smoothing": 0.2}):
            all_scores = whole(x).detach().requires_grad_()
            scores = part(x).detach().requires_grad_()
            want = bmt.loss.FusedCrossEntropy(**settings)(all_scores, target)
            loss = bmt.loss.FusedCrossEntropy(**settings, parallel=True)(scores, target)
            want.backward()
            loss.backward()
            own = slice(25 * bmt.rank(), 25 * bmt.rank() + 25)
            torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(scores, all_scores[:, own], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(scores.grad, all_scores.grad[:, own], rtol=1e-2, atol=1e-4)


def test_a_divided_vocabulary() -> None:
    run_distributed(divided, 4)


def any_loss() -> None:
    bmt.init_distributed()
    layer = bmt.nn.Linear(6, 3)
    bmt.init_parameters(layer)
    x, y = torch.rand(4, 6), torch.rand(4, 3)
    for loss in (nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.BCEWithLogitsLoss()):
        loss(layer(x), y).backward()
        assert torch.isfinite(layer._parameters["weight"].grad.sum())


def test_torchs_losses_work_as_well() -> None:
    run_distributed(any_loss, 1)
