"""Tests of models with LoRA modules, int8 weights or resized layers, for every family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bmforge.memory.activations import apply_activation_offload_
from bmforge.memory.copies import make_copy_engine
from bmforge.models import Model, ModelConfig, init_weights_
from bmforge.models.changes import freeze_base_
from bmforge.parallel import Layout
from bmforge.surgery import persistent_tensors
from bmforge.testing.batches import Batch, make_labels
from bmforge.testing.capability import capability
from bmforge.testing.changed_models import (
    change_everything,
    list_outputs,
    list_parts,
    list_stored,
    low_rank_everywhere,
    merge_parts_,
    randomize_parts_,
    resize_changes,
    run_step_of,
    stored_as_int8,
    to_float64,
    value_of,
    zero_removed_units_,
)
from bmforge.testing.layouts import check_suite, train_and_save
from bmforge.testing.pool import run_distributed
from bmforge.testing.suite_base import SuiteBase, stream_all_blocks_
from bmforge.testing.tolerance import assert_close, assert_equal_trees

__all__ = ["ChangedSuite"]


class ChangedSuite(SuiteBase):
    """Tests of models with adapters, pruning or quantization in `config.changes`.

    `FamilySuite` inherits this class.
    """

    @pytest.fixture
    def changed(self, tiny: Model) -> ModelConfig:
        """Fixture: the tiny config with resized layers, LoRA modules and int8 weights."""
        return self.changed_config(tiny)

    def changed_config(self, tiny: Model) -> ModelConfig:
        """Return a model's config with resized layers, LoRA modules and int8 weights."""
        return tiny.config.replace(changes=change_everything(tiny))

    @capability("low-rank")
    def test_low_rank_equals_merged_model(self, tiny: Model) -> None:
        """LoRA modules compute the same outputs as merged weights, and matching gradients."""
        model, batch = self._doubled(tiny)
        merged_model = copy.deepcopy(model)
        model.change_(low_rank_everywhere(model))
        for part in list_parts(model):
            for name, parameter in part.named_parameters():
                if name.endswith("up"):
                    nn.init.normal_(parameter, std=0.1)
        merged = merge_parts_(model, merged_model)
        got, want = run_step_of(model, batch), run_step_of(merged_model, batch)
        assert_close(got["loss"], want["loss"])
        for name, (down, up, scale) in merged.items():
            grad = want[f"grad/{name}"]
            assert_close(got[f"grad/{up}"], scale * grad @ value_of(model, down).mT)
            assert_close(got[f"grad/{down}"], scale * value_of(model, up).mT @ grad)

    @capability("int8")
    def test_int8_is_bit_identical_to_dequantized(self, tiny: Model) -> None:
        """Loss, logits and gradients with int8 and dequantized weights are bit-identical."""
        model, batch = self._doubled(tiny)
        twin = copy.deepcopy(model)
        model.change_(stored_as_int8(model))
        parameters = dict(twin.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, rows, scale in list_stored(model):
                parameters[name].copy_(rows.double() * scale.double()[..., None])
        got, want = run_step_of(model, batch), run_step_of(twin, batch)
        assert_equal_trees(got, {name: want[name] for name in got})

    @capability("resize")
    def test_resized_equals_model_with_zeros(self, tiny: Model) -> None:
        """A narrower model has the loss of the full model with zeros in the removed weights."""
        model, batch = self._doubled(tiny)
        full_model = copy.deepcopy(model)
        for change in resize_changes(tiny):
            model.change_(change)
        zero_removed_units_(full_model, model)
        got, want = run_step_of(model, batch), run_step_of(full_model, batch)
        assert_close(got["loss"], want["loss"])
        counted = sum(tensor.numel() for tensor in persistent_tensors(model).values())
        assert counted < sum(tensor.numel() for tensor in persistent_tensors(full_model).values())

    @capability("changed: save")
    def test_changed_saves_and_opens(
        self, tiny: Model, changed: ModelConfig, tmp_path: Path
    ) -> None:
        """A model with LoRA, int8 and resized layers is saved and loaded exactly."""
        model = self.model_class.from_config(changed).eval()
        meta = init_weights_(self.model_class.from_config(changed, device="meta"), 0)
        assert_equal_trees(meta.state_dict(), model.state_dict())
        # LoRA modules may be added before or after a resize.
        *sizes, parts, rows = changed.changes
        after = self.model_class.from_config(tiny.config.replace(changes=tuple(sizes)))
        after.change_(parts).change_(rows)
        assert_equal_trees(after.state_dict(), model.state_dict())
        randomize_parts_(model)
        model.save_pretrained(tmp_path)
        again = self.model_class.from_pretrained(tmp_path)
        assert again.config == changed
        assert_equal_trees(persistent_tensors(again), persistent_tensors(model))
        inputs = self.make_inputs(model)
        assert_equal_trees(list_outputs(again(**inputs)), list_outputs(model(**inputs)))
        assert_equal_trees(
            list_outputs(copy.deepcopy(model)(**inputs)), list_outputs(model(**inputs))
        )

    @capability("changed: recompute", "changed: stream", "changed: offload")
    def test_changed_streams(self, changed: ModelConfig) -> None:
        """Blocks with int8 weights and LoRA modules can be streamed, with activations offloaded."""
        model = self.model_class.from_config(changed)
        randomize_parts_(model)
        freeze_base_(model)
        batch = self.make_inputs(model)
        batch |= make_labels(model, batch)
        want = run_step_of(model, batch)
        streamer, blocks = stream_all_blocks_(model)
        engine = make_copy_engine(torch.device("cpu"), records=True)
        apply_activation_offload_(blocks, engine, keep_last=0, smallest_elements=1)
        assert_equal_trees(run_step_of(model, batch), want)
        assert engine.events
        streamer.close()

    @pytest.mark.long
    @capability("changed: compile")
    def test_changed_compiles_whole(self, changed: ModelConfig) -> None:
        """A model with LoRA, int8 and resized layers compiles to one graph; results are equal."""
        torch.compiler.reset()
        model = self.model_class.from_config(changed, dtype=torch.float64)
        batch = to_float64(self.make_inputs(model))
        batch |= make_labels(model, batch)
        want = run_step_of(model, batch)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_close(run_step_of(compiled, batch, model), want)
        torch.compiler.reset()

    @capability("changed: generate")
    def test_changed_generates(self, tiny: Model) -> None:
        """A model with int8 layers and LoRA modules generates the same ids as its merged copy."""
        model = copy.deepcopy(tiny).double()
        model.change_(stored_as_int8(model)).change_(low_rank_everywhere(model))
        randomize_parts_(model, 1.0)
        plain = copy.deepcopy(tiny).double()
        parameters = dict(plain.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, rows, scale in list_stored(model):
                parameters[name].copy_(rows.double() * scale.double()[..., None])
        before = self.write_text(plain)
        if before is None:
            pytest.skip("writes no text")
        merge_parts_(model, plain)
        got, want = self.write_text(model), self.write_text(plain)
        assert torch.equal(got, want)
        assert not torch.equal(want, before)

    @pytest.mark.long
    @capability("changed: checkpoint")
    def test_changed_resumes_on_another_layout(self, changed: ModelConfig, tmp_path: Path) -> None:
        """A checkpoint of two pipeline stages resumes exactly on one process.

        Two steps on the pipeline and one step on a single process lead to the same parameters as
        three steps on a single process.
        """
        model = self.model_class.from_config(changed)
        inputs = self.make_inputs(model, batch=4)
        arguments = self.model_class, changed, inputs, make_labels(model, inputs)
        (want,) = run_distributed(train_and_save, 1, *arguments, Layout(), 3, None, None)
        layout, folder = Layout(tp=2, pp=2), str(tmp_path)
        run_distributed(train_and_save, 4, *arguments, layout, 2, None, folder)
        (got,) = run_distributed(train_and_save, 1, *arguments, Layout(), 3, folder, None)
        assert_close(got, want)

    @pytest.mark.long
    @capability("changed: zero-3")
    def test_changed_zero_3(self, changed: ModelConfig) -> None:
        """ZeRO-3 with a frozen base and recompute gives the same results as one process."""
        self.check_changed(changed, "zero-3", frozen=True)

    @pytest.mark.long
    @capability("changed: zero-2")
    def test_changed_zero_2(self, changed: ModelConfig) -> None:
        """ZeRO-2 with a frozen base gives the same results as one process."""
        self.check_changed(changed, "zero-2", frozen=True)

    @pytest.mark.long
    @capability("changed: tensor")
    def test_changed_tensor_parallel(self, changed: ModelConfig) -> None:
        """Tensor parallelism with LoRA and int8 weights gives the same results as one process."""
        self.check_changed(changed, "tensor")

    @pytest.mark.long
    @capability("changed: sequence")
    def test_changed_sequence_parallel(self, changed: ModelConfig) -> None:
        """Tensor parallelism with sequence parallelism gives the same results as one process."""
        self.check_changed(changed, "sequence")

    @pytest.mark.long
    @capability("changed: pipeline")
    def test_changed_pipeline(self, changed: ModelConfig) -> None:
        """Two pipeline stages give the same results as one process."""
        self.check_changed(changed, "pipeline")

    @pytest.mark.long
    @capability("changed: context")
    def test_changed_context_parallel(self, changed: ModelConfig) -> None:
        """Context parallelism on two processes gives the same results as one process."""
        self.check_changed(changed, "context")

    @pytest.mark.long
    @capability("changed: combined")
    def test_changed_layouts_combine(self, changed: ModelConfig) -> None:
        """Pipeline, tensor and sequence parallelism combined give the results of one process."""
        self.check_changed(changed, "combined")

    def check_changed_experts(self, changed: ModelConfig) -> None:
        """Check expert parallelism with LoRA modules and int8 weights (families with experts)."""
        self.check_changed(changed, "expert")

    def check_changed(self, changed: ModelConfig, where: str, **more: Any) -> None:
        """Compare three training steps on a parallel layout with the same steps on one process."""
        check_suite(self, changed, where, **more)

    def _doubled(self, tiny: Model) -> tuple[Any, Batch]:
        """Return a float64 copy of the model and a batch for it."""
        model = copy.deepcopy(tiny).double()
        batch = to_float64(self.make_inputs(model))
        return model, batch | make_labels(model, batch)
