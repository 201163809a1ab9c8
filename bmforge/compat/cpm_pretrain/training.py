"""`pretrain`, which trains a program's model with the program's data and forward step.

`lay_out_` parallelizes the model, including models with `mpu` layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import default_collate

from bmforge.batch import Batch
from bmforge.compat.cpm_pretrain.mpu.initialize import groups
from bmforge.compat.cpm_pretrain.pipe import PipelineModule, StageOutput
from bmforge.compat.cpm_pretrain.program import initialize_megatron, print_rank_0, program
from bmforge.config import config_from_dict
from bmforge.device import parse_dtype
from bmforge.errors import ConfigError, DataError
from bmforge.parallel import (
    Layout,
    OffloadConfig,
    data_parallel_rank,
    data_parallel_size,
    parallelize,
)
from bmforge.parallel.tensor.parts import view_here
from bmforge.parallel.zero import apply_zero_
from bmforge.records import parallel_record_of
from bmforge.surgery import view_parameters_
from bmforge.train import TrainConfig, Trainer
from bmforge.train.evaluate import EvalResult, evaluate
from bmforge.train.loss_scale import LossScaleConfig, build_scaler
from bmforge.train.objective import Objective

__all__ = ["Rows", "pretrain"]


def lay_out_(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: str, recompute: bool
) -> nn.Module:
    """Parallelize the model of a program over a mesh, in place.

    Layers of `mpu` are tensor parallel already. ZeRO shards their local weights over the
    data-parallel ranks, and gathers them in forward.

    Args:
        model: model, built in the same way on every process.
        layout: layout of the mesh.
        mesh: mesh of all axes, which `mpu` uses too.
        precision: see `parallelize`.
        recompute: True to recompute blocks in backward.

    Raises:
        ConfigError: the layout is invalid (see `parallelize`), or `mpu` layers are in a pipeline.
    """
    parts = [p for p in model.parameters() if getattr(p, "model_parallel", False)]
    if layout.tp == 1 or not parts:
        return parallelize(model, layout, mesh=mesh, precision=precision, recompute=recompute)
    if layout.pp > 1 or recompute:
        raise ConfigError(
            f"{type(model).__name__} has mpu layers, which with --model-parallel-size "
            f"{layout.tp} support neither a pipeline nor --checkpoint-activations. Use "
            "mpu.checkpoint for recomputation, or replace the mpu layers by ordinary layers, "
            "which bmforge shards (examples/own_model_pipeline.py)."
        )
    _hold_parts_(model, mesh["tp"])
    dtype = None if precision == "fp32" else parse_dtype(precision)
    if mesh.size() > layout.tp or dtype is not None:
        apply_zero_(model, (), mesh, zero=layout.zero, dtype=dtype)
    record = parallel_record_of(model)
    record.mesh, record.layout, record.units, record.precision = mesh, layout, (), precision
    return model


def _hold_parts_(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace local parameters with sharded parameters of the full shape, in place.

    Optimizers, clipping, ZeRO and checkpoints then see the sharding, while forward sees local
    tensors, also where a program reads a parameter outside its layer.
    """
    new: dict[int, nn.Parameter] = {}
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, param in names.items():
        if id(param) not in new:
            new[id(param)] = _as_whole(param, mesh)
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = new[id(param)]
    view_parameters_(model, dict.fromkeys(names, view_here), "views")


def _as_whole(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    is_part = getattr(param, "model_parallel", False)
    placement = Shard(param.partition_dim) if is_part else Replicate()  # type: ignore[attr-defined]
    distributed = DTensor.from_local(param.detach(), mesh, [placement], run_check=False)
    return nn.Parameter(distributed, requires_grad=param.requires_grad)


Parser = argparse.ArgumentParser
Provider = Callable[[list[int]], tuple[Any, Any, Any]]
ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Tensor, Mapping[str, Any]]]


class Rows:
    """Loader that returns this process's micro-batches, from a dataset read in order.

    Args:
        dataset: indexable dataset; each sample is a mapping of tensors, arrays or numbers.
        batch_size: samples per micro-batch.
        micro_batches: micro-batches per step.
        rank: data-parallel rank of this process.
        size: data-parallel size.

    Attributes:
        strides: tensor-parallel size for models with fused weights, because the order of the
            fused matrices on disk depends on this size; None for other models.
    """

    strides: int | None = None

    def __init__(
        self, dataset: Any, batch_size: int, micro_batches: int, rank: int, size: int
    ) -> None:
        self.dataset, self.batch_size, self.micro_batches = dataset, batch_size, micro_batches
        self.rank, self.size, self.step = rank, size, 0

    def check(self, steps: int) -> None:
        """Raise an error if the dataset has too few samples for the given number of steps.

        Raises:
            DataError: the dataset has too few samples.
        """
        needed = steps * self.micro_batches * self.size * self.batch_size
        if len(self.dataset) < needed:
            raise DataError(
                f"the dataset has {len(self.dataset)} samples, but {steps} steps need {needed}. "
                "Return as many samples as requested."
            )

    def __next__(self) -> Sequence[Batch]:
        """Return the micro-batches of the next step."""
        first = self.step * self.micro_batches
        self.step += 1
        return [self._batch(first + number) for number in range(self.micro_batches)]

    def _batch(self, number: int) -> Batch:
        begin = (number * self.size + self.rank) * self.batch_size
        rows = [self.dataset[n] for n in range(begin, begin + self.batch_size)]
        if not isinstance(rows[0], Mapping):
            raise DataError(
                f"sample {begin} of the dataset is a {type(rows[0]).__name__} (needed: a mapping "
                "from names to tensors, such as {'text': ids})."
            )
        batch: Batch = default_collate(rows)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader."""
        return {"step": self.step, "strides": self.strides}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            ConfigError: stacked weights were split for another tensor-parallel size.
        """
        if state["strides"] != self.strides:
            raise ConfigError(
                "the checkpoint has weights with stride > 1 that were sharded for "
                f"--model-parallel-size {state['strides']}, but this run has {self.strides}. "
                "Use the same --model-parallel-size."
            )
        self.step = int(state["step"])


def pretrain(
    train_valid_test_dataset_provider: Provider,
    model_provider: Callable[[], nn.Module],
    forward_step_func: ForwardStep,
    extra_args_provider: Callable[[Parser], Parser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> Trainer:
    """Train a program's model with the arguments on the command line; return the trainer.

    A run in the directory --save is resumed.

    Args:
        train_valid_test_dataset_provider: function (list of the numbers of samples for training,
            validation and test) -> three datasets, each of which may be None.
        model_provider: function that builds the model: one with layers of `mpu`, a
            `PipelineModule`, or any other module.
        forward_step_func: function (iterator of one batch, model) -> (mean loss of the batch,
            values for the log). A pipeline instead uses the model's `_megatron_batch_fn` for
            inputs and labels, and its `loss_fn` for the loss.
        extra_args_provider: function that adds a program's own arguments to the parser.
        args_defaults: defaults of arguments that are not on the command line.

    Raises:
        ConfigError: settings contradict each other or the model; raised before training starts.
        DataError: a dataset has too few samples, or its samples are not mappings.
    """
    initialize_megatron(extra_args_provider, args_defaults)
    args, placed = program.args, program.placed
    assert args is not None
    assert placed is not None
    assert groups.mesh is not None
    _need(args)
    values, mesh = placed.values, groups.mesh
    config = config_from_dict(TrainConfig, values["train"])
    model = model_provider().to(groups.device)
    objective = _objective_of(model, forward_step_func)
    strides = _partition_stride(model)
    recompute = bool(values.get("recompute")) or _interval(model) > 0
    layout = config_from_dict(Layout, values["layout"])
    lay_out_(model, layout, mesh, config.precision, recompute)
    model.count_items = _count_one  # type: ignore[assignment]
    rows, valid, test = _open_rows(train_valid_test_dataset_provider, args, mesh)
    rows.strides = strides
    scorer = partial(_evaluate, objective=objective, steps=args.eval_iters)
    trainer = Trainer(
        model,
        rows,
        config,
        mesh=mesh,
        run_dir=args.save,
        objective=objective,
        offload=config_from_dict(OffloadConfig, values.get("offload", {})),
        evaluator=None if valid is None else partial(scorer, valid),
    )
    if trainer.scaler is not None:
        trainer.scaler = build_scaler(config_from_dict(LossScaleConfig, values["loss_scale"]))
    trainer.fit()
    if test is not None and not trainer.stopped:
        evaluation = scorer(test, model)
        print_rank_0(f"test loss {evaluation.loss:.6f}, perplexity {evaluation.perplexity:.4f}")
    return trainer


def _open_rows(
    provider: Provider, args: argparse.Namespace, mesh: DeviceMesh
) -> tuple[Rows, Rows | None, Rows | None]:
    """Call the provider; return the loaders for training, validation and test."""
    share = data_parallel_rank(mesh), data_parallel_size(mesh)
    evaluations = args.train_iters // args.eval_interval + 1
    steps = (args.train_iters, evaluations * args.eval_iters, args.eval_iters)
    step_rows = args.batch_size * args.gas * share[1]
    sets = provider([step_rows * count for count in steps])
    train, valid, test = (
        None if samples is None else Rows(samples, args.batch_size, args.gas, *share)
        for samples in sets
    )
    if train is None:
        raise DataError(
            "train_valid_test_dataset_provider returned no dataset to train on (None). Return the "
            "training dataset as the first of its three results."
        )
    train.check(args.train_iters)
    return train, valid, test


def _need(args: argparse.Namespace) -> None:
    names = ("batch_size", "train_iters", "lr")
    missing = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n) is None]
    if missing:
        raise ConfigError(
            f"pretrain() needs the options {', '.join(missing)}. Add the options to the command "
            "line."
        )


def _interval(model: nn.Module) -> int:
    return model.activation_checkpoint_interval if isinstance(model, PipelineModule) else 0


def _count_one(batch: Batch) -> int:
    """Return 1: a micro-batch counts as one item, because its loss is already a mean."""
    return 1


def _objective_of(model: nn.Module, forward_step: ForwardStep) -> Objective:
    """Return the training objective: the user's `forward_step`; for a pipeline, its `loss_fn`."""
    if not isinstance(model, PipelineModule):
        return _StepLoss(forward_step)
    if not hasattr(model, "_megatron_batch_fn") or model.loss_fn is None:
        raise ConfigError(
            f"{type(model).__name__} needs `_megatron_batch_fn`, which returns inputs and "
            "labels of a batch, and a `loss_fn` of outputs and labels."
        )
    return _pipe_loss


def _partition_stride(model: nn.Module) -> int | None:
    """Return the tensor-parallel size if a weight stacks several matrices (fused QKV), else None.

    The order of such a weight's rows on disk depends on this size.
    """
    strides = (getattr(p, "partition_stride", 1) for p in model.parameters())
    return groups.of("tp").size() if any(stride > 1 for stride in strides) else None


class _StepLoss:
    """Wraps a program's forward step as a training objective of the engine."""

    def __init__(self, forward_step: ForwardStep) -> None:
        self.forward_step = forward_step

    def __call__(self, model: nn.Module, batch: Batch, num_items: float) -> Tensor:
        """Return the contribution of a micro-batch to the loss of the step."""
        loss, _values = self.forward_step(iter([batch]), model)
        return loss / num_items


def _pipe_loss(model: nn.Module, batch: Batch, num_items: float) -> Any:
    """Run a pipeline on a micro-batch; earlier stages return no loss."""
    assert isinstance(model, PipelineModule)
    assert model.loss_fn is not None
    to_inputs: Any = model._megatron_batch_fn
    inputs, labels = to_inputs(batch)
    out = model(inputs)
    if isinstance(out, StageOutput):
        if out.stage_outputs is not None:
            return None
        out = out.value
    return model.loss_fn(out, labels) / num_items


def _evaluate(rows: Rows, model: nn.Module, *, objective: Any, steps: int) -> EvalResult:
    """Return the mean loss of the next samples; restart the dataset if too few are left."""
    if len(rows.dataset) < (rows.step + steps) * rows.micro_batches * rows.size * rows.batch_size:
        rows.step = 0
    rows.check(steps)
    batches = [batch for _ in range(steps) for batch in next(rows)]
    with torch.no_grad():
        return evaluate(model, batches, objective=objective, device=groups.device)
