"""Span corruption training of encoder-decoders: the pretraining of CPM-2 and T5.

Spans are replaced by sentinels; the target is the sequence of all sentinels, each followed by its
span, and one final sentinel. With `init_from`, the recipe fine-tunes a model on raw text.

Source: Raffel et al. (2020), section 3.1.4; ``preprocess_data_enc_dec.py`` and
``enc_dec_dataset.py`` of TsinghuaAI/CPM-2-Pretrain, which packs texts into sequences; in this
module every text is a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.load.order import derive_key, permute
from bmforge.errors import ConfigError
from bmforge.models.cpm2 import CPM2Config
from bmforge.models.t5 import T5Config
from bmforge.parallel import World
from bmforge.recipes.inputs.document_segments import DocumentSegments, open_segments, open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig, open_examples
from bmforge.recipes.inputs.span_corpus import SpanCorpus, is_span_corpus
from bmforge.recipes.inputs.splitting import check_split
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import traits_of
from bmforge.tokenizers import Tokenizer

__all__ = [
    "CPM2SpansConfig",
    "SpanConfig",
    "T5SpansConfig",
    "corrupt_spans",
    "count_spans",
    "divide_randomly",
    "find_sentinels",
    "train_spans",
]

Seed = tuple[int | str, ...]


@dataclass(kw_only=True)
class SpanConfig(RunConfig):
    """Config for training on span corruption; the other fields are those of `RunConfig`.

    Args:
        data: `paths` are directories of `bmforge prepare` or token stores; `seq_len` is the maximum
            text length in tokens. Prefixes of CPM-Pretrain's preprocessed corpora (PREFIX_context
            and so on) are also accepted; `seq_len` is then the length of their packed rows, and the
            options of span corruption have no effect.
        target_len: maximum target length in tokens; longer targets are truncated (if None: the
            length of the longest possible target).
        noise_density: fraction of the tokens, above 0 and below 1, that are in corrupted spans.
        mean_span_length: mean length of a corrupted span in tokens, at least 1.
        shortest: minimum length of a text in tokens; shorter texts are skipped.
    """

    data: ExampleConfig = field(default_factory=ExampleConfig)
    target_len: int | None = None
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    shortest: int = 10


@dataclass(kw_only=True)
class CPM2SpansConfig(SpanConfig):
    """Config for pretraining a CPM-2 on span corruption; `model` is its config."""

    run_dir: Path = Path("runs/cpm2-pretrain")
    model: CPM2Config = field(default_factory=lambda: CPM2Config.preset("cpm2-2.1"))


@dataclass(kw_only=True)
class T5SpansConfig(SpanConfig):
    """Config for pretraining a T5 on span corruption; `model` is its config."""

    run_dir: Path = Path("runs/t5-pretrain")
    model: T5Config = field(default_factory=lambda: T5Config.preset("t5-v1_1-small"))


def train_spans(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume T5's span-corruption training.

    Args:
        config: a `SpanConfig` whose `model` is the config of a CPM-2, T5 or other encoder-decoder.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, head="sequence_to_sequence")


def count_spans(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """Return the numbers of corrupted tokens and of spans for a text of `length` tokens."""
    noise = min(max(round(length * density), 1), length - 1)
    return noise, min(max(round(noise / mean_length), 1), length - noise)


def corrupt_spans(
    ids: Sequence[int],
    sentinels: Sequence[int],
    seed: Seed,
    density: float = 0.15,
    mean_length: float = 3.0,
) -> tuple[list[int], list[int]]:
    """Replace random spans of a text with sentinels; return the source and the target.

    Args:
        ids: token ids of the text; at least 2.
        sentinels: ids of the sentinels: one for each span, and one for the end of the target.
        seed: random seed of the spans; the text begins with uncorrupted tokens and ends with a
            span.
        density: fraction of the tokens in spans.
        mean_length: mean span length in tokens.
    """
    noise, spans = count_spans(len(ids), density, mean_length)
    lengths = divide_randomly(len(ids) - noise, spans, derive_key(*seed, "kept"))
    cut = divide_randomly(noise, spans, derive_key(*seed, "cut"))
    source: list[int] = []
    target: list[int] = []
    at = 0
    for number, (keep, drop) in enumerate(zip(lengths, cut, strict=True)):
        source += [*ids[at : at + keep], sentinels[number]]
        target += [sentinels[number], *ids[at + keep : at + keep + drop]]
        at += keep + drop
    return source, [*target, sentinels[spans]]


def divide_randomly(total: int, parts: int, key: bytes) -> list[int]:
    """Divide `total` into `parts` random positive integers, determined by `key`."""
    cuts = permute(np.arange(parts - 1), max(total - 1, 1), key) + 1
    return [b - a for a, b in pairwise([0, *sorted(cuts.tolist()), total])]


def find_sentinels(tokenizer: Tokenizer, name: str) -> list[int]:
    """Return the ids of the tokenizer's sentinels; `name` contains {} for their index."""
    ids: list[int] = []
    while (id := tokenizer.token_to_id(name.format(len(ids)))) is not None:
        ids.append(id)
    return ids


def _sentinels_of(model: Any, tokenizer: Tokenizer) -> list[int]:
    name = traits_of(model).sentinel
    # CPM-Pretrain's T5 has the vocabulary of CPM-2.
    return find_sentinels(tokenizer, name) or find_sentinels(tokenizer, "<s_{}>")


class _SpanExamples:
    """`ExampleSource` of texts with span corruption."""

    def __init__(self, segments: DocumentSegments, config: Any, tokenizer: Tokenizer) -> None:
        self._segments, self._config = segments, config
        self._traits = traits_of(config.model)
        self._end = tokenizer.eos_id
        self._sentinels = _sentinels_of(config.model, tokenizer)
        longest = config.data.seq_len
        counts = [self._count(n) for n in range(2, longest + 1)]
        most = max(spans for _, spans in counts)
        if most + 1 > len(self._sentinels):
            raise ConfigError(
                f"texts of data.seq_len={longest} tokens have up to {most} spans, which need "
                f"{most + 1} sentinel tokens, but the tokenizer has {len(self._sentinels)} "
                f"({self._traits.sentinel.format(0)}, ...). Reduce data.seq_len, or raise "
                "mean_span_length."
            )
        source, target = longest + 1, max(noise + spans for noise, spans in counts) + 2
        target = min(target, config.target_len or target)
        self.columns: Mapping[str, tuple[int, int]] = {
            "input_ids": (source, config.model.pad_token_id),
            "attention_mask": (source, 0),
            "labels": (target, IGNORE_INDEX),
        }
        self.fingerprint = fingerprint_of(
            segments.fingerprint, config.noise_density, config.mean_span_length, target
        )
        self.content = segments.content

    def __len__(self) -> int:
        return len(self._segments)

    def make(self, index: int, seed: Seed) -> Example:
        """Return the text at `index` with randomly corrupted spans, which depend on `seed`."""
        config, end = self._config, [self._end]
        inside = self._traits.ends_inside
        ids = [*self._segments[index].tolist(), *(end if inside else [])]
        source, target = corrupt_spans(
            ids, self._sentinels, seed, config.noise_density, config.mean_span_length
        )
        if not inside:
            source, target = source + end, target + end  # type: ignore[operator]
        target = target[: self.columns["labels"][0]]
        return {"input_ids": source, "attention_mask": [1] * len(source), "labels": target}

    def _count(self, length: int) -> tuple[int, int]:
        config = self._config
        return count_spans(length, config.noise_density, config.mean_span_length)


def _open_corpus(config: Any, tokenizer: Tokenizer, rows: World) -> TrainingData:
    """Open corpora to which span corruption was applied during preprocessing."""
    data, usual = config.data, type(config)()
    unused = ("noise_density", "mean_span_length", "shortest")
    changed = [name for name in unused if getattr(config, name) != getattr(usual, name)]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} have no effect, because span corruption was applied to "
            f"{list(data.paths)} when the data was prepared. Leave these options out."
        )
    check_split(data.split, data.validation, data.paths)
    sentinels = _sentinels_of(config.model, tokenizer)

    def open_part(prefixes: Sequence[str], index: int) -> SpanCorpus:
        return SpanCorpus(prefixes, data.split, index, config, sentinels, len(tokenizer))

    held_out = open_part(data.validation, 0) if data.validation else None
    if any(data.split[1:2]):
        held_out = open_part(data.paths, 1)
    source = open_part(data.paths, 0)
    return open_examples(source, held_out, data, rows, save_tokenizer=tokenizer.save_pretrained)


def _open_data(config: Any, rows: World) -> TrainingData:
    tokenizer = open_tokenizer(config)
    if any(map(is_span_corpus, config.data.paths)):
        return _open_corpus(config, tokenizer, rows)
    if tokenizer.eos_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token. Set one in the tokenizer's config."
        )
    inside = traits_of(config.model).ends_inside
    segments, held_out = open_segments(
        config.data,
        config.model.vocab_size,
        max(2, config.shortest),
        config.data.seq_len - inside,
        tokenizer.eos_id,
    )
    return open_examples(
        _SpanExamples(segments, config, tokenizer),
        None if held_out is None else _SpanExamples(held_out, config, tokenizer),
        config.data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
    )
