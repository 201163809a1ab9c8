"""Measures the prefill and decoding speed of several models, alternating between them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.report import CompressReport
from bmforge.errors import ConfigError
from bmforge.infer import Engine
from bmforge.models import Model

__all__ = ["check_speed", "measure_speeds", "with_speed"]

PREFILL, DECODE = "prefill, tokens/s", "decode, tokens/s"
# Number of prompt tokens and of generated tokens; fewer for models with a shorter maximum length.
_READ, _WRITTEN, _ROUNDS = 256, 32, 5


def check_speed(model: Model) -> None:
    """Raise `ConfigError` for a model that cannot generate."""
    if not model.traits.can_generate:
        raise ConfigError(
            f"speed=true measures prefill and generation, but a {type(model).__name__} does not "
            "generate text. Leave speed out."
        )


def measure_speeds(before: Path, others: Sequence[Path]) -> list[dict[str, float]]:
    """Measure the prefill and decoding speed of models, one request at a time, in fp32.

    Each compressed model is run alternately with the original one, so that varying load of the
    machine affects both. The figures are medians.

    Args:
        before: directory of the original model.
        others: directories of the compressed models.

    Returns:
        dicts from metric to value, for `before` and then for each other model.

    Memory: two models at a time.
    """
    first = Engine(before)
    rows: list[list[tuple[float, float]]] = [[]]
    for directory in others:
        engine, measured = Engine(directory), list[tuple[float, float]]()
        for number in range(_ROUNDS + 1):
            both = _time_once(first), _time_once(engine)
            if number:  # the first round is a warm-up
                rows[0].append(both[0])
                measured.append(both[1])
        rows.append(measured)
    return [
        dict(zip((PREFILL, DECODE), map(statistics.median, zip(*row, strict=True)), strict=True))
        for row in rows
    ]


def _time_once(engine: Engine) -> tuple[float, float]:
    """Time one request; return the tokens per second of prefill and of decoding."""
    config: Any = engine.model.config
    limit = engine.model.traits.position_limit or _READ + _WRITTEN
    written = max(2, min(_WRITTEN, limit // 4))
    read = max(1, min(_READ, limit - written))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, read), generator=generator)
    times: list[float] = []

    def note(token: Tensor) -> None:
        times.append(time.perf_counter())

    start = time.perf_counter()
    engine.generate(ids, max_new_tokens=written, eos_token_id=None, on_token=note)
    return read / (times[0] - start), (len(times) - 1) / (times[-1] - times[0])


def with_speed(report: CompressReport, source: Path) -> CompressReport:
    """Measure the original model `source` and each phase's model; add the speeds to a report."""
    first, *others = measure_speeds(source, [Path(phase.directory) for phase in report.phases])
    phases = tuple(
        dataclasses.replace(phase, speed=speed)
        for phase, speed in zip(report.phases, others, strict=True)
    )
    return dataclasses.replace(report, phases=phases, speed=first)
