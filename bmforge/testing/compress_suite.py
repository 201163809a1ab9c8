"""Tests of model compression for every family: each method alone, and all together."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bmforge.compress import (
    CompressConfig,
    Compression,
    DistillConfig,
    DistillLoss,
    MoEfyConfig,
    PruneConfig,
    QuantizeConfig,
    StructureConfig,
    compress,
)
from bmforge.nn import MoE
from bmforge.nn.packed_store import PackedStore
from bmforge.surgery import persistent_tensors
from bmforge.testing.batches import make_labels
from bmforge.testing.capability import capability
from bmforge.testing.changed_models import list_outputs, to_float64
from bmforge.testing.suite_base import SuiteBase, stream_all_blocks_
from bmforge.testing.tolerance import assert_close, assert_equal_trees

__all__ = ["CompressSuite"]

_STEPS, _LR, _WIDE = 3, 1e-3, 128
_DISTILL = DistillConfig(
    losses=(DistillLoss(temperature=2.0), DistillLoss(kind="hidden", weight=0.1))
)
_QUANTIZE = QuantizeConfig(scheme="int8", training="fake")
_ZEROS = PruneConfig(pattern="2:4")
_EXPERTS = MoEfyConfig(num_experts=4, share=0.5, router="similarity")


class CompressSuite(SuiteBase):
    """Tests of compressed models; `FamilySuite` inherits this.

    Attributes:
        smaller: sizes of the layers after pruning, as a dict from config field to size.
    """

    smaller: ClassVar[dict[str, Any]] = {"intermediate_size": 64}

    def fat(self) -> Any:
        """Return a new model whose MLPs are wide enough to be halved or split into experts."""
        config = self.wide_config()
        field_names = {field.name for field in fields(config)}
        sizes = {
            name: _WIDE for name in ("intermediate_size", "expert_size") if name in field_names
        }
        return self.model_class.from_config(config.replace(**sizes)).train()

    def has_experts(self) -> bool:
        """Return True if the family already has experts."""
        return any(isinstance(module, MoE) for module in self.fat().modules())

    def skip_experts(self) -> None:
        """Skip a test that splits MLPs into experts."""
        if self.has_experts():
            pytest.skip("its layers have experts already")

    def make_small(
        self, config: CompressConfig, folder: Path, before: Any = None
    ) -> tuple[Any, Compression]:
        """Compress, train, save and load a model; return the loaded model and its `Compression`."""
        model: Any = self.fat() if before is None else before
        batch = self.make_inputs(model)
        batch |= make_labels(model, batch)
        items = float(model.count_items(batch))
        teacher = None if config.distill is None else copy.deepcopy(model)
        batches = [self.make_inputs(model)] if config.is_calibrated else None
        job = compress(model, config, teacher=teacher, batches=batches)
        objective = job.objective(_task)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=_LR)
        losses = []
        for _ in range(_STEPS):
            loss = objective(model, batch, items)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.after_step_()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        report = job.finish_()
        assert report.after.parameters > 0
        small = job.model.eval()
        self.check_opens(small, folder)
        return small, job

    @torch.no_grad()
    def check_opens(self, small: Any, folder: Path) -> None:
        """Check that the saved model has the same outputs after loading, also if it is streamed."""
        inputs = self.make_inputs(small)
        want = list_outputs(small(**inputs))
        small.save_pretrained(folder)
        again = self.model_class.from_pretrained(folder)
        assert_equal_trees(persistent_tensors(again), persistent_tensors(small))
        assert_equal_trees(list_outputs(again(**inputs)), want)
        streamer, _ = stream_all_blocks_(again)
        assert_close(list_outputs(again(**inputs)), want)
        streamer.close()

    @pytest.mark.long
    @capability("distill")
    def test_distilled(self, tmp_path: Path) -> None:
        """A student's loss decreases, and tensors needed only for training are not saved."""
        small, _ = self.make_small(CompressConfig(distill=_DISTILL), tmp_path / "model")
        assert set(persistent_tensors(small)) == set(persistent_tensors(self.fat()))

    @pytest.mark.long
    @capability("qat")
    def test_trained_with_rounding(self, tmp_path: Path) -> None:
        """Weights trained with fake quantization are packed to integers."""
        small, _ = self.make_small(CompressConfig(quantize=_QUANTIZE), tmp_path / "model")
        assert any(isinstance(module, PackedStore) for module in small.modules())

    @pytest.mark.long
    @capability("sparse")
    def test_sparsity_is_kept(self, tmp_path: Path) -> None:
        """Weights stay 2:4 sparse after steps of AdamW."""
        small, job = self.make_small(CompressConfig(prune=_ZEROS), tmp_path / "model")
        for name in job.methods[0]._places:  # type: ignore[attr-defined]
            for matrix in _matrices(small.get_parameter(name)):
                groups = (matrix.unflatten(-1, (-1, 4)) == 0).sum(-1)
                assert int(groups.min()) >= 2, name

    @pytest.mark.long
    @capability("structured")
    def test_smaller_shapes(self, tmp_path: Path) -> None:
        """Structured pruning reduces the number of parameters."""
        config = CompressConfig(structure=StructureConfig(**self.smaller))
        small, _ = self.make_small(config, tmp_path / "model")
        before = sum(t.numel() for t in persistent_tensors(self.fat()).values())
        assert sum(t.numel() for t in persistent_tensors(small).values()) < before

    @pytest.mark.long
    @capability("experts")
    def test_experts(self, tmp_path: Path) -> None:
        """MLPs split into experts compute the dense model's outputs if all experts are active."""
        self.skip_experts()
        config = CompressConfig(moefy=_EXPERTS)
        small, _ = self.make_small(config, tmp_path / "model")
        assert any(isinstance(module, MoE) for module in small.modules())
        dense = self.fat().eval().double()
        sparse = copy.deepcopy(dense)
        every = replace(_EXPERTS, share=1.0)
        inputs = to_float64(self.make_inputs(dense))
        compress(sparse, CompressConfig(moefy=every), batches=[inputs]).finish_()
        want, got = (list_outputs(model(**inputs)) for model in (dense, sparse))
        assert_close({name: got[name] for name in want}, want)

    @pytest.mark.long
    @capability("cook")
    def test_all_at_once(self, tmp_path: Path) -> None:
        """Pruning, experts, sparsity and quantization work together, with a teacher."""
        experts = None if self.has_experts() else replace(_EXPERTS, num_experts=2)
        config = CompressConfig(structure=StructureConfig(**self.smaller), moefy=experts)
        small, _ = self.make_small(config, tmp_path / "first")
        config = CompressConfig(prune=_ZEROS, quantize=_QUANTIZE, distill=_DISTILL)
        small, _ = self.make_small(config, tmp_path / "second", small.train())
        assert any(isinstance(module, PackedStore) for module in small.modules())


def _task(model: Any, batch: Any, num_items: float) -> Tensor:
    loss: Tensor = model(**batch, num_items_in_batch=num_items).loss
    return loss


def _matrices(parameter: Tensor) -> list[Tensor]:
    """Return the matrices of a parameter; a 3-D parameter has one matrix per expert."""
    return list(parameter) if parameter.dim() == 3 else [parameter]
