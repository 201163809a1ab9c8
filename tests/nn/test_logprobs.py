"""Tiled log-probabilities against torch's log-softmax on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmforge.errors import ConfigError, ShapeError
from bmforge.nn import HeadInput, linear_logprobs, losses
from bmforge.testing import assert_close

V, D, R = 11, 6, 2


def make_inputs(rows: int, bias: bool, added: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random hidden states and head weights that require gradients."""
    generator = torch.Generator().manual_seed(rows)
    shapes = {"hidden": (rows, D), "weight": (V, D)}
    shapes |= {"bias": (V,)} if bias else {}
    shapes |= {"low": (rows, R), "up": (V, R)} if added else {}
    return {
        name: torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def score_plain(
    inputs: dict[str, torch.Tensor], labels: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The three scores from all logits."""
    logits = F.linear(inputs["hidden"], inputs["weight"], inputs.get("bias"))
    if "low" in inputs:
        logits = logits + inputs["low"] @ inputs["up"].T
    logprobs = (logits / temperature).log_softmax(-1)
    kept = labels != -100
    picked = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    hit = (logits.argmax(-1) == labels).to(logits.dtype)
    return torch.stack([score.where(kept, 0) for score in (picked, entropy, hit)])


def score_tiled(
    inputs: dict[str, torch.Tensor], labels: torch.Tensor, temperature: float, entropy: bool
) -> torch.Tensor:
    """The three scores from tiles of logits."""
    added = ((inputs["low"], inputs["up"]),) if "low" in inputs else ()
    head = HeadInput(inputs["hidden"], inputs["weight"], inputs.get("bias"), added)
    return linear_logprobs(head, labels, temperature=temperature, with_entropy=entropy)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    tokens=st.integers(1, 10),
    columns=st.integers(1, 12),
    bias=st.booleans(),
    added=st.booleans(),
    entropy=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    ignored=st.sampled_from([0, 2, 1]),
)
def test_equals_log_softmax(
    rows: int,
    tokens: int,
    columns: int,
    bias: bool,
    added: bool,
    entropy: bool,
    temperature: float,
    ignored: int,
) -> None:
    """Scores and all gradients, for any tiles, temperature, bias, adapter and ignored labels."""
    labels = torch.randint(V, (rows,), generator=torch.Generator().manual_seed(rows))
    if ignored:
        labels[::ignored] = -100
    weights = torch.randn(2, rows, generator=torch.Generator().manual_seed(7)).double()
    weights[1] *= entropy
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_HOST_CHUNK_ELEMENTS", tokens * V)
        patch.setattr(losses, "_FEW_TOKENS", 1)
        patch.setattr(losses, "_HOST_TILE_ELEMENTS", tokens * columns)
        for is_plain in (True, False):
            inputs = make_inputs(rows, bias, added, torch.float64)
            scores = (
                score_plain(inputs, labels, temperature)
                if is_plain
                else score_tiled(inputs, labels, temperature, entropy)
            )
            (scores[:2] * weights).sum().backward()
            shown = scores.detach().clone()
            shown[1] *= entropy  # not computed
            results.append({"scores": shown} | {n: t.grad for n, t in inputs.items()})
    assert_close(results[1]["scores"][1] * (not entropy), torch.zeros(rows).double())
    assert_close(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    """Scores are fp32; gradients have the dtype of their tensors and are those of fp32 nearly."""
    labels = torch.tensor([3, -100, 0, 7, 5])
    inputs = make_inputs(5, bias=True, added=False, dtype=dtype)
    scores = score_tiled(inputs, labels, 1.0, entropy=True)
    assert scores.dtype == torch.float32
    scores[0].sum().backward()
    wide = {n: t.detach().float().requires_grad_() for n, t in inputs.items()}
    score_plain(wide, labels, 1.0)[0].sum().backward()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for name, tensor in inputs.items():
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        torch.testing.assert_close(
            tensor.grad.float(), wide[name].grad, rtol=tolerance, atol=tolerance
        )


def test_logits_of_minus_infinity() -> None:
    """Tokens that a bias excludes change neither the entropy nor the gradients of the others."""
    inputs = make_inputs(4, bias=True, added=False, dtype=torch.float64)
    with torch.no_grad():
        inputs["bias"][2:5] = -torch.inf
    labels = torch.tensor([0, 1, 6, 10])
    scores = score_tiled(inputs, labels, 1.0, entropy=True)
    scores[:2].sum().backward()
    left = [0, 1, *range(5, V)]
    few = {n: t.detach()[left] if n != "hidden" else t.detach() for n, t in inputs.items()}
    few = {n: t.clone().requires_grad_() for n, t in few.items()}
    want = score_plain(few, torch.tensor([0, 1, 3, 7]), 1.0)
    want[:2].sum().backward()
    assert_close(scores, want)
    assert_close(inputs["hidden"].grad, few["hidden"].grad)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


def test_no_tensor_of_all_logits() -> None:
    """Neither forward nor backward nor the entropy has a tensor of the size of all logits."""
    rows, vocab = 512, 40000
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    labels = torch.randint(vocab, (rows,))
    with Largest() as largest:
        linear_logprobs(HeadInput(hidden, weight), labels, with_entropy=True)[:2].sum().backward()
    assert vocab * 8 <= largest.numel <= rows * vocab / 4


def test_refusals() -> None:
    """A label outside of the head and a temperature of 0 are named."""
    head = HeadInput(torch.zeros(1, D), torch.zeros(V, D))
    with pytest.raises(ShapeError, match="classes"):
        linear_logprobs(head, torch.tensor([V]))
    with pytest.raises(ConfigError, match="temperature=0"):
        linear_logprobs(head, torch.tensor([1]), temperature=0)
