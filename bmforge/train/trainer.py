"""The training loop.

It is intentionally short: `train_step` is one step, and everything else is a callback or a
function. The model is already parallelized (`parallel.parallelize`); the Trainer works with any
model family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.batch import Batch
from bmforge.device import device_memory_bytes, peak_flops
from bmforge.host_tuning import MemoryWatch, tune_host
from bmforge.logging import ProgressBar, get_logger
from bmforge.parallel import (
    LOSS_AXES,
    FailureDetector,
    OffloadConfig,
    data_parallel_size,
    gradient_ranks,
    mesh_of,
    random_stream,
    reshard_,
    run_on_first,
    sum_over_axes,
)
from bmforge.train.batch_reader import BatchReader, Loader
from bmforge.train.best import BestEvaluation
from bmforge.train.callbacks import load_callback_states, read_callback_states
from bmforge.train.checkpoint.base import Base
from bmforge.train.checkpoint.checkpointer import Checkpointer
from bmforge.train.checkpoint.rng import reseed_rng
from bmforge.train.companion import Companion, join_for_checkpoint
from bmforge.train.config import TrainConfig
from bmforge.train.data_consistency import check_same_rows, sum_counts
from bmforge.train.evaluate import EvalResult
from bmforge.train.objective import (
    Objective,
    causal_lm,
    check_model,
    count_items,
    count_tokens,
    run_objective,
)
from bmforge.train.offload.states import StateOffload
from bmforge.train.optim.build import build_optimizers, clip_grad_norm_, restore_settings_
from bmforge.train.precision import LossScaler, check_precision, ensure_master_weights_
from bmforge.train.profile import trace_steps
from bmforge.train.report.metrics import (
    MetricsWriter,
    Row,
    Throughput,
    format_progress,
    measure_memory,
    validation_row,
)
from bmforge.train.run_lock import hold_run_dir
from bmforge.train.schedule import build_schedule, set_learning_rate_
from bmforge.train.signals import StopRequest
from bmforge.train.spike import SpikeGuard

__all__ = ["Callback", "Loader", "Trainer"]

Callback = Callable[["Trainer", Row], None]


class Trainer:
    """Trains a model; resumes automatically if its run directory contains a checkpoint.

    Args:
        model: parallelized and initialized model.
        loader: data loader that yields a list of micro-batches per optimizer step; see `Loader`.
        config: training settings.
        mesh: mesh of the model (default: the mesh over which its parameters are sharded).
        run_dir: directory for metrics and checkpoints; if None, nothing is written.
        objective: loss function; see `objective.py`.
        offload: optimizer offload settings; if None, the optimizer stays on the device.
        evaluator: collective function that evaluates the model; None for no evaluation.
        callbacks: functions to call with (trainer, row) after every step, on every process; the
            state of those with a `state_dict` is saved with the run.

    Attributes:
        base: weights that checkpoints omit, as in `save_checkpoint`; None to save all weights.
        overridden: fields (such as ``train.optim.lr``) and tables (such as ``data``) in which a
            resumed run may differ; optimizers then use the new settings, and the loader starts with
            a new sample order.
        step: number of completed optimizer steps.
        stopped: True if a signal has ended `fit` before its last step.
        save_error: error raised while writing the last checkpoint; None if it was written.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Loader,
        config: TrainConfig,
        *,
        mesh: DeviceMesh | None = None,
        run_dir: str | Path | None = None,
        objective: Objective = causal_lm,
        offload: OffloadConfig | None = None,
        evaluator: Callable[[nn.Module], EvalResult] | None = None,
        callbacks: Sequence[Callback] = (),
        flops_per_token: float | None = None,
    ) -> None:
        self.model, self.loader, self.config = model, loader, config
        check_model(model, objective)
        self.objective, self.evaluator, self.callbacks = objective, evaluator, tuple(callbacks)
        self.companion: Companion | None = getattr(objective, "companion", None)
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.best = BestEvaluation(config, evaluator is not None, run_dir is not None)
        check_precision(model, config.precision)
        ensure_master_weights_(model, config.precision, config.master_weights)
        self.device = next(model.parameters()).device
        is_offloaded = offload is not None and offload.is_on
        self.optimizers = build_optimizers(model, config.optim, offloaded=is_offloaded)
        self.state_offload: StateOffload | None = None
        if offload is not None and is_offloaded:
            self.state_offload = StateOffload(model, self.optimizers, offload)
        self.schedule = build_schedule(config.schedule, config.steps)
        self.guard = SpikeGuard(config.spike_sigmas)
        self.scaler = LossScaler() if config.precision == "fp16" else None
        self.base: Base | None = None
        self.overridden: frozenset[str] = frozenset()
        self.step, self.stopped = 0, False
        self.save_error: Exception | None = None
        self._knows_rows, self._detector = False, FailureDetector()
        self.mesh = mesh or mesh_of(model)
        self._reader = BatchReader(loader, config.num_epochs, self.device, self.mesh)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        peak = peak_flops(self.device)
        size = dist.get_world_size() if dist.is_initialized() else 1
        self._throughput = Throughput(flops_per_token, peak and peak * size)

    @property
    def ended(self) -> bool:
        """True if `fit` ended before `steps` because of the end of the data or early stopping."""
        return self._reader.ended or self.best.is_exhausted

    def fit(self, until_step: int | None = None, on_start: Callable[[], object] = bool) -> Self:
        """Train up to `config.steps`, saving and evaluating periodically; return the trainer.

        Training also ends after the loader's last epoch and by early stopping; the last step is
        then saved and `ended` is set. SIGINT or SIGTERM on any process ends training after saving
        and sets `stopped`. If a checkpoint cannot be written, only `save_error` is set.

        Args:
            until_step: step at which to stop earlier; the schedule remains that of the whole run.
            on_start: function called before the first step, once the checkpoint is loaded.
        """
        last_step = min(self.config.steps, self.config.steps if until_step is None else until_step)
        # Processes that share a block use the same random numbers, unless the layout requires
        # others.
        self._stream = random_stream(self.mesh, self._rank)
        reseed_rng(self.config.seed, self.step, self._stream)
        if self.run_dir is None:
            on_start()
            with self._detector.watching(), tune_host(self.device) as watch, StopRequest() as stop:
                self._loop(last_step, stop, None, None, watch)
            return self
        with (
            self._detector.watching(),
            tune_host(self.device) as watch,
            hold_run_dir(self.run_dir) as check_hold,
            Checkpointer(
                self.run_dir / "checkpoints",
                keep_last=self.config.keep_last,
                keep_every=self.config.keep_every_steps,
                base=self.base,
                check=check_hold,
            ) as checkpointer,
            StopRequest() as stop,
        ):
            resumed = self._resume(checkpointer)
            on_start()
            writer = run_on_first(partial(MetricsWriter, self.run_dir, resumed))
            try:
                self._loop(last_step, stop, checkpointer, writer, watch)
            finally:
                if writer is not None:
                    writer.close()
            if self.ended or self.step >= self.config.steps:
                self.best.load_(self.model, checkpointer.directory, self.step, self.state_offload)
        return self

    def _resume(self, checkpointer: Checkpointer) -> int | None:
        settings = [[dict(g) for g in each.param_groups] for each in self.optimizers]
        parts = join_for_checkpoint(self.model, self.optimizers, self.companion)
        loaded = checkpointer.load_newest(*parts)
        if loaded is None:
            return None
        if any(name.startswith("train.optim") for name in self.overridden):
            restore_settings_(self.optimizers, settings)
        self.step, state = loaded
        self.load_state_dict(state)
        self.best.find_checkpoint(checkpointer.directory)
        if state.get("mesh", self._shape()) != self._shape():
            # The saved generator states belong to processes of another layout, so reseed instead.
            reseed_rng(self.config.seed, self.step, self._stream)
        get_logger().info("resumed at step %d of %d", self.step, self.config.steps)
        return self.step

    def _loop(
        self,
        last_step: int,
        stop: StopRequest,
        checkpointer: Checkpointer | None,
        writer: MetricsWriter | None,
        watch: MemoryWatch | None,
    ) -> None:
        config = self.config
        self.model.train(not config.disable_dropout)
        with (
            ProgressBar("train", config.steps) as bar,
            trace_steps(config.profile_steps, self.run_dir, self._rank, self.device) as note_step,
        ):
            bar.advance(self.step)
            self.stopped = stopping = False
            saved = self.step
            while self.step < last_step and not (stopping or self.best.is_exhausted):
                self._throughput.start()
                with self._detector.naming_failures(f"step {self.step + 1}, reading data"):
                    micro_batches = self._reader.read(self.step)
                if micro_batches is None:
                    break
                row, stopping = self.train_step(stop.asked is not None, micro_batches)
                note_step()
                if watch is not None:
                    watch.note_step()
                due = config.eval_every_steps and self.step % config.eval_every_steps == 0
                is_best = False
                if self.evaluator is not None and (due or self.step == config.steps):
                    with self._detector.naming_failures(f"step {self.step}, validation"):
                        row.update(validation_row(self.evaluator(self.model)))
                    is_best = self.best.note(self.step, row["val_loss"])
                if writer is not None:
                    writer.write(self.step, row)
                self._show(row, bar)
                if self.state_offload is not None and (self.callbacks or self.step == last_step):
                    self.state_offload.wait()
                for callback in self.callbacks:
                    callback(self, row)
                due = config.save_every_steps and self.step % config.save_every_steps == 0
                due = due or is_best or stopping or self.step == last_step
                if checkpointer is not None and due:
                    self._save(checkpointer)
                    saved = self.step
            if self.ended and self.step > saved and checkpointer is not None:
                self._save(checkpointer)
        self.stopped = stopping and self.step < last_step
        if checkpointer is not None:
            self.save_error = checkpointer.report(self.step, self.stopped)

    def _save(self, checkpointer: Checkpointer) -> None:
        if self.state_offload is not None:
            self.state_offload.wait()
        with self._detector.naming_failures(f"step {self.step}, saving a checkpoint"):
            reshard_(self.model)  # a callback may have run the model
            parts = join_for_checkpoint(self.model, self.optimizers, self.companion)
            checkpointer.save(self.step, *parts, self.state_dict(), keep_step=self.best.step)

    def train_step(
        self, stop_asked: bool = False, micro_batches: Sequence[Batch] | None = None
    ) -> tuple[Row, bool]:
        """Run one optimizer step over the next global batch.

        Args:
            stop_asked: True if this process wants to stop; the request is sent to all processes.
            micro_batches: micro-batches of this process (default: the next ones from the loader).

        Returns:
            metrics row, and whether any process wants to stop

        Comm: an all-reduce of five integers before the forward pass and of the loss after it, the
        reductions of the gradients, and an all-reduce per kind of sharding for the norm.
        """
        if micro_batches is None:
            self._throughput.start()
            micro_batches = next(self.loader)
        if not self._knows_rows:
            check_same_rows(micro_batches, self.mesh)
            self._knows_rows = True
        counts = [
            sum(count_items(self.objective, b, self.model) for b in micro_batches),
            sum(count_tokens(b) for b in micro_batches),
        ]
        position = f"step {self.step + 1}"
        with self._detector.naming_failures(f"{position}, counting labels"):
            items, tokens, stops = sum_counts(
                counts, stop_asked, len(micro_batches), position, (self.mesh, self.device)
            )
        with self._detector.naming_failures(f"{position}, forward and backward"):
            loss, norm, scale, metrics = self._backward(micro_batches, max(items, 1))
        skipped = self.guard.check(loss, norm)
        set_learning_rate_(self.optimizers, multiplier := self.schedule(self.step))
        if self.state_offload is not None:
            self.state_offload.settle()
        for optimizer in self.optimizers:
            if skipped is None:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:
            self.scaler.update(overflow=not math.isfinite(norm))
        self.step += 1
        self._throughput.stop(tokens)
        row: Row = {
            "loss": loss,
            "lr": self.config.optim.lr * multiplier,
            "grad_norm": norm,
            "tokens": tokens,
            "tokens_per_s": self._throughput.tokens_per_s,
            **measure_memory(lambda: device_memory_bytes(self.device)),
        }
        more = {"mfu": self._throughput.mfu, "skipped": skipped, "loss_scale": scale, **metrics}
        row |= {name: value for name, value in more.items() if value is not None}
        return row, stops > 0

    def _backward(
        self, micro_batches: Sequence[Batch], items: int
    ) -> tuple[float, float, float | None, dict[str, float]]:
        """Accumulate the gradient of the mean loss; return loss, norm, loss scale and metrics."""
        scale = None if self.scaler is None else self.scaler.current_scale
        # Gradients are averaged over the data-parallel processes, so the sum is divided by fewer
        # items.
        divisor = items / data_parallel_size(self.mesh) / (scale or 1.0)
        moved = [{n: t.to(self.device) for n, t in batch.items()} for batch in micro_batches]
        total, metrics = run_objective(self.objective, self.model, moved, divisor, self.mesh)
        total = sum_over_axes(total, self.mesh, *LOSS_AXES)
        if self.scaler is not None:
            self.scaler.unscale_(self.model.parameters())
        norm = clip_grad_norm_(self.model, self.config.grad_clip)
        return (
            total.item() / gradient_ranks(self.mesh) / (scale or 1.0),
            norm.item(),
            scale,
            metrics,
        )

    def _show(self, row: Row, bar: ProgressBar) -> None:
        left = (self.config.steps - self.step) * self._throughput.step_s
        memory = int(row.get("device_memory_bytes") or row["memory_bytes"])
        speed = row["tokens_per_s"]
        text = format_progress(
            self.step, self.config.steps, row["loss"], speed, memory, left, row.get("mfu")
        )
        bar.advance(1, text)
        if "skipped" in row:
            get_logger().warning("step %d was skipped because of %s", self.step, row["skipped"])
        if "val_loss" in row:
            text += f"  val_loss {row['val_loss']:.4f}"
        due = self.step % self.config.log_every_steps == 0 or self.step == self.config.steps
        if due or "val_loss" in row:
            bar.log(text)

    def state_dict(self) -> dict[str, Any]:
        """Return all state except model and optimizer, as JSON values equal on all processes."""
        return {
            "seed": self.config.seed,
            "optim": self.config.optim.to_record(),
            "epoch": self._reader.epoch,
            "loader": self.loader.state_dict(),
            "guard": self.guard.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "mesh": self._shape(),
            "best": self.best.state_dict(),
            "callbacks": read_callback_states(self.callbacks),
            "companion": None if self.companion is None else self.companion.state_dict(),
        }

    def _shape(self) -> list[int]:
        return [] if self.mesh is None else list(self.mesh.shape)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state returned by `state_dict`.

        Raises:
            ConfigError: the run was started with other optimizer settings (which would remain
                in effect) or with other stateful callbacks.
        """
        if "optim" in state:
            self.config.optim.check_same(state["optim"], self.overridden)
        self._reader.resume(state, self.overridden)
        self.guard.load_state_dict(state["guard"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        if "best" in state:
            self.best.load_state_dict(state["best"])
        load_callback_states(self.callbacks, state.get("callbacks", {}))
        if self.companion is not None:
            self.companion.load_state_dict(state["companion"])
