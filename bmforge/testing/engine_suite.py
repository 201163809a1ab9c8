"""Tests of inference within a memory budget, for every family."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig
from bmforge.infer.engine.workspace import largest_runs
from bmforge.memory.naive_parallel import spread_blocks_
from bmforge.models import Model
from bmforge.records import units_of
from bmforge.shards import is_streamed
from bmforge.surgery import persistent_tensors
from bmforge.testing.batches import make_labels
from bmforge.testing.capability import capability
from bmforge.testing.changed_models import list_outputs, run_step_of
from bmforge.testing.fake_devices import FIRST, SECOND, FakeDevices
from bmforge.testing.suite_base import SuiteBase
from bmforge.testing.tolerance import assert_equal_trees

__all__ = ["EngineSuite"]

# At least as many tokens as the inputs have; the configs of some cases state fewer.
_TOKENS = 256
_LAYERS = 4


class EngineSuite(SuiteBase):
    """Comparison of models with and without a memory budget; `FamilySuite` inherits this.

    Attributes:
        deep_options: config fields of a model with four blocks, so that some are streamed with the
            smallest budget.
    """

    deep_options: Mapping[str, Any] = {}

    @pytest.fixture
    def deep(self, tiny: Model) -> Model:
        """Fixture: a tiny model with enough blocks that some are streamed."""
        config = tiny.config.replace(num_layers=_LAYERS, **self.deep_options)
        return type(tiny).from_config(config, seed=2).eval()

    @capability("engine")
    @torch.no_grad()
    def test_engine_is_bit_identical(self, deep: Model, tmp_path: Path) -> None:
        """Outputs and generated ids with the smallest budget are bit-identical to those without."""
        inputs = self.make_inputs(deep)
        want, text = list_outputs(deep(**inputs)), self.write_text(deep)
        deep.save_pretrained(tmp_path)
        config = _config_of(deep)
        least = _smallest(tmp_path, config)
        with Engine(tmp_path, device_budget_bytes=least, config=config) as engine:
            assert engine.plan.moved_bytes
            for _ in range(2):
                assert_equal_trees(list_outputs(engine.model(**inputs)), want)
            assert text is None or torch.equal(self.write_text(engine.model), text)  # type: ignore[arg-type]

    @capability("devices")
    @torch.no_grad()
    def test_devices_are_bit_identical(self, deep: Model, tmp_path: Path) -> None:
        """On two devices, outputs and generated ids are bit-identical to those on one device."""
        inputs = self.make_inputs(deep)
        want, text = list_outputs(deep(**inputs)), self.write_text(deep)
        deep.save_pretrained(tmp_path)
        devices = ["cpu", "cpu"]
        config = _config_of(deep)
        budget = _smallest(tmp_path, config, devices=devices)
        with Engine(tmp_path, devices=devices, device_budget_bytes=budget, config=config) as engine:
            assert all(plan.used_bytes <= budget for plan in engine.plan.each())
            assert 0 < len(engine.plan.elsewhere) < len(_blocks_of(deep))
            assert_equal_trees(list_outputs(engine.model(**inputs)), want)
            assert text is None or torch.equal(self.write_text(engine.model), text)  # type: ignore[arg-type]

    @capability("devices")
    def test_no_operation_mixes_devices(self, deep: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a model that is split over devices, no operation has arguments on two devices."""
        places = {name: (FIRST, SECOND)[n % 3 % 2] for n, name in enumerate(_blocks_of(deep))}
        inputs, runs, fake = self.make_inputs(deep), largest_runs(deep), FakeDevices()
        inputs |= make_labels(deep, inputs)
        spread_blocks_(deep, places, FIRST)
        fake.place_(deep, FIRST, places)
        # Pretend to compile: code that reads tensor values is then skipped.
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with fake:
            loss = deep(**fake.move(inputs, FIRST)).loss
            assert loss.device == FIRST
            loss.backward()
            with torch.no_grad():
                for run in runs:
                    run(deep, torch.zeros(2, 6, dtype=torch.int64, device=FIRST))
        trained = [p for p in deep.parameters() if p.grad is not None]
        assert all(p.grad.device == p.device for p in trained)  # type: ignore[union-attr]
        assert {p.device for p in trained} == {FIRST, SECOND}

    @capability("budget")
    @pytest.mark.parametrize("share", [0.0, pytest.param(0.5, marks=pytest.mark.long), 1.0])
    def test_budget_is_not_exceeded(self, deep: Model, share: float) -> None:
        """Device memory never holds more weights than planned.

        A budget does not change gradients.
        """
        batch = self.make_inputs(deep)
        batch |= make_labels(deep, batch)
        want = run_step_of(copy.deepcopy(deep), batch)
        config, weight_bytes = _config_of(deep), _bytes_of(persistent_tensors(deep).values())
        least = _smallest(deep, config)
        with Engine(
            copy.deepcopy(deep), device_budget_bytes=least + weight_bytes, config=config
        ) as unlimited:
            budget = least + int(share * (unlimited.plan.used_bytes - least))
        with Engine(deep, device_budget_bytes=budget, config=config) as engine:
            plan = engine.plan
            assert plan.used_bytes <= budget
            assert bool(plan.moved_bytes) == (share < 1.0)
            resident = [t for t in persistent_tensors(deep).values() if not is_streamed(t)]
            assert _bytes_of(resident) <= plan.weights_bytes
            assert_equal_trees(run_step_of(deep, batch), want)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _blocks_of(model: Model) -> list[str]:
    """Return the names of a model's blocks."""
    return [unit.name for unit in units_of(model) if unit.is_block]


def _config_of(model: Any) -> EngineConfig:
    limit = model.position_limit
    return EngineConfig(max_rows=4, max_tokens=_TOKENS if limit is None else min(limit, _TOKENS))


def _smallest(source: Any, config: EngineConfig, **options: Any) -> int:
    """Return the smallest possible budget, parsed from the engine's error message."""
    with pytest.raises(ConfigError, match=r"is the smallest that works|is enough") as caught:
        Engine(source, device_budget_bytes=1, config=config, **options)
    return int(str(caught.value).split("too small: ")[1].split()[0])
