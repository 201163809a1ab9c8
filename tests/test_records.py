"""What is noted of models and tensors: it stays with them, and goes with them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from bmforge.memory.state_storage import StateStorage
from bmforge.records import (
    ParallelRecord,
    Span,
    Stack,
    TensorMetadata,
    Unit,
    as_stack_,
    fill_slot_,
    find_parallel_record,
    find_units,
    metadata_of,
    parallel_record_of,
    set_metadata_,
    swap_,
    units_of,
)
from bmforge.shards import Source, is_streamed, put_values_, source_of, whole_tensor

VALUES = torch.arange(6.0).view(2, 3)


def home(values: torch.Tensor) -> StateStorage:
    made = StateStorage(values.numel(), dtype=values.dtype)
    made.put(0, values)
    return made


def test_a_side_stays_with_its_tensor() -> None:
    """Equal tensors have sides of their own; what is taken back leaves nothing."""
    one, other = nn.Parameter(VALUES.clone()), nn.Parameter(VALUES.clone())
    assert metadata_of(one) == TensorMetadata()
    kept = home(VALUES)
    set_metadata_(one, master=kept)
    set_metadata_(one, offloaded_gradient="gone")
    assert metadata_of(one) == TensorMetadata(master=kept, offloaded_gradient="gone")
    assert metadata_of(other) == metadata_of(copy.deepcopy(one)) == TensorMetadata()
    set_metadata_(one, master=None, offloaded_gradient=None)
    assert metadata_of(one) == TensorMetadata()
    assert not weakref.getweakrefs(one)


def test_a_side_goes_with_its_tensor() -> None:
    """It keeps no tensor alive, and nobody keeps it."""
    tensor, kept = nn.Parameter(VALUES.clone()), home(VALUES)
    set_metadata_(tensor, master=kept)
    gone, freed = weakref.ref(tensor), weakref.ref(kept)
    del tensor, kept
    gc.collect()
    assert gone() is None
    assert freed() is None


def test_a_side_survives_another_dtype() -> None:
    """A swapped tensor is the same object with the same side."""
    tensor, kept = nn.Parameter(VALUES.clone()), home(VALUES)
    tensor.own = "noted by others"  # type: ignore[attr-defined]
    set_metadata_(tensor, master=kept)
    swap_(tensor, nn.Parameter(VALUES.to(torch.bfloat16)))
    assert tensor.dtype == torch.bfloat16
    assert metadata_of(tensor).master is kept
    assert tensor.own == "noted by others"  # type: ignore[attr-defined]


def test_values_are_found_where_they_are() -> None:
    """In the tensor, in a wider copy, or elsewhere altogether."""
    plain = nn.Parameter(VALUES.clone())
    assert torch.equal(source_of(plain).read(), VALUES)
    narrow = nn.Parameter(VALUES.to(torch.bfloat16))
    set_metadata_(narrow, master=home(VALUES + 0.001))
    assert source_of(narrow).dtype == torch.float32
    assert torch.equal(source_of(narrow).read(), VALUES + 0.001)
    assert whole_tensor(narrow).dtype == torch.bfloat16
    put_values_(narrow, VALUES + 1.001)
    assert torch.equal(source_of(narrow).read(), VALUES + 1.001)
    assert torch.equal(narrow.detach(), (VALUES + 1.001).to(torch.bfloat16))
    hollow = nn.Parameter(torch.full((2, 3), float("nan")))
    assert not is_streamed(hollow)
    set_metadata_(hollow, origin=home(VALUES))
    assert is_streamed(hollow)
    assert torch.equal(whole_tensor(hollow), VALUES)
    set_metadata_(hollow, master=home(VALUES))
    put_values_(hollow, VALUES + 2)
    assert torch.equal(source_of(hollow).read(), VALUES + 2)
    assert hollow.isnan().all()


def test_what_was_taken_does_not_change() -> None:
    """A snapshot of a tensor in memory is a copy; what is on disk is read when it is asked for."""
    plain, kept = nn.Parameter(VALUES.clone()), home(VALUES)
    taken = [Source(plain).taken(), Source(plain, kept).taken()]
    with torch.no_grad():
        plain.zero_()
    kept.clear()
    for source in taken:
        assert torch.equal(source.read(), VALUES)
        assert (source.shape, source.size_bytes) == ((2, 3), 24)
    late = home(VALUES)
    late.is_on_disk = True
    source = Source(plain, late)
    assert source.taken() is source


def test_a_record_is_one_per_model() -> None:
    """It is made when something is noted, and a copy has one of its own."""
    model = nn.Linear(2, 2)
    assert find_parallel_record(model) is None
    parallel_record_of(model).prefetch = 3
    assert find_parallel_record(model) is parallel_record_of(model)
    other = copy.deepcopy(model)
    assert find_parallel_record(other) == ParallelRecord(prefetch=3)
    parallel_record_of(other).prefetch = 1
    assert parallel_record_of(model).prefetch == 3
    assert list(model.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize(
    "container",
    [nn.ModuleDict({"0": nn.Linear(1, 1)}), nn.ModuleList([nn.Linear(1, 1)]), Stack()],
    ids=lambda container: type(container).__name__,
)
def test_a_container_gets_slots(container: nn.Module) -> None:
    """Whatever its class was, it is still one of those, and others of that class have none."""
    kind, keys = type(container), list(container.state_dict())
    stack = as_stack_(container)
    assert stack is container
    assert isinstance(stack, kind)
    assert type(stack).__name__ == kind.__name__
    assert (stack.span, stack.token_cut) == (None, None)
    stack.span = Span(0, 1, 2)
    assert as_stack_(stack).span == (0, 1, 2)
    assert copy.deepcopy(stack).span == (0, 1, 2)
    assert list(stack.state_dict()) == keys
    assert not hasattr(nn.ModuleDict(OrderedDict()), "span")


def test_a_slot_must_be_declared() -> None:
    """What nobody would read is not set."""
    with pytest.raises(AssertionError, match="Linear has no attribute 'stage_inputs'"):
        fill_slot_(nn.Linear(1, 1), "stage_inputs", ())


class Rules:
    """Gathers whole blocks, recomputes what is inside them."""

    zero_units = ("layers.*",)
    recompute_units = ("layers.*.mlp", "layers.1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(2, 2), nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 2)
        self.layers = nn.ModuleList([Block(), Block()])


def test_units_are_listed_once() -> None:
    """By rules in the order of the tree, else the repeated blocks; of a laid-out model its own."""
    model = Model()
    found = [(unit.name, unit.is_gathered, unit.is_block) for unit in find_units(model, Rules())]
    assert found == [
        ("layers.0", True, False),
        ("layers.0.mlp", False, True),
        ("layers.1", True, True),
        ("layers.1.mlp", False, True),
    ]
    assert [(u.name, u.module) for u in units_of(model)] == [
        ("layers.0", model.layers[0]),
        ("layers.1", model.layers[1]),
    ]
    parallel_record_of(model).units = (Unit("layers.1", model.layers[1], True, True, stage=3),)
    assert [unit.name for unit in units_of(model)] == ["layers.1"]
    other = copy.deepcopy(model)
    assert units_of(other)[0].module is other.layers[1]
    model.layout_rules = Rules  # type: ignore[assignment]
    parallel_record_of(model).units = None
    assert [unit.name for unit in units_of(model)] == [name for name, _, _ in found]
