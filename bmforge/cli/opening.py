"""Opening a model for a command: whole, within a budget of memory, its weights packed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from bmforge.infer.engine import Engine, EngineConfig
from bmforge.models import AutoModel
from bmforge.settings import MemoryOptions, parse_size

__all__ = ["opened_model"]


@contextmanager
def opened_model(directory: Path, memory: MemoryOptions, max_rows: int = 1) -> Iterator[Any]:
    """Have a model for as long as it is needed; of a budget the plan is shown.

    Args:
        directory: of the model.
        memory: how much it may take.
        max_rows: rows that are planned for.
    """
    if memory.device_budget is None:
        yield AutoModel.from_pretrained(directory, quantize=memory.quantize)
        return
    config = EngineConfig(max_rows=max_rows, max_tokens=memory.max_tokens)
    budget = parse_size(memory.device_budget)
    with Engine(
        directory, device_budget_bytes=budget, quantize=memory.quantize, config=config
    ) as engine:
        Console(file=sys.stderr).print(engine.plan.table())
        yield engine.model
