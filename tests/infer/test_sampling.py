"""Score processors against transformers' and against plain definitions."""

from __future__ import annotations

import pytest
import torch
from transformers import generation

from bmforge.infer.sampling import (
    apply_temperature,
    forbid_tokens,
    is_one_of,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)

IDS = torch.tensor([[0, 0, 4, 9, 4], [1, 2, 3, 4, 5]])


def make_scores(seed: int = 0) -> torch.Tensor:
    """Scores (2, 11), some of them tied."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 20, (2, 11), generator=generator).float() / 7


@pytest.mark.parametrize("seed", range(5))
def test_equal_transformers(seed: int) -> None:
    """Every processor gives transformers' scores exactly."""
    scores = make_scores(seed)
    pairs = [
        (apply_temperature(scores, 0.3), generation.TemperatureLogitsWarper(0.3)),
        (keep_top_k(scores, 4), generation.TopKLogitsWarper(4)),
        (keep_top_k(scores, 400), generation.TopKLogitsWarper(400)),
        (keep_top_p(scores, 0.6), generation.TopPLogitsWarper(0.6)),
        (keep_top_p(scores, 1e-6), generation.TopPLogitsWarper(1e-6)),
        (
            penalize_repetition(scores, IDS, 1.7, torch.tensor([2, 0])),
            generation.RepetitionPenaltyLogitsProcessor(
                1.7, prompt_ignore_length=torch.tensor([2, 0])
            ),
        ),
    ]
    for ours, processor in pairs:
        assert torch.equal(ours, processor(IDS, scores.clone())), type(processor).__name__


def test_top_p_by_definition() -> None:
    """The fewest likeliest tokens that reach the probability stay."""
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for p, kept in ((0.4, 1), (0.6, 2), (0.81, 3), (0.96, 4), (1.0, 4)):
        assert keep_top_p(scores, p).isfinite().sum() == kept


def test_forbidden_and_membership() -> None:
    """Forbidden tokens are -inf, unknown ones do nothing."""
    scores = forbid_tokens(make_scores(), (3, 99))
    assert scores[:, 3].isinf().all()
    assert scores.isinf().sum() == 2
    assert is_one_of(torch.tensor([1, 2]), ()).tolist() == [False, False]
    assert is_one_of(torch.tensor([1, 2]), (2, 5)).tolist() == [False, True]
