"""Tests that every model family must pass, without other libraries; see `model_suite.py`."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bmforge.memory.activations import apply_activation_offload_
from bmforge.memory.copies import make_copy_engine
from bmforge.models import Model, init_weights_
from bmforge.parallel import Layout
from bmforge.testing.batches import Batch, make_labels
from bmforge.testing.capability import capability
from bmforge.testing.compress_suite import CompressSuite
from bmforge.testing.delta_suite import DeltaSuite
from bmforge.testing.engine_suite import EngineSuite
from bmforge.testing.layouts import check_layout
from bmforge.testing.native_suite import NativeSuite
from bmforge.testing.prompt_suite import PromptSuite
from bmforge.testing.quantized_suite import QuantizedSuite
from bmforge.testing.serving_suite import ServingSuite
from bmforge.testing.suite_base import stream_all_blocks_
from bmforge.testing.tolerance import assert_close, assert_equal_trees

__all__ = ["FamilySuite"]


class FamilySuite(
    QuantizedSuite,
    EngineSuite,
    NativeSuite,
    ServingSuite,
    DeltaSuite,
    PromptSuite,
    CompressSuite,
):
    """Tests of building, copying, compiling and layouts, and of all inherited suites.

    A subclass sets `model_class` and defines `tiny_config`.

    Attributes:
        not_applicable: dict from capability to the reason why it does not apply to the family.
    """

    not_applicable: ClassVar[dict[str, str]] = {"expert": "has no experts"}

    @pytest.fixture
    def tiny(self) -> Model:
        """Fixture: a new tiny model."""
        return self.model_class.from_config(self.tiny_config()).eval()

    @capability("meta init")
    def test_meta_then_init(self, tiny: Model) -> None:
        """A model that is built on meta and then initialized equals a model built on the CPU."""
        config = tiny.config
        meta = self.model_class.from_config(config, device="meta")
        assert all(p.is_meta for p in meta.parameters())
        assert_equal_trees(init_weights_(meta, 0).state_dict(), tiny.state_dict())
        other = self.model_class.from_config(config, seed=1).state_dict()
        drawn = [n for n, p in tiny.named_parameters() if p.dim() > 1]
        assert not any(torch.equal(other[n], tiny.state_dict()[n]) for n in drawn)

    def test_standard_deviation_of_init(self, tiny: Model) -> None:
        """Matrices have mean 0 and the family's standard deviation; biases are 0, norms 1."""
        for name, parameter in tiny.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                offset = getattr(tiny.get_submodule(name.rpartition(".")[0]), "offset", 0.0)
                expected = 1.0 - offset if name.endswith("norm.weight") else 0.0
                assert torch.all(parameter == expected), name
                continue
            std, count = tiny.init_std(name), parameter.numel()
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(count), name
            assert abs(parameter.std().item() / std - 1) < 5 / math.sqrt(2 * count), name

    def test_copy_repr_and_pickle(self, tiny: Model) -> None:
        """A deep copy has the same outputs and shares no memory; the config can be pickled."""
        inputs = self.make_inputs(tiny)
        twin = copy.deepcopy(tiny)
        assert_equal_trees(_tensors(twin(**inputs)), _tensors(tiny(**inputs)))
        pointers = {p.data_ptr() for p in tiny.parameters()}
        assert pointers.isdisjoint(p.data_ptr() for p in twin.parameters())
        assert len(list(twin.parameters())) == len(list(tiny.parameters()))
        assert pickle.loads(pickle.dumps(tiny.config)) == tiny.config
        assert type(tiny).__name__ in repr(tiny)
        assert type(tiny.config).__name__ in repr(tiny.config)

    def test_dtypes(self, tiny: Model) -> None:
        """Outputs in half precision are close to those in fp32, and tied weights stay tied."""
        inputs = self.make_inputs(tiny)
        exact = _tensors(tiny(**inputs))
        for dtype in (torch.bfloat16, torch.float16):
            half = self.model_class.from_config(tiny.config, dtype=dtype).eval()
            assert {p.dtype for p in half.parameters()} == {dtype}
            assert len(list(half.parameters())) == len(list(tiny.parameters()))
            for name, got in _tensors(half(**_as_dtype(inputs, dtype))).items():
                assert (got.float() - exact[name]).abs().max() < 0.05 * exact[name].abs().max()

    @capability("compile")
    def test_compiles_whole(self, tiny: Model) -> None:
        """Training compiles to one graph with the same results."""
        self.check_compiled(tiny, "eager")

    @pytest.mark.long
    def test_compiles_to_code(self, tiny: Model) -> None:
        """Training compiled with inductor has the same results."""
        self.check_compiled(tiny, "inductor")

    def check_compiled(self, tiny: Model, backend: str) -> None:
        """Compare a compiled training step with an eager one."""
        torch.compiler.reset()
        batch = self.make_inputs(tiny)
        batch |= make_labels(tiny, batch)
        compiled = torch.compile(tiny, fullgraph=True, backend=backend)
        loss = compiled(**batch).loss
        loss.backward()
        got = {n: p.grad.clone() for n, p in tiny.named_parameters() if p.grad is not None}
        tiny.zero_grad()
        plain = tiny(**batch).loss
        plain.backward()
        assert_close(loss, plain)
        assert_close(got, {n: p.grad for n, p in tiny.named_parameters() if p.grad is not None})
        torch.compiler.reset()

    def test_saving_and_opening_is_exact(self, tiny: Model, tmp_path: Path) -> None:
        """Weights and config are saved and loaded exactly, in fp32 and bf16."""
        for dtype in (torch.float32, torch.bfloat16):
            model, directory = copy.deepcopy(tiny).to(dtype), tmp_path / str(dtype)
            model.save_pretrained(directory)
            again = self.model_class.from_pretrained(directory, dtype=dtype)
            assert_equal_trees(again.state_dict(), model.state_dict())
            assert again.config == model.config

    @capability("recompute")
    def test_recompute(self, tiny: Model) -> None:
        """Recomputing activations in the backward pass gives the same gradients."""
        self.check_layout(tiny, world=1, layout=Layout(), recompute=True)

    @pytest.mark.long
    @capability("zero-2")
    def test_zero_2(self, tiny: Model) -> None:
        """ZeRO-2 on two processes gives the same results as one process."""
        self.check_layout(tiny, world=2, layout=Layout(zero=2))

    @capability("zero-3")
    def test_zero_3(self, tiny: Model) -> None:
        """ZeRO-3 with recompute on two processes gives the same results as one process."""
        self.check_layout(tiny, world=2, layout=Layout(zero=3), recompute=True)

    @capability("tensor")
    def test_tensor_parallel(self, tiny: Model) -> None:
        """Tensor parallelism on two processes gives the same results as one process."""
        self.check_layout(tiny, world=2, layout=Layout(tp=2))

    @pytest.mark.long
    @capability("sequence")
    def test_sequence_parallel(self, tiny: Model) -> None:
        """Tensor and sequence parallelism with recompute give the same results as one process."""
        self.check_layout(
            tiny, world=2, layout=Layout(tp=2, sequence_parallel=True), recompute=True
        )

    @pytest.mark.long
    @capability("pipeline")
    def test_pipeline(self, tiny: Model) -> None:
        """Two pipeline stages give the same results as one process."""
        self.check_layout(tiny, world=2, layout=Layout(pp=2), micro_batches=2)

    @capability("context")
    def test_context_parallel(self, tiny: Model) -> None:
        """Context parallelism on two processes gives the same results as one process."""
        self.check_layout(tiny, world=2, layout=Layout(cp=2))

    def check_experts(self, tiny: Model) -> None:
        """Check expert parallelism on two processes; only for families with experts."""
        self.check_layout(tiny, world=2, layout=Layout(ep=2))

    @capability("combined")
    def test_layouts_combine(self, tiny: Model) -> None:
        """Pipeline, tensor and sequence parallelism combined give the results of one process."""
        layout = Layout(pp=2, tp=2, sequence_parallel=True)
        self.check_layout(tiny, world=4, layout=layout, micro_batches=2, recompute=True)

    @capability("stream", "offload")
    def test_streaming_and_offload(self, tiny: Model) -> None:
        """Streamed weights and offloaded block inputs give bit-identical results."""
        batch = self.make_inputs(tiny)
        batch |= make_labels(tiny, batch)
        want = _loss_and_gradients(tiny, batch)
        streamer, blocks = stream_all_blocks_(tiny)
        engine = make_copy_engine(torch.device("cpu"), records=True)
        apply_activation_offload_(blocks, engine, keep_last=0, smallest_elements=1)
        assert_equal_trees(_loss_and_gradients(tiny, batch), want)
        assert engine.events
        streamer.close()

    @pytest.mark.long
    def test_three_axes(self, tiny: Model) -> None:
        """Three kinds of parallelism on eight processes give the same results as one process."""
        self.check_layout(tiny, world=8, layout=Layout(tp=2, pp=2), micro_batches=2)
        self.check_layout(tiny, world=8, layout=Layout(tp=2, cp=2, zero=2))

    @pytest.mark.long
    def test_tensor_parallel_and_zero(self, tiny: Model) -> None:
        """ZeRO with tensor parallelism on four processes gives the same results as one process."""
        for zero in (0, 2, 3):
            layout = Layout(zero=zero, tp=2, sequence_parallel=zero == 3)
            self.check_layout(tiny, world=4, layout=layout)

    def check_layout(self, tiny: Model, **options: Any) -> None:
        """Compare training steps on a layout with the same steps on one process."""
        inputs = self.make_inputs(tiny, batch=4)
        check_layout(self.model_class, tiny.config, inputs, make_labels(tiny, inputs), **options)


def _loss_and_gradients(model: Model, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return {"loss": loss.detach(), **gradients}


def _tensors(output: Any) -> dict[str, torch.Tensor]:
    tensors = {name: value for name, value in output._asdict().items() if torch.is_tensor(value)}
    assert tensors
    return tensors


def _as_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}
