"""Training of a quality classifier and a perplexity model that score texts.

``bmforge data quality --good wiki --bad crawl --out scores`` writes ``quality.npz`` and
``perplexity.npz``, which `prepare --scores` reads. `ModelPerplexity` scores texts with a bmforge
model as a step of `prepare`.

Source: Brown et al. 2020, arXiv:2005.14165, appendix A (a classifier of good texts against a
crawl); Wenzek et al. 2020, arXiv:1911.00359 (thirds of perplexities).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from bmforge.data import normalise, read_documents
from bmforge.data.clean.score_files import save_perplexity
from bmforge.data.clean.scores import find_buckets, train_linear, train_perplexity
from bmforge.errors import ConfigError
from bmforge.files import check_place
from bmforge.infer.score import roll_windows, score_texts
from bmforge.logging import get_logger, track
from bmforge.models import AutoModel
from bmforge.settings import QualityConfig
from bmforge.tokenizers import AutoTokenizer

__all__ = ["ModelPerplexity", "QualityConfig", "train_quality"]

_LONGEST = 512  # tokens of a row, for a model with more positions


def train_quality(config: QualityConfig) -> list[Path]:
    """Train the models of a config; return their files.

    Raises:
        ConfigError: no good texts, or the files exist.
        DataError: an input cannot be read.
    """
    if not config.good:
        raise ConfigError("good is empty. Name texts that are as they should be.")
    check_place(config.out, "out")
    files = [config.out / "perplexity.npz"]
    files += [config.out / "quality.npz"] if config.bad else []
    for path in files:
        if path.exists():
            raise ConfigError(f"{str(path)!r} is there already. Name another directory.")
    good = _sample(config.good, config)
    config.out.mkdir(parents=True, exist_ok=True)
    model = train_perplexity(track(good, "count words"))
    sorted_ = _sample(config.bad or config.good, config)
    bounds = find_buckets(model(list(track(sorted_, "perplexities"))))
    save_perplexity(files[0], model, bounds)
    get_logger().info("perplexity: head up to %.1f, middle up to %.1f", *bounds)
    if config.bad:
        scorer = train_linear(good, sorted_, seed=config.seed)
        scorer.save(files[1])
        right = [score > 0.5 for score in scorer(good)] + [
            score <= 0.5 for score in scorer(sorted_)
        ]
        get_logger().info("quality: %.1f %% of its own texts right", 100 * sum(right) / len(right))
    return files


def _sample(inputs: Sequence[str], config: QualityConfig) -> list[str]:
    """Return at most `most_texts` texts of the inputs: those with the lowest hashes."""
    keyed = []
    for document in _read(inputs, config):
        key = blake2b(f"{config.seed}{document.text}".encode(), digest_size=8).digest()
        keyed.append((key, document.text))
        if len(keyed) >= 2 * config.most_texts:
            keyed = sorted(keyed)[: config.most_texts]
    return [text for _, text in sorted(keyed)[: config.most_texts]]


def _read(inputs: Sequence[str], config: QualityConfig) -> Iterator[Any]:
    for document in read_documents(list(inputs), text_field=config.text_field, skip_bad=True):
        if text := normalise(document.text):
            yield type(document)(text, document.source, document.place)


@dataclass(frozen=True)
class ModelPerplexity:
    """Function from texts to their perplexities per token under a model, for `ScoreText`.

    Each worker process opens the model itself.

    Attributes:
        model: directory or hub id of a generative model with its tokenizer.
    """

    model: str

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Return each text's perplexity; infinite for a text of fewer than two tokens."""
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
