"""What every family must do when it was changed: parts beside layers, int8 rows in their place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from bmforge.infer import generate
from bmforge.memory.activations import apply_activation_offload_
from bmforge.memory.copies import make_copy_engine
from bmforge.memory.streaming import stream_blocks_
from bmforge.models import Change, Model, ModelConfig, init_weights_
from bmforge.models.changes import freeze_base_
from bmforge.models.sizes import sizes_of
from bmforge.nn import Block, LMHead
from bmforge.nn.int8 import Int8Experts, RowStore
from bmforge.nn.low_rank import ExpertsLowRank, LowRank
from bmforge.nn.moe import Experts
from bmforge.parallel import Layout
from bmforge.surgery import find_modules, persistent_tensors
from bmforge.testing.batches import Batch, make_batch, make_labels
from bmforge.testing.capability import capability
from bmforge.testing.layouts import check_layout, train_and_save
from bmforge.testing.pool import run_distributed
from bmforge.testing.tolerance import assert_close, assert_equal_trees

__all__ = ["ChangedSuite", "low_rank_everywhere", "stored_as_int8"]

_RANK = 2
# Layers that get a part, and layers that are kept as int8 rows: some get both, some neither.
_PARTS_BESIDE = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
_STORED = ("k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def resized(model: nn.Module) -> list[Change]:
    """Return half the heads and half the features for the last block of every stack."""
    last = {name.rpartition(".")[0]: name for name, m in model.named_modules() if is_block(m)}
    changes = []
    for name in last.values():
        sizes = sizes_of(model.get_submodule(name).spec)
        options = {}
        if sizes.num_heads >= 2 * sizes.num_kv_heads or sizes.num_heads >= 4:
            options["num_heads"] = sizes.num_heads // 2
        if sizes.intermediate_size:
            options["intermediate_size"] = sizes.intermediate_size // 2
        changes.append(Change("resize", (name,), options))
    return changes


def is_block(module: nn.Module) -> bool:
    """Tell a block from other modules."""
    return isinstance(module, Block)


def low_rank_everywhere(model: nn.Module) -> Change:
    """Return parts beside projections, experts and the language model's head."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (LMHead, Experts))
        or (isinstance(module, nn.Linear) and name.endswith(_PARTS_BESIDE))
    ]
    return Change("low_rank", tuple(found), {"rank": _RANK, "alpha": 3.0})


def stored_as_int8(model: nn.Module) -> Change:
    """Return int8 rows for projections, experts, the token embedding and the head."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (LMHead, Experts))
        or (isinstance(module, nn.Linear) and name.endswith(_STORED))
        or (isinstance(module, nn.Embedding) and name == "embed")
    ]
    return Change("int8", tuple(found))


class ChangedSuite:
    """Changed models are models; `FamilySuite` inherits this."""

    model_class: ClassVar[type[Model]]

    def tiny_config(self) -> ModelConfig:
        """Return a tiny config of the family."""
        raise TypeError(f"{type(self).__name__} defines no tiny_config")

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return the model's arguments besides labels."""
        raise TypeError(f"{type(self).__name__} defines no make_inputs")

    @pytest.fixture
    def changed(self, tiny: Model) -> ModelConfig:
        """The tiny config with every change at once."""
        return self.changed_config(tiny)

    def changed_config(self, tiny: Model) -> ModelConfig:
        """Return a model's config with every change at once."""
        narrowed = copy.deepcopy(tiny)
        for change in resized(tiny):
            narrowed.change_(change)
        return tiny.config.replace(
            changes=(
                *narrowed.config.changes,
                low_rank_everywhere(narrowed),
                stored_as_int8(narrowed),
            )
        )

    @capability("low-rank")
    def test_low_rank_is_the_merged_model(self, tiny: Model) -> None:
        """What parts add is what merged weights give; their gradients follow from the merged."""
        model, batch = self._doubled(tiny)
        whole = copy.deepcopy(model)
        model.change_(low_rank_everywhere(model))
        for part in _parts(model):
            for name, parameter in part.named_parameters():
                if name.endswith("up"):
                    nn.init.normal_(parameter, std=0.1)
        merged = _merge(model, whole)
        got, want = _run(model, batch), _run(whole, batch)
        assert_close(got["loss"], want["loss"])
        for name, (down, up, scale) in merged.items():
            grad = want[f"grad/{name}"]
            assert_close(got[f"grad/{up}"], scale * grad @ _value(model, down).mT)
            assert_close(got[f"grad/{down}"], scale * _value(model, up).mT @ grad)

    @capability("int8")
    def test_int8_has_the_bits_of_its_dequantised_twin(self, tiny: Model) -> None:
        """Rows times scales in plain layers give the same bits, loss, logits and gradients."""
        model, batch = self._doubled(tiny)
        twin = copy.deepcopy(model)
        model.change_(stored_as_int8(model))
        kept = dict(twin.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, rows, scale in _stored(model):
                kept[name].copy_(rows.double() * scale.double()[..., None])
        got, want = _run(model, batch), _run(twin, batch)
        assert_equal_trees(got, {name: want[name] for name in got})

    @capability("resize")
    def test_resized_is_the_model_with_zeros(self, tiny: Model) -> None:
        """A narrower layer computes what the whole one does when the rest of it is zero."""
        model, batch = self._doubled(tiny)
        whole = copy.deepcopy(model)
        for change in resized(tiny):
            model.change_(change)
        _silence_the_rest_(whole, model)
        got, want = _run(model, batch), _run(whole, batch)
        assert_close(got["loss"], want["loss"])
        counted = sum(tensor.numel() for tensor in persistent_tensors(model).values())
        assert counted < sum(tensor.numel() for tensor in persistent_tensors(whole).values())

    @capability("changed: save")
    def test_changed_saves_and_opens(
        self, tiny: Model, changed: ModelConfig, tmp_path: Path
    ) -> None:
        """A changed model opens as it was saved; nothing is left out, on meta it draws the same."""
        model = self.model_class.from_config(changed).eval()
        meta = init_weights_(self.model_class.from_config(changed, device="meta"), 0)
        assert_equal_trees(meta.state_dict(), model.state_dict())
        after = self.model_class.from_config(tiny.config)
        for change in changed.changes:
            after.change_(change)
        assert_equal_trees(after.state_dict(), model.state_dict())
        _spread_parts_(model)
        model.save_pretrained(tmp_path)
        again = self.model_class.from_pretrained(tmp_path)
        assert again.config == changed
        assert_equal_trees(persistent_tensors(again), persistent_tensors(model))
        inputs = self.make_inputs(model)
        assert_equal_trees(_logits(again(**inputs)), _logits(model(**inputs)))
        assert_equal_trees(_logits(copy.deepcopy(model)(**inputs)), _logits(model(**inputs)))

    @capability("changed: recompute", "changed: stream", "changed: offload")
    def test_changed_streams(self, changed: ModelConfig) -> None:
        """Blocks with packed weights and parts stream in, what they keep waits on the host."""
        model = self.model_class.from_config(changed)
        _spread_parts_(model)
        freeze_base_(model)
        batch = self.make_inputs(model)
        batch |= make_labels(model, batch)
        want = _run(model, batch)
        kept = {n: t.detach().clone() for n, t in persistent_tensors(model).items()}
        blocks = find_modules(model, globs=model.layout_rules().recompute_units)
        streamer = stream_blocks_(
            model,
            lambda name, out: out.copy_(kept[name]),
            device=torch.device("cpu"),
            blocks=list(blocks),
        )
        engine = make_copy_engine(torch.device("cpu"), records=True)
        units = list(blocks.values())
        apply_activation_offload_(units, engine, keep_last=0, smallest_elements=1)
        assert_equal_trees(_run(model, batch), want)
        assert engine.events
        streamer.close()

    @pytest.mark.long
    @capability("changed: compile")
    def test_changed_compiles_whole(self, changed: ModelConfig) -> None:
        """Training a changed model is one graph without breaks, with the same numbers."""
        torch.compiler.reset()
        model = self.model_class.from_config(changed, dtype=torch.float64)
        batch = _widen(self.make_inputs(model))
        batch |= make_labels(model, batch)
        want = _run(model, batch)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_close(_run(compiled, batch, model), want)
        torch.compiler.reset()

    def write_text(self, model: Any) -> Tensor | None:
        """Return what the model writes, greedily; None for a family that writes nothing."""
        if not model.traits.writes:
            return None
        return generate(model, make_batch(model, 2, length=6), max_new_tokens=5, do_sample=False)

    @capability("changed: generate")
    def test_changed_generates(self, tiny: Model) -> None:
        """Parts on packed layers write what the plain model of the same weights writes."""
        model = copy.deepcopy(tiny).double()
        model.change_(stored_as_int8(model)).change_(low_rank_everywhere(model))
        _spread_parts_(model, 1.0)
        plain = copy.deepcopy(tiny).double()
        kept = dict(plain.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, rows, scale in _stored(model):
                kept[name].copy_(rows.double() * scale.double()[..., None])
        before = self.write_text(plain)
        if before is None:
            pytest.skip("writes no text")
        _merge(model, plain)
        got, want = self.write_text(model), self.write_text(plain)
        assert torch.equal(got, want)
        assert not torch.equal(want, before)

    @pytest.mark.long
    @capability("changed: checkpoint")
    def test_changed_goes_on_elsewhere(self, changed: ModelConfig, tmp_path: Path) -> None:
        """Two steps on a cut pipeline, saved, and the third on one process: as on one alone."""
        model = self.model_class.from_config(changed)
        inputs = self.make_inputs(model, batch=4)
        arguments = self.model_class, changed, inputs, make_labels(model, inputs)
        (want,) = run_distributed(train_and_save, 1, *arguments, Layout(), 3, None, None)
        layout, folder = Layout(tp=2, pp=2), str(tmp_path)
        run_distributed(train_and_save, 4, *arguments, layout, 2, None, folder)
        (got,) = run_distributed(train_and_save, 1, *arguments, Layout(), 3, folder, None)
        assert_close(got, want)

    @capability("changed: zero-3")
    def test_changed_zero_3(self, changed: ModelConfig) -> None:
        """ZeRO-3 with the base frozen, and recompute."""
        self.check_changed(changed, world=2, layout=Layout(), recompute=True, frozen=True)

    @pytest.mark.long
    @capability("changed: zero-2")
    def test_changed_zero_2(self, changed: ModelConfig) -> None:
        """ZeRO-2 with the base frozen."""
        self.check_changed(changed, world=2, layout=Layout(zero=2), frozen=True)

    @pytest.mark.long
    @capability("changed: tensor")
    def test_changed_tensor_parallel(self, changed: ModelConfig) -> None:
        """Parts are cut as what they stand beside, packed rows as plain ones."""
        self.check_changed(changed, world=2, layout=Layout(tp=2))

    @pytest.mark.long
    @capability("changed: sequence")
    def test_changed_sequence_parallel(self, changed: ModelConfig) -> None:
        """The same with tokens divided between the parts of a block."""
        layout = Layout(tp=2, sequence_parallel=True)
        self.check_changed(changed, world=2, layout=layout, recompute=True)

    @pytest.mark.long
    @capability("changed: pipeline")
    def test_changed_pipeline(self, changed: ModelConfig) -> None:
        """Two stages of a changed model are one."""
        self.check_changed(changed, world=2, layout=Layout(pp=2), micro_batches=2)

    @pytest.mark.long
    @capability("changed: context")
    def test_changed_context_parallel(self, changed: ModelConfig) -> None:
        """Rows divided over two processes are one process."""
        self.check_changed(changed, world=2, layout=Layout(cp=2))

    @capability("changed: combined")
    def test_changed_layouts_combine(self, changed: ModelConfig) -> None:
        """A pipeline whose stages are cut and whose tokens are divided, with recompute."""
        layout = Layout(pp=2, tp=2, sequence_parallel=True)
        self.check_changed(changed, world=4, layout=layout, micro_batches=2, recompute=True)

    def check_changed_experts(self, changed: ModelConfig) -> None:
        """Divided experts with parts and int8 rows; for suites of families with them."""
        self.check_changed(changed, world=2, layout=Layout(ep=2))

    def check_changed(self, changed: ModelConfig, **options: Any) -> None:
        """Compare three steps of the changed model on a layout with one process."""
        model = self.model_class.from_config(changed)
        inputs = self.make_inputs(model, batch=4)
        check_layout(self.model_class, changed, inputs, make_labels(model, inputs), **options)

    def _doubled(self, tiny: Model) -> tuple[Any, Batch]:
        """Return a copy in float64 and a batch for it."""
        model = copy.deepcopy(tiny).double()
        batch = _widen(self.make_inputs(model))
        return model, batch | make_labels(model, batch)


def _widen(batch: Batch) -> dict[str, Tensor]:
    return {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}


def _parts(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, (LowRank, ExpertsLowRank))]


def _spread_parts_(model: nn.Module, std: float = 0.1) -> None:
    """Let parts add something: their second matrices are zero at first."""
    generator = torch.Generator().manual_seed(7)
    for part in _parts(model):
        for name, parameter in part.named_parameters():
            if name.endswith("up"):
                parameter.data.normal_(0.0, std, generator=generator)


def _merge(model: nn.Module, whole: nn.Module) -> dict[str, tuple[str, str, float]]:
    """Add what parts add to the plain weights of `whole`; tied weights part ways.

    Returns:
        name of each merged weight -> names of its part's matrices, and the part's scale.
    """
    merged: dict[str, tuple[str, str, float]] = {}
    for name, part in model.named_modules():
        if not isinstance(part, (LowRank, ExpertsLowRank)):
            continue
        owner = name.rpartition(".")[0]
        keys = {"weight": ""} if isinstance(part, LowRank) else {k: f"{k}_" for k in part.keys}
        for key, stem in keys.items():
            down, up = f"{name}.{stem}down", f"{name}.{stem}up"
            module = whole.get_submodule(owner)
            added = part.scale * _value(model, up) @ _value(model, down)
            plain = getattr(module, key).detach()
            setattr(module, key, nn.Parameter(plain + added))
            merged[f"{owner}.{key}"] = down, up, part.scale
    return merged


def _value(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).detach()


def _stored(model: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Return name, rows and scales of every packed weight."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, RowStore):
            found.append((f"{name}.weight", module.weight, module.scale))
        elif isinstance(module, Int8Experts):
            found += [
                (f"{name}.{key}", getattr(module, key), getattr(module, f"{key}_scale"))
                for key in ("gate_proj", "up_proj", "down_proj")
                if getattr(module, key) is not None
            ]
    return found


@torch.no_grad()
def _silence_the_rest_(whole: nn.Module, narrow: nn.Module) -> None:
    """Make zero what the narrower blocks have not of the last projections of attention and MLP."""
    for name, block in narrow.named_modules():
        if not is_block(block):
            continue
        old: Any = whole.get_submodule(name)
        new_spec, old_spec = block.spec.attn, old.spec.attn
        if new_spec is not None and new_spec.num_heads < old_spec.num_heads:
            for attn in (old.attn, old.cross_attn):
                if attn is not None:
                    _silence_heads_(attn.o_proj.weight, new_spec, old_spec)
                    _rescale_(attn.o_proj.weight, new_spec.out_scale, old_spec.out_scale)
        if old.mlp is not None:
            kept, experts = block.spec.mlp.intermediate_size, getattr(old.mlp, "experts", None)
            last = old.mlp.down_proj.weight if experts is None else experts.down_proj
            last[..., kept:] = 0
            _rescale_(last, block.spec.mlp.out_scale, old.spec.mlp.out_scale)


def _silence_heads_(weight: Tensor, new: Any, old: Any) -> None:
    """Leave the first queries of the first key-value heads."""
    groups = weight.unflatten(1, (old.num_kv_heads, -1, old.head_dim))
    groups[:, new.num_kv_heads :] = 0
    groups[:, :, new.num_heads // new.num_kv_heads :] = 0


def _rescale_(weight: Tensor, new: float, old: float) -> None:
    """A scale that follows from a width is that of the new one (Tensor Programs)."""
    weight *= new / old


def _run(model: Any, batch: Batch, owner: Any = None) -> dict[str, Tensor]:
    """Return the loss and every gradient."""
    owner = model if owner is None else owner
    owner.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    grads = {f"grad/{n}": p.grad for n, p in owner.named_parameters() if p.grad is not None}
    assert grads
    return {"loss": loss.detach(), **grads}


def _logits(output: Any) -> dict[str, Tensor]:
    found = {name: value for name, value in output._asdict().items() if torch.is_tensor(value)}
    assert found
    return found
