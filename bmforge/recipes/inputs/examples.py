"""Batches of examples: rows of tensors of fixed widths, made when they are asked for.

Which example the global sample number n is, and all that is drawn to make it, depends on (seed, n)
alone, so the order is the same on any number of processes and a run goes on exactly where it
stopped. `pieces.py` and the recipes have the sources of examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from bmforge.batch import IGNORE_INDEX
from bmforge.data import Batch, TokenStore
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.load.order import derive_key, permute
from bmforge.errors import ConfigError, DataError
from bmforge.parallel import World
from bmforge.recipes.run import TrainingData

__all__ = [
    "ExampleConfig",
    "ExampleLoader",
    "ExampleSource",
    "collate",
    "digest_stores",
    "iter_held_out",
    "open_examples",
]

Seed = tuple[int | str, ...]


@dataclass(kw_only=True)
class ExampleConfig:
    """What a run on examples reads.

    Args:
        paths: files, or token stores where the recipe says so.
        validation: held out, of the same form.
        tokenizer: directory of the tokenizer; None takes `init_from`'s.
        seq_len: longest row in tokens.
        global_batch_size: rows per optimizer step over all processes.
        micro_batch_size: rows per forward pass on one process.
        grad_accum_steps: passes that an optimizer step adds up; sets global_batch_size to
            micro_batch_size x this x processes / tp / pp / cp. None takes what global_batch_size
            needs.
        split: where paths are bare token stores: shares of their documents to learn from, to
            validate on and to leave out, such as 949 50 1; empty learns from all.
        validation_batches: stop an evaluation after so many micro-batches; None reads all.
        seed: of the order, and of all that is drawn to make an example.
    """

    paths: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    tokenizer: str | None = None
    seq_len: int = 512
    global_batch_size: int = 32
    micro_batch_size: int = 8
    grad_accum_steps: int | None = None
    split: tuple[float, ...] = ()
    validation_batches: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, or nothing to read."""
        names = ("seq_len", "global_batch_size", "micro_batch_size")
        wrong = [f"data.{n}={getattr(self, n)} must be at least 1" for n in names]
        wrong = [text for text, n in zip(wrong, names, strict=True) if getattr(self, n) < 1]
        if not self.paths:
            wrong.append("data.paths is empty; name what to read with --data.paths")
        if wrong:
            raise ConfigError(f"{'; '.join(wrong)}.")


class ExampleSource(Protocol):
    """Where examples come from.

    Attributes:
        columns: name of a tensor -> (its width, what fills it up behind an example); ``labels`` is
            one of them.
        fingerprint: hex digits that change when an example would.

    Where examples come from token stores, `content`, an int, changes with what is in these. Where
    they are not rows of integers, a method `collate` lays them side by side.
    """

    columns: Mapping[str, tuple[int, int]]
    fingerprint: str

    def __len__(self) -> int:
        """Return the number of examples."""

    def make(self, index: int, seed: Seed) -> Example:
        """Return example `index`; what is drawn for it depends on `seed` alone."""


class ExampleLoader:
    """Yield, for one optimizer step after the other without end, this rank's micro-batches.

    The rows of a step lie in slots [micro-batch][rank][row]; slots beyond the global batch size
    hold rows without labels, so that all ranks see the same shapes.

    Args:
        source: the examples; every one comes once an epoch.
        config: sizes and seed: an `ExampleConfig`, or another that has its fields for these.
        rank: this data-parallel rank.
        world: number of data-parallel ranks.

    Raises:
        ConfigError: a size is out of range.
        DataError: there is no example.
    """

    is_endless = True

    def __init__(self, source: ExampleSource, config: Any, rank: int = 0, world: int = 1) -> None:
        config.check()
        if len(source) == 0:
            raise DataError(f"{list(config.paths)} hold no example to learn from.")
        self._source, self._config = source, config
        self._rank, self._world = rank, world
        self._samples = 0

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next optimizer step."""
        config = self._config
        size, total = config.micro_batch_size, config.global_batch_size
        first = self._samples
        batches = []
        for start in range(0, total, size * self._world):
            slots = range(start + self._rank * size, start + (self._rank + 1) * size)
            rows = [self._row(first + slot if slot < total else None) for slot in slots]
            batches.append(_lay(rows, self._source))
        self._samples += total
        return batches

    def _row(self, number: int | None) -> Example:
        """Return the example of a global sample number; one without labels for None."""
        if number is None:
            return _unlabel(self._source.make(0, ("padding",)))
        count, seed = len(self._source), self._config.seed
        epoch, place = divmod(number, count)
        key = derive_key("examples", seed, epoch)
        index = int(permute(np.array([place]), count, key)[0])
        return self._source.make(index, ("example", seed, number))

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands; the same on every rank."""
        return {
            "samples": self._samples,
            "seed": self._config.seed,
            "dataset": self._source.fingerprint,
            "content": getattr(self._source, "content", 0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken, on any world and batch size.

        Raises:
            ConfigError: the state is of other examples or another seed.
        """
        ours = self.state_dict()
        state = {"content": ours["content"], **state}  # states of earlier versions have none
        for key in ("seed", "dataset", "content"):
            if state.get(key) != ours[key]:
                raise ConfigError(
                    f"loader state has {key}={state.get(key)}, this loader has {key}="
                    f"{ours[key]}: the order cannot go on; restore it or start a new "
                    "run."
                )
        self._samples = int(state["samples"])


def iter_held_out(
    source: ExampleSource, config: Any, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Yield this rank's batches of one pass in order; the same ones every time.

    All ranks get equally many; what is missing at the end is rows without labels.
    """
    size, total = config.micro_batch_size, len(source)
    if config.validation_batches is not None:
        total = min(total, config.validation_batches * size)
    for start in range(rank * size, total + rank * size, size * world):
        rows = [
            source.make(i, ("held out", i)) if i < total else _unlabel(source.make(0, ("padding",)))
            for i in range(start, start + size)
        ]
        yield _lay(rows, source)


def open_examples(
    source: ExampleSource,
    held_out: ExampleSource | None,
    config: ExampleConfig,
    rows: World,
    **fields: Any,
) -> TrainingData:
    """Return what a run on examples reads; `fields` are further ones of `TrainingData`."""
    parts = {}
    if held_out is not None and len(held_out):
        parts["validation"] = lambda: iter_held_out(held_out, config, rows.rank, rows.size)
    loader = ExampleLoader(source, config, rows.rank, rows.size)
    return TrainingData(loader, config.seq_len, parts, epoch_rows=len(source), **fields)


def digest_stores(stores: Sequence[TokenStore]) -> int:
    """Return 63 bits of what is in token stores, wherever they lie."""
    return int(fingerprint_of([store.digest() for store in stores])[:16], 16) >> 1


def _unlabel(example: Example) -> Example:
    return {**example, "labels": [IGNORE_INDEX] * len(example["labels"])}


def _lay(rows: Sequence[Example], source: ExampleSource) -> Batch:
    """Lay rows side by side as their source wants it."""
    own = getattr(source, "collate", None)
    return collate(rows, source.columns) if own is None else own(rows)


def collate(rows: Sequence[Example], columns: Mapping[str, tuple[int, int]]) -> Batch:
    """Lay rows side by side, filled up behind.

    Shape:
        every tensor (B, its width), int64
    """
    batch = {}
    for name, (width, filling) in columns.items():
        table = np.full((len(rows), width), filling, dtype=np.int64)
        for line, row in zip(table, rows, strict=True):
            line[: len(row[name])] = row[name]
        batch[name] = torch.from_numpy(table)
    return batch
