"""Tiny runs for the trainer's tests; the functions are called in the pool's workers too."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bmforge.data import DataLoader, PackedDataset, TokenStore, TokenStoreWriter, iter_once
from bmforge.memory.streaming import stream_blocks_
from bmforge.models import GPT2, GPT2Config, init_weights_, weight_initializer
from bmforge.parallel import (
    Layout,
    build_mesh,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    parallelize,
)
from bmforge.shards import Source
from bmforge.train import (
    EvalResult,
    OptimConfig,
    ScheduleConfig,
    SpikeGuard,
    TrainConfig,
    Trainer,
    causal_lm,
    evaluate,
    read_metrics,
)
from bmforge.train.checkpoint.state import read_state

VOCAB, LENGTH = 29, 10


def write_corpus(prefix: Path) -> str:
    """Documents of random tokens; returns the prefix."""
    generator = np.random.default_rng(7)
    with TokenStoreWriter(prefix, vocab_size=VOCAB) as writer:
        for length in generator.integers(3, 30, 60).tolist():
            writer.add_item([*generator.integers(1, VOCAB, length).tolist(), 0])
            writer.end_document()
    return str(prefix)


def tiny_model(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> GPT2:
    """A GPT-2 whose rows 2, 3 and 4 processes do not divide, on meta."""
    config = GPT2Config(
        vocab_size=VOCAB,
        hidden_size=20,
        num_layers=2,
        num_heads=2,
        max_seq_len=16,
        dropout=dropout,
        attn_dropout=dropout,
    )
    return GPT2.from_config(config, device="meta").to(dtype)


def make_trainer(prefix: str, run_dir: str | None = None, **changes: Any) -> Trainer:
    """A trainer on this process's share; `changes` are fields of its configs."""
    take = changes.pop
    world = init_distributed()
    layout = take("layout", Layout())
    model = tiny_model(take("dtype", torch.float32), take("dropout", 0.0))
    precision = take("precision", "fp32")
    mesh = build_mesh(layout, world.device)
    if take("streams", False):
        stream_blocks_(model, weight_initializer(model, seed=3), device=world.device)
    trained = take("trained", "")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    away = take("offload_activations", False)
    parallelize(model, layout, mesh=mesh, precision=precision, offload_activations=away)
    init_weights_(model, seed=3)
    dataset = PackedDataset(TokenStore(prefix), LENGTH, eos_id=0)
    loader = DataLoader(
        dataset,
        global_batch_size=take("global_batch_size", 8),
        micro_batch_size=take("micro_batch_size", 2),
        rank=data_parallel_rank(mesh),
        world=data_parallel_size(mesh),
        seed=11,
        reset_at_documents=True,
    )
    objective = take("objective", causal_lm)
    callbacks = take("callbacks", ())
    offload = take("offload", None)
    evaluator = take("evaluator", None)
    if take("evaluating", False):

        def evaluator(model: Any) -> Any:
            place = data_parallel_rank(mesh), data_parallel_size(mesh)
            batches = iter_once(dataset, 3, *place, reset_at_documents=True)
            return evaluate(model, batches, mesh=mesh)

    optim = OptimConfig(name=take("optimizer", "adamw"), lr=take("lr", 1e-2))
    schedule = take("schedule", ScheduleConfig("cosine", warmup_steps=2))
    settings = {"steps": 6, "save_every_steps": None, "grad_clip": 0.5, **changes}
    config = TrainConfig(precision=precision, optim=optim, schedule=schedule, **settings)
    return Trainer(
        model,
        loader,
        config,
        mesh=mesh,
        run_dir=run_dir,
        objective=objective,
        offload=offload,
        evaluator=evaluator,
        callbacks=callbacks,
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, put together by DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def outcome(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state, whole."""
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    out = {f"param/{n}": whole(p) for n, p in trainer.model.named_parameters()}
    for optimizer in trainer.optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for key, value in read_state(optimizer, parameter).items():
                if isinstance(value, Source):
                    out[f"{key}/{names[id(parameter)]}"] = whole(_as_laid_out(value))
    return out


def _as_laid_out(source: Source) -> torch.Tensor:
    """Values, as a tensor laid out like the one they belong to."""
    pattern = source.pattern.detach()
    if not isinstance(pattern, DTensor):
        return source.read()
    return DTensor.from_local(
        source.read(),
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )


def run(prefix: str, run_dir: str | None = None, **changes: Any) -> tuple[list[Any], Any]:
    """Train; return the rows of metrics and `outcome`."""
    rows: list[Any] = []
    until = changes.pop("until_step", None)
    callbacks = (*changes.pop("callbacks", ()), lambda t, row: rows.append(dict(row)))
    trainer = make_trainer(prefix, run_dir, callbacks=callbacks, **changes)
    with trainer.loader:
        trainer.fit(until)
    return rows, outcome(trainer)


def run_interrupted(prefix: str, run_dir: str, at: int, **changes: Any) -> tuple[list[Any], Any]:
    """Train to step `at`, then go on with new objects and other global random numbers."""
    run(prefix, run_dir, until_step=at, **changes)
    torch.manual_seed(99)
    _, state = run(prefix, run_dir, **changes)
    return logged(run_dir), state


def logged(run_dir: str) -> list[Any]:
    """What metrics.jsonl says that does not depend on the clock."""
    rows = read_metrics(Path(run_dir) / "metrics.jsonl")
    return [{k: r.get(k) for k in ("step", "loss", "lr", "grad_norm", "val_loss")} for r in rows]


def poison(at: int, rank: int, factor: float) -> Any:
    """A causal_lm whose loss is multiplied by `factor` on one rank in optimizer step `at`."""
    calls = itertools.count()

    def objective(model: Any, batch: Any, num_items: float) -> torch.Tensor:
        loss = causal_lm(model, batch, num_items)
        bad = next(calls) == at and dist.get_rank() == rank
        return loss * factor if bad else loss

    return objective


def run_poisoned(prefix: str, factor: float, sigmas: float | None = None, **changes: Any) -> Any:
    """Train with one bad step, the fourth, on the last rank; return rows, snapshots and scale."""
    init_distributed()
    snapshots: list[Any] = []
    rows: list[Any] = []

    def note(trainer: Trainer, row: Any) -> None:
        rows.append(dict(row))
        snapshots.append(outcome(trainer))

    # One micro-batch a step, so that calls of the objective are steps.
    world = dist.get_world_size()
    objective = poison(3, world - 1, factor)
    trainer = make_trainer(
        prefix, micro_batch_size=8 // world, objective=objective, callbacks=(note,), **changes
    )
    if sigmas is not None:
        trainer.guard = SpikeGuard(sigmas, window_steps=3)
    with trainer.loader:
        trainer.fit()
    scale = None if trainer.scaler is None else trainer.scaler.current_scale
    return rows, snapshots, scale


def run_signalled(prefix: str, run_dir: str, **changes: Any) -> tuple[int, Any]:
    """Train while the last rank gets SIGTERM after its third step; return (step, outcome)."""

    def strike(trainer: Trainer, row: Any) -> None:
        if trainer.step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(prefix, run_dir, callbacks=(strike,), **changes)
    with trainer.loader:
        trainer.fit()
    return trainer.step, outcome(trainer)


def run_scripted(prefix: str, run_dir: str, losses: list[float], **changes: Any) -> Any:
    """Train with evaluations that return `losses` in turn; return (last step, outcome).

    A resumed run continues with the loss of its step.
    """
    every = changes["eval_every_steps"]
    trainer: Any = None

    def evaluator(model: Any) -> EvalResult:
        return EvalResult(losses[trainer.step // every - 1], 1)

    until = changes.pop("until_step", None)
    trainer = make_trainer(prefix, run_dir, evaluator=evaluator, **changes)
    with trainer.loader:
        trainer.fit(until)
    return trainer.step, outcome(trainer)
