"""Tests of quantized weights for every family: comparison with dequantized weights, and saving."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.models import Model
from bmforge.models.pack import find_targets, quantize_
from bmforge.nn.packing import PRESETS
from bmforge.nn.quantized import PackedStore, QuantizedExperts
from bmforge.surgery import match_names, persistent_tensors
from bmforge.testing.batches import make_labels
from bmforge.testing.capability import capability
from bmforge.testing.changed_models import list_outputs, run_step_of, to_float64
from bmforge.testing.changed_suite import ChangedSuite
from bmforge.testing.tolerance import assert_close, assert_equal_trees

__all__ = ["QuantizedSuite", "dequantized_twin"]


def dequantized_twin(plain: Model, model: Model) -> Model:
    """Return a copy of `plain` with the dequantized weights of the quantized model."""
    twin: Any = copy.deepcopy(plain)
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, QuantizedExperts):
                for key in module.stack_sizes():
                    target = parameters[f"{name}.{key}"]
                    target.copy_(module.dense(key, target.dtype))
            elif isinstance(module, PackedStore):
                target = parameters[f"{name}.weight"]
                target.copy_(module.dense(target.dtype))  # type: ignore[operator]
    return twin


class QuantizedSuite(ChangedSuite):
    """Tests of quantized models; `FamilySuite` inherits this."""

    @pytest.fixture
    def wide(self) -> Model:
        """Fixture: a new model with the sizes of `wide_config`."""
        return self.model_class.from_config(self.wide_config()).eval()

    @pytest.mark.parametrize("scheme", ["int4", "int8"])
    @capability("int4")
    def test_packed_equals_dequantized(self, wide: Model, scheme: str) -> None:
        """Loss and gradients equal those of dequantized weights, up to int8 activation rounding."""
        plain: Any = copy.deepcopy(wide).double()
        spec = replace(PRESETS[scheme], activations="float")
        model: Any = quantize_(copy.deepcopy(plain), spec)
        batch = to_float64(self.make_inputs(model))
        batch |= make_labels(model, batch)
        got = run_step_of(model, batch)
        want = run_step_of(dequantized_twin(plain, model), batch)
        assert_close(got, {name: want[name] for name in got})
        for used, off in ((spec, 1e-4), (PRESETS[scheme], 0.05)):
            served: Any = quantize_(copy.deepcopy(wide), used)
            loss = served(
                **{n: t.float() if t.is_floating_point() else t for n, t in batch.items()}
            )
            assert_close(loss.loss.double(), want["loss"], rtol=off, atol=off)

    @capability("int4")
    def test_packed_saves_and_opens(self, wide: Model, tmp_path: Path) -> None:
        """All default target layers are quantized, and the model is saved and loaded exactly.

        Quantizing an unquantized model while it is loaded gives the same result.
        """
        wide.save_pretrained(tmp_path / "plain")
        model = quantize_(copy.deepcopy(wide), "int4")
        names = match_names([n for n, _ in wide.named_modules()], find_targets(wide))
        assert all(isinstance(model.get_submodule(name), PackedStore) for name in names)
        model.save_pretrained(tmp_path / "packed")
        inputs = self.make_inputs(model)
        want = list_outputs(model(**inputs))
        for folder, scheme in (("packed", None), ("plain", "int4")):
            again = self.model_class.from_pretrained(tmp_path / folder, quantize=scheme)
            assert_equal_trees(persistent_tensors(again), persistent_tensors(model))
            assert_equal_trees(list_outputs(again(**inputs)), want)
