"""Tests of adapters for every family: each type, several at once, and every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bmforge.models import Model, ModelConfig
from bmforge.nn.latent_attention import LatentAttention
from bmforge.testing.batches import Batch, make_labels
from bmforge.testing.capability import capability
from bmforge.testing.changed_models import run_step_of, to_float64
from bmforge.testing.layouts import check_suite
from bmforge.testing.suite_base import SuiteBase, stream_all_blocks_
from bmforge.testing.tolerance import assert_close, assert_equal_trees
from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    Delta,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
    Prefix,
    SoftPrompt,
    load_delta,
    select_adapters,
    use_deltas,
)

__all__ = ["DeltaSuite", "attach_all_adapters_"]

Build = Callable[..., Delta]


def _randomize_(delta: Delta, seed: int = 5) -> Delta:
    """Set an adapter's parameters in place to random values, so that it changes the outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in delta.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return delta


def attach_all_adapters_(model: Any) -> None:
    """Attach an adapter of every type that adds modules to a model."""
    Lora(model, name="lora", rank=2)
    Adapter(model, name="adapter", width=3)
    LowRankAdapter(model, name="low_rank_adapter", reduction=4, rank=2)
    Compacter(model, name="compacter", reduction=4, division=2)
    ParallelAdapter(model, name="parallel", width=3)
    BitFit(model, name="bitfit")
    IA3(model, name="ia3")
    if not any(isinstance(module, LatentAttention) for module in model.modules()):
        Prefix(model, name="prefix", length=3, inner=4)


class DeltaSuite(SuiteBase):
    """Tests of adapters; `FamilySuite` inherits this.

    Attributes:
        takes_prompts: True if the model's inputs allow a soft prompt.
    """

    takes_prompts: ClassVar[bool] = True

    def check_delta(
        self, tiny: Model, folder: Path, build: Build, starts_alike: bool = True
    ) -> Model:
        """Check that an adapter can be attached, trained, detached and saved; return the model."""
        model: Any = copy.deepcopy(tiny).double()
        batch = to_float64(self.make_inputs(model))
        batch |= make_labels(model, batch)
        before = run_step_of(model, batch)["loss"]
        delta = build(model)
        names = {name for name, _ in delta.named_parameters()}
        start = run_step_of(model, batch)
        if starts_alike:
            assert_close(start["loss"], before)
        assert {n.removeprefix("grad/") for n in start if n != "loss"} <= names
        _randomize_(delta)
        trained = run_step_of(model, batch)
        assert {n for n, g in trained.items() if n != "loss" and not g.any()} == set()
        assert not torch.equal(trained["loss"], before)
        _check_slope(model, delta, batch, trained)
        delta.save(folder)
        delta.detach()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        assert torch.equal(run_step_of(model, batch)["loss"], before)
        load_delta(model, folder, name="again")
        assert_close(run_step_of(model, batch)["loss"], trained["loss"])
        return model

    @capability("lora")
    def test_lora(self, tiny: Model, tmp_path: Path) -> None:
        """LoRA works on queries, values, output projections and experts."""
        targets = ["attn.q", "attn.v", "mlp.up", "mlp.down"]
        self.check_delta(tiny, tmp_path, lambda m: Lora(m, targets, rank=2))

    @capability("adapter")
    def test_adapter(self, tiny: Model, tmp_path: Path) -> None:
        """Bottleneck adapters work after attention and MLP."""
        self.check_delta(tiny, tmp_path, lambda m: Adapter(m, width=3))

    @pytest.mark.long
    @capability("low-rank-adapter")
    def test_low_rank_adapter(self, tiny: Model, tmp_path: Path) -> None:
        """Bottleneck adapters with low-rank matrices work."""
        build: Build = lambda m: LowRankAdapter(m, reduction=4, rank=2)  # noqa: E731
        self.check_delta(tiny, tmp_path, build)

    @pytest.mark.long
    @capability("compacter")
    def test_compacter(self, tiny: Model, tmp_path: Path) -> None:
        """Bottleneck adapters whose matrices are sums of Kronecker products (Compacter) work."""
        build: Build = lambda m: Compacter(m, reduction=4, division=2)  # noqa: E731
        self.check_delta(tiny, tmp_path, build)

    @pytest.mark.long
    @capability("parallel-adapter")
    def test_parallel_adapter(self, tiny: Model, tmp_path: Path) -> None:
        """Bottleneck adapters parallel to attention and MLP work."""
        self.check_delta(tiny, tmp_path, lambda m: ParallelAdapter(m, width=3))

    @pytest.mark.long
    @capability("bitfit")
    def test_bitfit(self, tiny: Model, tmp_path: Path) -> None:
        """Trained biases (BitFit) work, even in layers without a bias."""
        self.check_delta(tiny, tmp_path, BitFit)

    @pytest.mark.long
    @capability("ia3")
    def test_ia3(self, tiny: Model, tmp_path: Path) -> None:
        """IA3 works: trained factors scale keys, values and the MLP's hidden units."""
        self.check_delta(tiny, tmp_path, IA3)

    @capability("prefix")
    def test_prefix(self, tiny: Model, tmp_path: Path) -> None:
        """Prefix tuning works: trained keys and values are prepended to those of the text."""
        build: Build = lambda m: Prefix(m, length=3)  # noqa: E731
        self.check_delta(tiny, tmp_path, build, starts_alike=False)

    @capability("soft-prompt")
    def test_soft_prompt(self, tiny: Model, tmp_path: Path) -> None:
        """Prompt tuning works: trained embeddings are prepended to the text."""
        if not self.takes_prompts:
            pytest.skip("its other arguments have one entry per token")
        build: Build = lambda m: SoftPrompt(m, length=2)  # noqa: E731
        self.check_delta(tiny, tmp_path, build, starts_alike=False)

    @pytest.mark.long
    @capability("delta rows")
    def test_delta_rows(self, tiny: Model) -> None:
        """Each sample of a batch uses the adapter that is selected for this sample."""
        model: Any = copy.deepcopy(tiny).double()
        inputs = to_float64(self.make_inputs(model))
        for seed, name in enumerate("ab"):
            _randomize_(Adapter(model, name=name, width=3), seed)
        want = []
        for name in ("a", "b"):
            use_deltas(model, [name])
            want.append(_first(model(**inputs)))
        use_deltas(model, ["a", "b"])
        with select_adapters(model, ["a", "b"]):
            got = _first(model(**inputs))
        assert_close(got[0], want[0][0])
        assert_close(got[1], want[1][1])

    def deltas_config(self, tiny: Model) -> ModelConfig:
        """Return a model's config with an adapter of every type that adds modules."""
        model: Any = copy.deepcopy(tiny)
        attach_all_adapters_(model)
        return model.config

    def check_deltas(self, tiny: Model, where: str) -> None:
        """Compare three training steps of all adapters on a layout with those on one process."""
        check_suite(self, self.deltas_config(tiny), where, frozen=True)

    @pytest.mark.long
    @capability("deltas: zero-3")
    def test_deltas_zero_3(self, tiny: Model) -> None:
        """Training all adapters under ZeRO-3 gives the same results as one process."""
        self.check_deltas(tiny, "zero-3")

    @pytest.mark.long
    @capability("deltas: tensor")
    def test_deltas_tensor_parallel(self, tiny: Model) -> None:
        """Training all adapters under tensor parallelism gives the same results as one process."""
        self.check_deltas(tiny, "sequence")

    @pytest.mark.long
    @capability("deltas: pipeline")
    def test_deltas_pipeline(self, tiny: Model) -> None:
        """Training all adapters on two pipeline stages gives the same results as one process."""
        self.check_deltas(tiny, "pipeline")

    @pytest.mark.long
    @capability("deltas: context")
    def test_deltas_context_parallel(self, tiny: Model) -> None:
        """Training all adapters under context parallelism gives the same results as one process."""
        self.check_deltas(tiny, "context")

    @pytest.mark.long
    @capability("deltas: stream")
    def test_deltas_stream(self, tiny: Model) -> None:
        """All adapters work on streamed blocks."""
        model: Any = copy.deepcopy(tiny)
        attach_all_adapters_(model)
        batch = self.make_inputs(model)
        batch |= make_labels(model, batch)
        want = run_step_of(model, batch)
        streamer, _ = stream_all_blocks_(model)
        assert_equal_trees(run_step_of(model, batch), want)
        streamer.close()


def _check_slope(model: Any, delta: Delta, batch: Batch, gradients: dict[str, Tensor]) -> None:
    """Compare the gradient in a random direction with a finite difference of the loss."""
    generator = torch.Generator().manual_seed(11)
    ways = {
        n: torch.randn(p.shape, generator=generator).double() for n, p in delta.named_parameters()
    }
    slope = sum(
        (gradients[f"grad/{n}"] * way).sum() for n, way in ways.items() if f"grad/{n}" in gradients
    )
    step, losses = 1e-7, []  # too small to cross the kink of an activation such as ReLU
    with torch.no_grad():
        for sign in (1, -2):
            for n, p in delta.named_parameters():
                p.add_(ways[n], alpha=sign * step)
            losses.append(model(**batch).loss)
        for n, p in delta.named_parameters():
            p.add_(ways[n], alpha=step)
    want = (losses[0] - losses[1]) / (2 * step)
    assert abs(float(slope) - float(want)) <= 1e-4 * abs(float(want)) + 1e-7


def _first(out: Any) -> Tensor:
    """Return the logits of a model's output, or its first tensor if it has no logits."""
    output = out.logits if getattr(out, "logits", None) is not None else out[0]
    return output.detach()
