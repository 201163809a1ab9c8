"""Trains a quality classifier and a perplexity model, which score texts.

``bmforge data quality --good wiki --bad crawl --out scores``, or ``--labeled labels.jsonl`` for
texts with labels, writes ``quality.npz`` and ``perplexity.npz``, which `prepare --scores` reads.
`ModelPerplexity` scores texts with a bmforge model as a step of `prepare`.
Source: Brown et al. 2020, arXiv:2005.14165, appendix A (a classifier of good texts against a
crawl); Wenzek et al. 2020, arXiv:1911.00359 (three equal parts by perplexity).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from bmforge.data import normalize_text, read_documents
from bmforge.data.clean.score_files import save_perplexity
from bmforge.data.clean.scores import (
    LinearScorer,
    find_buckets,
    train_linear,
    train_perplexity,
)
from bmforge.errors import ConfigError
from bmforge.files import check_place
from bmforge.infer.score import roll_windows, score_texts
from bmforge.logging import get_logger, track
from bmforge.models import AutoModel
from bmforge.recipes.labeled_texts import hold_out, measure_scores, read_labeled
from bmforge.settings import QualityConfig
from bmforge.tokenizers import AutoTokenizer

__all__ = ["ModelPerplexity", "QualityConfig", "train_quality"]

_LONGEST = 512  # maximum sequence length in tokens


def train_quality(config: QualityConfig) -> list[Path]:
    """Train the scoring models of a config; return the paths of their files.

    Raises:
        ConfigError: there are no texts, an option has no effect, or the output files exist.
        DataError: an input cannot be read.
    """
    _check(config)
    files = [config.out / "perplexity.npz"]
    files += [config.out / "quality.npz"] if config.bad or config.labeled else []
    for path in files:
        if path.exists():
            raise ConfigError(f"{str(path)!r} already exists. Choose another directory with --out.")
    if config.labeled:
        good, others = (_lowest(texts, config) for texts in read_labeled(config))
    else:
        good, others = _sample(config.good, config), _sample(config.bad or config.good, config)
    config.out.mkdir(parents=True, exist_ok=True)
    model = train_perplexity(track(good, "count words"))
    bounds = find_buckets(model(list(track(others, "perplexities"))))
    save_perplexity(files[0], model, bounds)
    get_logger().info("perplexity: head up to %.1f, middle up to %.1f", *bounds)
    for path in files[1:]:
        _train_classifier(good, others, config).save(path)
    return files


def _check(config: QualityConfig) -> None:
    check_place(config.out, "out")
    if config.labeled and (config.good or config.bad):
        raise ConfigError(
            "good and bad have no effect with labeled, which contains texts of both classes. "
            "Remove good and bad."
        )
    if not (config.labeled or config.good):
        raise ConfigError(
            "there are no training texts. Pass good texts with --good, and bad ones with --bad, "
            "or files of labeled texts with --labeled."
        )
    if config.good_from is not None and not config.labeled:
        raise ConfigError(
            f"good_from={config.good_from:g} has no effect without labeled. Leave it out."
        )
    if not 0 <= config.held_out_fraction < 1:
        raise ConfigError(
            f"held_out_fraction={config.held_out_fraction} must be at least 0 and below 1."
        )


def _train_classifier(
    good: Sequence[str], others: Sequence[str], config: QualityConfig
) -> LinearScorer:
    """Train the classifier on most of the texts, and log its quality on held-out texts."""
    share = config.held_out_fraction
    (learned, held_out), (learned_others, held_out_others) = (
        hold_out(texts, share, config.seed) for texts in (good, others)
    )
    scorer = train_linear(learned, learned_others, seed=config.seed)
    if held_out and held_out_others:
        score = measure_scores(scorer(held_out), scorer(held_out_others))
        get_logger().info("quality: %s", score)
    else:
        get_logger().info("quality: not measured, because there are too few held-out texts")
    return scorer


def _sample(inputs: Sequence[str], config: QualityConfig) -> list[str]:
    return _lowest((document.text for document in _read(inputs, config)), config)


def _lowest(texts: Iterable[str], config: QualityConfig) -> list[str]:
    """Sample at most `most_texts` texts: those with the lowest hashes of seed and text."""
    keyed = []
    for text in texts:
        key = blake2b(f"{config.seed}{text}".encode(), digest_size=8).digest()
        keyed.append((key, text))
        if len(keyed) >= 2 * config.most_texts:
            keyed = sorted(keyed)[: config.most_texts]
    return [text for _, text in sorted(keyed)[: config.most_texts]]


def _read(inputs: Sequence[str], config: QualityConfig) -> Iterator[Any]:
    for document in read_documents(list(inputs), text_field=config.text_field, skip_bad=True):
        if text := normalize_text(document.text):
            yield type(document)(text, document.source, document.place)


@dataclass(frozen=True)
class ModelPerplexity:
    """Function that computes the perplexity of texts under a language model, for `ScoreText`.

    Each worker process loads the model itself.

    Attributes:
        model: directory or hub id of a generative model with its tokenizer.
    """

    model: str

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Return the perplexity of each text; it is infinite for texts of fewer than two tokens."""
        model, tokenizer = _open(self.model)
        limit = model.traits.position_limit
        longest = _LONGEST if limit is None else min(limit, _LONGEST)
        return [self._one(tokenizer.encode(text), model, longest) for text in texts]

    def _one(self, ids: Sequence[int], model: Any, longest: int) -> float:
        pairs = list(roll_windows(ids, [], longest))
        if not pairs:
            return math.inf
        losses = score_texts(model, pairs)
        counts = [len(pair.answer) for pair in pairs]
        total = sum(loss * count for loss, count in zip(losses, counts, strict=True))
        return math.exp(total / sum(counts))


@lru_cache(maxsize=1)
def _open(name: str) -> tuple[Any, Any]:
    return AutoModel.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
