"""Score processors against transformers' and against plain definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import generation

from bmforge.errors import ConfigError
from bmforge.infer import GenerationConfig
from bmforge.infer.sampling import (
    apply_temperature,
    draw_number,
    draw_token,
    forbid_tokens,
    is_one_of,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    process_scores,
)
from bmforge.testing import assert_close

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


@pytest.mark.parametrize("seed", range(5))
def test_more_options_equal_transformers(seed: int) -> None:
    """Biases, banned words, repeats and the smallest share, one by one and in `process_scores`."""
    scores, nothing = make_scores(seed), torch.tensor([0, 0])
    ids = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]])
    words = [[3], [2, 7], [1, 2, 9], [4, 4, 0]]
    biases = {(3,): 1.5, (9,): -2.0}
    banned = generation.NoBadWordsLogitsProcessor(words)
    pairs: list[tuple[dict[str, Any], Any]] = [
        ({"bad_words_ids": tuple(map(tuple, words))}, banned),
        ({"no_repeat_ngram_size": 1}, generation.NoRepeatNGramLogitsProcessor(1)),
        ({"no_repeat_ngram_size": 3}, generation.NoRepeatNGramLogitsProcessor(3)),
        (
            {"logit_bias": {key[0]: bias for key, bias in biases.items()}},
            generation.SequenceBiasLogitsProcessor(biases),
        ),
    ]
    for options, processor in pairs:
        got = process_scores(scores, ids, 2, nothing, GenerationConfig(**options))
        assert_close(got, processor(ids, scores.clone()), rtol=0, atol=1e-6)
    for share in (0.05, 0.3, 1.0):
        want = generation.MinPLogitsWarper(share)(ids, scores.clone())
        assert torch.equal(keep_min_p(scores, share), want)


def test_forced_and_suppressed_tokens_equal_transformers() -> None:
    """The token after a start token, the last token, and the tokens that do not come first."""
    scores, nothing = make_scores(), torch.tensor([0, 0])
    ids = torch.tensor([[1, 2, 3, 1], [4, 4, 4, 4]])
    config = GenerationConfig(
        max_new_tokens=4,
        forced_bos_token_id=2,
        forced_eos_token_id=(5, 7),
        begin_suppress_tokens=(6,),
    )
    processors = [
        generation.ForcedBOSTokenLogitsProcessor(2),
        generation.ForcedEOSTokenLogitsProcessor(5, [5, 7]),
        generation.SuppressTokensAtBeginLogitsProcessor([6], 2),
    ]
    for step in range(4):
        want = scores.clone()
        for processor in processors:
            want = processor(ids[:, : step + 1], want)
        assert torch.equal(process_scores(scores, ids[:, : step + 1], step, nothing, config), want)


def test_penalties_of_what_was_written() -> None:
    """OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence; the prompt is none."""
    scores, ids = make_scores(), torch.tensor([[5, 5, 1, 2, 1], [5, 1, 1, 1, 1]])
    config = GenerationConfig(presence_penalty=0.7, frequency_penalty=0.3)
    got = process_scores(scores, ids, 3, torch.tensor([0, 0]), config)
    want = scores.clone()
    for row, counts in enumerate(({1: 2, 2: 1}, {1: 3})):
        for token, count in counts.items():
            want[row, token] -= count * 0.3 + 0.7
    assert_close(got, want, rtol=0, atol=1e-6)
    assert torch.equal(process_scores(scores, ids, 0, torch.tensor([0, 0]), config), scores)


def test_draws_depend_on_their_key_alone_and_are_even() -> None:
    """Numbers of a key are the same anywhere; over positions and seeds they are uniform."""
    assert draw_number(1, 2, 3) == draw_number(1, 2, 3)
    assert len({draw_number(1, 2), draw_number(2, 1), draw_number(1, 2, 0), draw_number(3)}) == 4
    for key in (lambda n: (7, n), lambda n: (n, 0, 7)):
        numbers = np.array([draw_number(*key(n)) for n in range(20000)])
        assert 0 <= numbers.min() < numbers.max() < 1
        off = np.abs(np.sort(numbers) - (np.arange(20000) + 0.5) / 20000).max()
        assert off * np.sqrt(20000) < 1.63  # Kolmogorov and Smirnov, p > 0.01
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_drawn_tokens_have_their_probabilities() -> None:
    """By chi-square; what has none is never drawn, nor what rounding leaves at the end."""
    probabilities = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.3, 0.0])
    drawn = [draw_token(probabilities, draw_number(5, n)) for n in range(20000)]
    counts = np.bincount(drawn, minlength=6)
    assert counts[[0, 3, 5]].sum() == 0
    kept = [1, 2, 4]
    expected = 20000 * probabilities[kept].numpy()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 9.21  # two degrees, p > 0.01
    assert draw_token(probabilities, 0.0) == 1
    assert draw_token(probabilities, 1 - 2**-53) == 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"min_p": 0.1, "do_sample": False}, "min_p=0.1 needs do_sample"),
        ({"min_p": 1.5, "do_sample": True}, "min_p=1.5 must be from 0 to 1"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan must be finite"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"bad_words_ids": ((),)}, "bad_words_ids"),
        ({"stop_strings": ("",)}, "stop_strings"),
        ({"stop_strings": "stop"}, "stop_strings"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"logprobs": 1, "num_beams": 2}, "logprobs and num_beams"),
        ({"temperature": float("inf"), "do_sample": True}, "temperature=inf"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        GenerationConfig(**options)
