"""Shrunk models, experts and gates on every kind of layout: one process's numbers, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from masked_models import plan_of
from tiny_models import TINY, build, family_of, make_inputs
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.compress.prune.structure import StructureMethod
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.errors import DistributedError
from bmforge.models import init_weights_
from bmforge.models.changes import Change
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    mesh_of,
    parallelize,
    run_step,
)
from bmforge.testing import assert_close, run_distributed
from bmforge.testing.batches import make_labels
from bmforge.testing.layouts import check_layout

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tp": 2}),
    "sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "pipeline": (2, {"pp": 2}),
    "zero-3": (2, {}),
    "zero-2": (2, {"zero": 2}),
}


def check(name: str, config: Any, layout: str) -> None:
    world, fields = LAYOUTS[layout]
    model = family_of(name).from_config(config, device="meta")
    inputs = make_inputs(name, rows=4, length=8)
    labels = make_labels(model, inputs)
    pieces = 2 if "pp" in fields else 1
    options = {"world": world, "layout": Layout(**fields), "micro_batches": pieces}
    check_layout(family_of(name), config, inputs, labels, **options)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "t5", "gptj", "bert"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shrunk_models(name: str, layout: str) -> None:
    """Heads, features, halves, hidden features, uneven over the layers."""
    model = build(name)
    apply_plan_(model, plan_of(model, name, "heads", "features", "halves", "hidden"))
    check(name, model.config, layout)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "expert"])
def test_split_mlps(name: str, layout: str) -> None:
    """Experts that are an MLP's features, with biases and some that always work."""
    stack = "encoder.layers" if name == "t5" else "layers"
    options = {
        "num_experts": 4,
        "experts_per_token": 2,
        "split": True,
        "shared_size": 8,
        "router": "two_layer",
    }
    config = TINY[name].replace(changes=(Change("resize", (f"{stack}.*",), options),))
    if layout != "expert":
        check(name, config, layout)
        return
    model = family_of(name).from_config(config, device="meta")
    inputs = make_inputs(name, rows=4, length=8)
    labels = make_labels(model, inputs)
    check_layout(family_of(name), config, inputs, labels, world=2, layout=Layout(ep=2))


def train_gates(name: str, fields: dict[str, Any], more: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Two steps with gates and the Lagrangian; runs on every worker."""
    init_distributed()
    model: Any = family_of(name).from_config(TINY[name], device="meta", dtype=torch.float64)
    config = StructureConfig(
        target="parameters",
        keep_ratio=0.5,
        gates=("heads", "dims", "features", "attn", "mlp", "block", *more),
    )
    method = StructureMethod(config)
    method.attach_(model)
    parallelize(model, Layout(**fields))
    init_weights_(model, seed=3)
    mesh = mesh_of(model)
    size, rank = data_parallel_size(mesh), data_parallel_rank(mesh)
    inputs = make_inputs(name, rows=4, length=8)
    batch = inputs | make_labels(model, inputs)
    items = model.count_items(batch) / size
    mine = {k: t[rank * 4 // size : (rank + 1) * 4 // size] for k, t in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for step in range(2):

        def loss_of(given: dict[str, Tensor], step: int = step) -> Tensor:
            loss = model(**given, num_items_in_batch=items).loss
            extra = method.extra_loss(model, step)
            assert extra is not None
            return loss + model.count_items(given) / items * extra

        run_step(model, loss_of, [mine])
        for key, parameter in model.named_parameters():
            if key.endswith("delta"):
                assert parameter.grad is not None
                found[f"{step}/{key}"] = whole(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step_(model, step + 1)
    facts = method.finish_(model)
    assert facts["plan"]["layers"]
    assert not any(key.endswith("delta") for key, _ in model.named_parameters())
    numbers = torch.tensor(method.state_dict()["multipliers"], dtype=torch.float64)
    return {**found, "multipliers": numbers}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "gptj"])
@pytest.mark.parametrize("layout", ["tensor", "sequence", "zero-3", "zero-2"])
def test_gates(name: str, layout: str) -> None:
    """The same draws, the same gradients of loss and Lagrangian, the same multipliers."""
    more = () if layout == "sequence" else ("hidden",)
    (want,) = run_distributed(train_gates, 1, name, {}, more)
    world, fields = LAYOUTS[layout]
    for got in run_distributed(train_gates, world, name, fields, more):
        assert_close(got, want)
        assert len(got) > 10


def test_hidden_gates_need_all_tokens() -> None:
    with pytest.raises(DistributedError, match="sequence_parallel=False"):
        run_distributed(
            train_gates, *LAYOUTS["sequence"][:1], "llama", LAYOUTS["sequence"][1], ("hidden",)
        )
