"""Top-k tokens and log-probabilities of token subsets against torch on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.nn import HeadInput, losses
from bmforge.nn.subset_logprobs import linear_subset_logprobs, linear_top_k
from bmforge.testing import assert_close

V, D, R = 11, 5, 2


def make_head(rows: int, more: bool, softcap: float | None, dtype: Any) -> HeadInput:
    draw = torch.Generator().manual_seed(rows)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype).requires_grad_()

    added = ((some(rows, R), some(V, R)),) if more else ()
    return HeadInput(some(rows, D), some(V, D), some(V) if more else None, added, softcap)


def tensors_of(head: HeadInput) -> list[torch.Tensor]:
    every = (head.hidden, head.weight, head.bias, *(t for pair in head.added for t in pair))
    return [tensor for tensor in every if tensor is not None]


def logprobs_of(head: HeadInput, temperature: float) -> torch.Tensor:
    logits = F.linear(head.hidden, head.weight, head.bias)
    for low, up in head.added:
        logits = logits + low @ up.T
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return (logits / temperature).log_softmax(-1)


def split_plainly(logs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the ids, and the log of the summed probability of all others."""
    is_other = torch.ones_like(logs).scatter(1, ids, 0).bool()
    rest = logs.exp().where(is_other, 0).sum(1, keepdim=True).log()
    return torch.cat((logs.gather(1, ids), rest), 1)


def compare_all(found: Any, wanted: Any) -> None:
    for tensor, other in zip(found, wanted, strict=True):
        assert_close(tensor, other)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    tokens=st.integers(1, 10),
    columns=st.integers(1, 12),
    count=st.integers(1, V - 1),
    more=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
)
def test_equals_log_softmax(
    rows: int,
    tokens: int,
    columns: int,
    count: int,
    more: bool,
    softcap: float | None,
    temperature: float,
) -> None:
    """The k best tokens, and values and gradients of a student at these tokens, for any tiles."""
    weights = torch.randn(rows, count + 1, generator=torch.Generator().manual_seed(7)).double()
    head = make_head(rows, more, softcap, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_HOST_CHUNK_ELEMENTS", tokens * V)
        patch.setattr(losses, "_FEW_TOKENS", 1)
        patch.setattr(losses, "_HOST_TILE_ELEMENTS", tokens * columns)
        best = linear_top_k(head, count, temperature=temperature)
        ids = best.ids.flip(0)  # another model's tokens
        found = linear_subset_logprobs(head, ids, temperature=temperature)
        grads = torch.autograd.grad((found * weights).sum(), tensors_of(head))
    logs = logprobs_of(head, temperature)
    values, wanted_ids = logs.topk(count, -1)
    assert torch.equal(best.ids, wanted_ids)
    assert_close(best.log_probs, values.detach())
    assert_close(best.rest, split_plainly(logs, wanted_ids)[:, -1].detach())
    wanted = split_plainly(logs, ids)
    assert_close(found, wanted)
    expected = torch.autograd.grad((wanted * weights).sum(), tensors_of(head))
    compare_all(grads, expected)


def test_whole_vocabulary_has_no_rest() -> None:
    """With all tokens, the last outcome is impossible, and the others are the log-softmax."""
    head = make_head(4, more=True, softcap=None, dtype=torch.float64)
    best = linear_top_k(head, V + 3)
    assert best.ids.shape == (4, V)
    assert (best.rest == -torch.inf).all()
    found = linear_subset_logprobs(head, best.ids)
    assert (found[:, -1] == -torch.inf).all()
    logs = logprobs_of(head, 1.0)
    assert_close(found[:, :-1], logs.gather(1, best.ids))
    weights = torch.linspace(-1, 2, V).double()
    grads = torch.autograd.grad((found[:, :-1] * weights).sum(), tensors_of(head))
    expected = torch.autograd.grad((logs.gather(1, best.ids) * weights).sum(), tensors_of(head))
    compare_all(grads, expected)


def test_improbable_others_have_accurate_gradients() -> None:
    """In fp32, others of probability 1e-42 do not lose the gradient of their log-probability."""
    weight = torch.tensor([[40.0], [39.0], [-57.0], [-58.0]])
    grads = []
    for dtype in (torch.float32, torch.float64):
        rows = weight.to(dtype, copy=True).requires_grad_()
        head = HeadInput(torch.ones(1, 1, dtype=dtype), rows)
        out = linear_subset_logprobs(head, torch.tensor([[0, 1]]))
        loss = (out * torch.tensor([[0.5, 0.25, 0.125]], dtype=dtype)).sum()
        grads += torch.autograd.grad(loss, [rows])
    assert grads[1][2:].sum() == pytest.approx(0.125)
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    """Values are fp32; gradients have the dtype of their tensors."""
    head = make_head(5, more=False, softcap=None, dtype=dtype)
    best = linear_top_k(head, 3)
    found = linear_subset_logprobs(head, best.ids)
    assert found.dtype == best.log_probs.dtype == torch.float32
    grads = torch.autograd.grad(found.sum(), tensors_of(head))
    wide = HeadInput(*(t.detach().float().requires_grad_() for t in tensors_of(head)))
    wanted = split_plainly(logprobs_of(wide, 1.0), best.ids)
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
    for grad, other in zip(grads, torch.autograd.grad(wanted.sum(), tensors_of(wide)), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), other, rtol=3e-2, atol=5e-2)
