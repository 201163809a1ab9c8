"""Runs training steps on any parallel layout, for comparison with one process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.models import init_weights_
from bmforge.models.changes import freeze_base_
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    gradient_ranks,
    init_distributed,
    mesh_of,
    parallelize,
    run_step,
    sum_over_axes,
)
from bmforge.surgery import persistent_tensors
from bmforge.testing.batches import Batch, make_labels
from bmforge.testing.pool import run_distributed
from bmforge.testing.tolerance import assert_close
from bmforge.train import clip_grad_norm_, load_checkpoint, save_checkpoint

__all__ = ["LAYOUTS", "check_layout", "check_suite", "train_and_save", "train_on_layout"]

_STEPS = 3
_REMEMBERED: dict[bytes, dict[str, Tensor]] = {}
_ALL_BUT_TP = ("dp_replicate", "dp_shard", "cp", "pp")


def train_on_layout(
    model_class: Any,
    config: Any,
    inputs: Batch,
    labels: Batch,
    layout: Layout,
    *,
    micro_batches: int = 1,
    recompute: bool = False,
    frozen: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Train three SGD steps with gradient clipping on a layout; called on every worker.

    With `frozen`, only modules that the config adds to the base model, such as LoRA, are trained.

    Returns:
        dict with the loss and gradient norm of the first step, and this process's gradients
        ("grad/NAME") and final parameters ("end/NAME") as whole tensors.
    """
    init_distributed()
    model = model_class.from_config(config, device="meta", dtype=dtype)
    if frozen:
        freeze_base_(model)
    parallelize(model, layout, recompute=recompute)
    init_weights_(model, seed=3)
    mesh = mesh_of(model)
    batches = [
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in b}
        for b in _cut(inputs | labels, micro_batches, mesh)
    ]
    items = model.count_items(labels) / data_parallel_size(mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    results: dict[str, Tensor] = {}
    for step in range(_STEPS):
        losses = run_step(
            model, lambda batch: model(**batch, num_items_in_batch=items).loss, batches
        )
        if step == 0:
            loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=dtype)
            total = sum_over_axes(loss, mesh, *_ALL_BUT_TP) / gradient_ranks(mesh)
            results = {"loss": total, **_collect(model, "grad")}
        norm = clip_grad_norm_(model, 0.5)
        results.setdefault("norm", norm.to(dtype))
        optimizer.step()
        optimizer.zero_grad()
    return {**results, **_collect(model, "end")}


def train_and_save(
    model_class: Any,
    config: Any,
    inputs: Batch,
    labels: Batch,
    layout: Layout,
    steps: int,
    resume_from: str | None,
    save_to: str | None,
) -> dict[str, Tensor]:
    """Train the LoRA modules of a model with AdamW; called on every worker.

    Args:
        model_class, config, inputs, labels, layout: see `train_on_layout`.
        steps: total number of steps, including those before the checkpoint.
        resume_from: checkpoint directory to resume from, or None.
        save_to: directory for the final checkpoint, or None.

    Returns:
        dict with all parameters of this process, as whole tensors.
    """
    init_distributed()
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    freeze_base_(model)
    parallelize(model, layout)
    init_weights_(model, seed=3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The default eps of 1e-8 would amplify differences due to the order of summation.
    optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
    done = 0
    if resume_from is not None:
        done = load_checkpoint(resume_from, model, optimizer)["step"]
    mesh = mesh_of(model)
    batches = [
        {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in b}
        for b in _cut(inputs | labels, 2, mesh)
    ]
    items = model.count_items(labels) / data_parallel_size(mesh)
    for _ in range(done, steps):
        run_step(model, lambda batch: model(**batch, num_items_in_batch=items).loss, batches)
        optimizer.step()
        optimizer.zero_grad()
    if save_to is not None:
        save_checkpoint(save_to, model, optimizer, step=steps, state={"step": steps})
    return {name: _whole(tensor) for name, tensor in persistent_tensors(model).items()}


# Name -> layout, for the layouts that the suites test.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "zero-2": {"world": 2, "layout": Layout(zero=2)},
    "zero-3": {"world": 2, "layout": Layout(), "recompute": True},
    "tensor": {"world": 2, "layout": Layout(tp=2)},
    "sequence": {"world": 2, "layout": Layout(tp=2, sequence_parallel=True), "recompute": True},
    "pipeline": {"world": 2, "layout": Layout(pp=2), "micro_batches": 2},
    "context": {"world": 2, "layout": Layout(cp=2)},
    "expert": {"world": 2, "layout": Layout(ep=2)},
    "combined": {
        "world": 4,
        "layout": Layout(pp=2, tp=2, sequence_parallel=True),
        "micro_batches": 2,
        "recompute": True,
    },
}


def check_suite(suite: Any, config: Any, where: str, **more: Any) -> None:
    """Compare training on one of `LAYOUTS` with training on one process, for a family's model.

    Args:
        suite: object with `model_class` and `make_inputs`.
        config: the model's config.
        where: a name in `LAYOUTS`.
        more: options of `check_layout`.
    """
    model = suite.model_class.from_config(config)
    inputs = suite.make_inputs(model, batch=4)
    labels = make_labels(model, inputs)
    check_layout(suite.model_class, config, inputs, labels, **LAYOUTS[where], **more)


def check_layout(
    model_class: Any,
    config: Any,
    inputs: Batch,
    labels: Batch,
    *,
    world: int,
    layout: Layout,
    recompute: bool = False,
    micro_batches: int = 1,
    frozen: bool = False,
) -> None:
    """Compare training on a layout with training on one process, in float64.

    The loss, all gradients, their norm, and the parameters after three steps are compared.
    """
    arguments = (model_class, config, inputs, labels)
    want = _train_on_one(*arguments, micro_batches, frozen)
    assert want["loss"].item() > 0
    seen: set[str] = set()
    for got in run_distributed(
        train_on_layout,
        world,
        *arguments,
        layout,
        recompute=recompute,
        micro_batches=micro_batches,
        frozen=frozen,
    ):
        assert_close(got, {name: want[name] for name in got})
        seen |= set(got)
    assert seen == set(want)


def _train_on_one(*arguments: Any) -> dict[str, Tensor]:
    """Return the results of training on one process, which are cached for other layouts."""
    key = pickle.dumps(arguments)
    if key not in _REMEMBERED:
        *setup, micro_batches, frozen = arguments
        results = run_distributed(
            train_on_layout, 1, *setup, Layout(), micro_batches=micro_batches, frozen=frozen
        )
        while len(_REMEMBERED) > 3:
            del _REMEMBERED[next(iter(_REMEMBERED))]
        _REMEMBERED[key] = results[0]
    return _REMEMBERED[key]


def _cut(batch: Batch, micro_batches: int, mesh: Any) -> Any:
    """Yield this process's micro-batches; sequences are ordered by micro-batch, then process."""
    size, rank = data_parallel_size(mesh), data_parallel_rank(mesh)
    rows = next(iter(batch.values())).shape[0] // (micro_batches * size)
    for number in range(micro_batches):
        first = (number * size + rank) * rows
        yield [(name, tensor[first : first + rows]) for name, tensor in batch.items()]


def _collect(model: Any, what: str) -> dict[str, Tensor]:
    tensors = (
        (n, p if what == "end" else torch.zeros_like(p) if p.grad is None else p.grad)
        for n, p in model.named_parameters()
        if what == "end" or p.requires_grad
    )
    return {f"{what}/{name}": _whole(tensor) for name, tensor in tensors}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
