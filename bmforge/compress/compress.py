"""Combines several compression methods with distillation from a teacher.

A `Compression` provides an objective and a callback for a Trainer, and also works in a custom
training loop:

    job = compress(model, config, teacher=teacher, batches=calibration)
    Trainer(model, loader, train, objective=job.objective(causal_lm), callbacks=(job,)).fit()
    report = job.finish_()
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.batch import Batch, count_labels
from bmforge.compress.config import CompressConfig
from bmforge.compress.distill import DistillConfig, Distiller, TeacherAnswers
from bmforge.compress.method import METHOD_NAMES, Method
from bmforge.compress.methods import attach_methods
from bmforge.compress.report import (
    CompressReport,
    ModelSizes,
    PhaseResults,
    measure_sizes,
    measure_zeros,
)
from bmforge.errors import ConfigError
from bmforge.records import find_parallel_record
from bmforge.shards import whole_tensor
from bmforge.surgery import copy_to_meta, persistent_tensors

__all__ = ["Compression", "compress"]

Objective = Callable[[nn.Module, Batch, float], Any]


def compress(
    model: nn.Module,
    config: CompressConfig | None = None,
    *,
    teacher: nn.Module | TeacherAnswers | None = None,
    batches: Sequence[Batch] | None = None,
    methods: Sequence[Method] = (),
) -> Compression:
    """Attach all compression methods of a config to a model, before it is parallelized.

    Args:
        model: any model; changed in place.
        config: compression settings; all methods are optional.
        teacher: distillation teacher or its saved answers; required if `config.distill` is set.
        batches: calibration batches for methods that need them.
        methods: custom methods that are not attached yet; see `Method`.

    Raises:
        ConfigError: settings conflict with the model or with each other, or the config is empty.
    """
    config = config or CompressConfig()
    if (config.distill is None) != (teacher is None):
        problem = (
            "distillation losses were passed without a teacher"
            if teacher is None
            else "a teacher was passed without distillation losses"
        )
        raise ConfigError(
            f"{problem}. Pass both compress(..., teacher=...) and CompressConfig.distill, or "
            "neither."
        )
    if not config.names and not methods and teacher is None:
        raise ConfigError(
            "no compression method is configured. Configure at least one of distill, structure, "
            "moefy, prune and quantize."
        )
    before = measure_sizes(model)
    attached = attach_methods(model, config, batches, methods)
    return Compression(model, attached, config.distill, teacher, before)


class Compression:
    """A model under compression, with the training objective and the Trainer callback.

    Args:
        model: model, not parallelized yet.
        methods: methods attached to the model, in the order of `METHOD_NAMES`.
        distill: distillation settings.
        teacher: distillation teacher; None to train only on the task's loss.
        before: size of the model before compression.

    Attributes:
        model: compressed model once finished: the original object or, if that was parallelized, an
            unsharded model.
        step: number of completed optimizer steps.
        distiller: `Distiller` that compares student and teacher; None without a teacher.
    """

    name = "compression"

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[Method],
        distill: DistillConfig | None = None,
        teacher: nn.Module | TeacherAnswers | None = None,
        before: ModelSizes | None = None,
    ) -> None:
        self.model, self.methods, self.step = model, list(methods), 0
        self._before = before or measure_sizes(model)
        # Copied before the distiller attaches projections, which do not belong to the compressed
        # model.
        self._plain = copy_to_meta(model)
        self.distiller: Distiller | None = None
        if teacher is not None:
            self.distiller = Distiller(model, teacher, distill)
        self._is_finished = False

    def init_(self, seed: int = 0) -> None:
        """Initialize the parameters that only distillation uses.

        This is needed for models that are built on the meta device.
        """
        if self.distiller is not None:
            self.distiller.init_(seed)

    def optim_groups(self) -> dict[str, dict[str, float]]:
        """Return a dict from a glob of parameter names to optimizer settings, for all methods."""
        settings: dict[str, dict[str, float]] = {}
        for method in self.methods:
            groups = getattr(method, "optim_groups", None)
            settings |= groups() if callable(groups) else {}
        return settings

    def objective(self, inner: Objective) -> Objective:
        """Return the task's objective plus the losses of distillation and the compression methods.

        In evaluation mode the objective returns only the task's loss.

        Args:
            inner: task's objective: (model, batch, number of items) -> sum of the items' losses
                divided by the number of items.
        """
        taught = inner if self.distiller is None else self.distiller.objective(inner)
        return partial(self._add_extra, taught)

    def _add_extra(
        self, taught: Objective, model: nn.Module, batch: Batch, num_items: float
    ) -> Any:
        loss = taught(model, batch, num_items)
        if loss is None or not model.training:
            return loss
        for method in self.methods:
            extra = method.extra_loss(model, self.step)
            if extra is not None:
                # Each micro-batch adds the term in proportion to its items, so that it counts once
                # per step.
                loss = loss + extra * (count_labels(batch, model) / num_items)
        return loss

    def after_step_(self) -> None:
        """Update the methods after an optimizer step; for custom training loops."""
        self._go_on_(self.step + 1, self.model)

    def __call__(self, trainer: Any, row: Any) -> None:
        """Trainer callback: update the compression methods after an optimizer step."""
        self._go_on_(trainer.step, trainer.model)

    def _go_on_(self, step: int, model: nn.Module) -> None:
        self.step = step
        if self.distiller is not None:
            self.distiller.step = step
        for method in self.methods:
            method.after_step_(model, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the step and each method's state as numbers, the same on every process."""
        return {
            "step": self.step,
            "methods": {method.name: method.state_dict() for method in self.methods},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state_dict`.

        Raises:
            ConfigError: the state belongs to a run with other methods.
        """
        names = [method.name for method in self.methods]
        if set(state["methods"]) != set(names):
            raise ConfigError(
                f"the run to resume uses the methods {', '.join(state['methods']) or '(none)'}, "
                f"but this recipe uses {', '.join(names) or '(none)'}. Resume the run with its "
                "original recipe."
            )
        self.step = int(state["step"])
        if self.distiller is not None:
            self.distiller.step = self.step
        for method in self.methods:
            method.load_state_dict(state["methods"][method.name])

    def remove_teacher_(self) -> None:
        """Remove the modules that only distillation uses, so that the model can be saved."""
        if self.distiller is not None:
            self.distiller.leave_()

    def finish_(self) -> CompressReport:
        """Finish all methods and return the report of the compressed model.

        If the model was parallelized, `model` becomes an unsharded model on every process.

        Raises:
            ConfigError: the compression is already finished, or the model is split into
                pipeline stages.

        Comm: one all-gather per tensor of a parallelized model.
        """
        if self._is_finished:
            raise ConfigError("the compression is already finished. Call finish_() only once.")
        self.remove_teacher_()
        self.model = _plain_model(self.model, self._plain)
        facts = {method.name: method.finish_(self.model) for method in self.methods}
        # Quantization may add zeros after they were counted.
        if "zeros" in facts and "quantize" in facts:
            facts["zeros"] |= measure_zeros(self.model, facts["zeros"].get("layers", ()))
        self._is_finished = True
        done = " + ".join(METHOD_WORDS[method.name] for method in self.methods) or "distilled"
        phase = PhaseResults(done, measure_sizes(self.model), facts, steps=self.step)
        return CompressReport(type(self.model).__name__, self._before, (phase,))


METHOD_WORDS = dict(
    zip(METHOD_NAMES, ("smaller shapes", "experts", "zeros", "integers"), strict=True)
)


def _plain_model(model: nn.Module, plain: nn.Module) -> nn.Module:
    """Return the model or, if it is parallelized, an unsharded model with the same values."""
    if not any(isinstance(tensor, DTensor) for tensor in persistent_tensors(model).values()):
        return model
    record = find_parallel_record(model)
    if record is not None and record.pipeline is not None:
        raise ConfigError(
            "the model is split into pipeline stages, so no process has all of it. Use a layout "
            "with pp=1."
        )
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    memo: dict[int, Any] = {}
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        values: Tensor = whole_tensor(live[name].detach()).cpu()
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = values
    copied: nn.Module = copy.deepcopy(plain, memo)
    return copied.train(model.training)
