"""What every family must do in the low-memory runtime, under any budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig
from bmforge.models import Model
from bmforge.shards import is_streamed
from bmforge.surgery import persistent_tensors
from bmforge.testing.batches import Batch, make_labels
from bmforge.testing.capability import capability
from bmforge.testing.changed import list_outputs, run_step_of
from bmforge.testing.tolerance import assert_equal_trees

__all__ = ["EngineSuite"]

_CONFIG = EngineConfig(max_rows=4)


class EngineSuite:
    """A model within a budget is the model; `FamilySuite` inherits this."""

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return the model's arguments besides labels."""
        raise TypeError(f"{type(self).__name__} defines no make_inputs")

    def write_text(self, model: Any) -> Tensor | None:
        """Return what the model writes, greedily; None for a family that writes nothing."""
        raise TypeError(f"{type(self).__name__} defines no write_text")

    @capability("engine")
    def test_engine_has_the_bits(self, tiny: Model, tmp_path: Path) -> None:
        """Opened with the smallest budget, a model answers and writes what it does without one."""
        inputs = self.make_inputs(tiny)
        want, text = list_outputs(tiny(**inputs)), self.write_text(tiny)
        tiny.save_pretrained(tmp_path)
        least = _smallest(tmp_path)
        with Engine(tmp_path, device_budget_bytes=least, config=_CONFIG) as engine:
            assert engine.plan.moved_bytes
            for _ in range(2):
                assert_equal_trees(list_outputs(engine.model(**inputs)), want)
            assert text is None or torch.equal(self.write_text(engine.model), text)  # type: ignore[arg-type]

    @capability("budget")
    @pytest.mark.parametrize("share", [0.0, pytest.param(0.5, marks=pytest.mark.long), 1.0])
    def test_budget_is_kept(self, tiny: Model, share: float) -> None:
        """Of weights no more than planned is here, and a step's loss and gradients are the same."""
        batch = self.make_inputs(tiny)
        batch |= make_labels(tiny, batch)
        want = run_step_of(copy.deepcopy(tiny), batch)
        held = sum(t.numel() * t.element_size() for t in persistent_tensors(tiny).values())
        budget = _smallest(tiny) + int(share * held)
        with Engine(tiny, device_budget_bytes=budget, config=_CONFIG) as engine:
            plan = engine.plan
            assert plan.used_bytes <= budget
            assert bool(plan.moved_bytes) == (share < 1.0)
            here = [t for t in persistent_tensors(tiny).values() if not is_streamed(t)]
            assert sum(t.numel() * t.element_size() for t in here) <= plan.weights_bytes
            assert_equal_trees(run_step_of(tiny, batch), want)


def _smallest(source: Any) -> int:
    """Return the least budget, as the engine says it."""
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        Engine(source, device_budget_bytes=1, config=_CONFIG)
    return int(str(caught.value).split("too small: ")[1].split()[0])
