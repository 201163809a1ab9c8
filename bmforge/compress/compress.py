"""Several ways of making a model small at once, and a teacher beside them.

A `Compression` hands out functions of the shapes that a Trainer takes, and works in a loop of your
own just as well:

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
    PhaseFacts,
    measure_sizes,
    measure_zeros,
)
from bmforge.errors import ConfigError
from bmforge.records import laid_out
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
    """Put all that a config asks for into a model, before it is laid out.

    Args:
        model: any; changed in place.
        config: what is done; parts may be left out.
        teacher: what the model learns from, where the config has `distill`; or its kept answers.
        batches: real inputs, for methods that look at what goes through the model.
        methods: further ones of your own, not attached yet; see `Method`.

    Raises:
        ConfigError: what does not fit the model, or each other; or nothing is asked for.
    """
    config = config or CompressConfig()
    if (config.distill is None) != (teacher is None):
        given = "no teacher was given" if teacher is None else "nothing says what it teaches"
        raise ConfigError(
            f"{given}: give both compress(..., teacher=...) and CompressConfig.distill."
        )
    if not config.names and not methods and teacher is None:
        raise ConfigError(
            "nothing is to be done: give at least one of distill, structure, moefy, prune and "
            "quantize."
        )
    before = measure_sizes(model)
    attached = attach_methods(model, config, batches, methods)
    return Compression(model, attached, config.distill, teacher, before)


class Compression:
    """A model on its way to being small: an objective, a callback, and what is left at the end.

    Args:
        model: not laid out yet.
        methods: what is done, attached to it, in the one order of `METHOD_NAMES`.
        distill: what it learns from its teacher.
        teacher: None where it learns from its task alone.
        before: its sizes before anything was done.

    Attributes:
        model: the small one, once it is finished: the one that was given, or a plain one in its
            place where that had been laid out over processes.
        step: optimizer steps done.
        distiller: what compares with the teacher; None without one.
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
        # Before the teacher's parts come in, which are no part of the small model.
        self._plain = copy_to_meta(model)
        self.distiller: Distiller | None = None
        if teacher is not None:
            self.distiller = Distiller(model, teacher, distill)
        self._is_finished = False

    def init_(self, seed: int = 0) -> None:
        """Draw what is trained for the teacher's sake alone, of a model that was on meta before."""
        if self.distiller is not None:
            self.distiller.init_(seed)

    def optim_groups(self) -> dict[str, dict[str, float]]:
        """Return name glob of parameters -> settings that an optimizer is to have for them."""
        found: dict[str, dict[str, float]] = {}
        for method in self.methods:
            groups = getattr(method, "optim_groups", None)
            found |= groups() if callable(groups) else {}
        return found

    def objective(self, inner: Objective) -> Objective:
        """Return the task's objective with the teacher's and the methods' own losses in it.

        Of a model that is not in training, as in evaluation, it is the task's alone.

        Args:
            inner: (model, batch, number of items) -> the sum of the items' losses over the number.
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
                # It has no tokens: each micro-batch adds its share, so that it counts once a step.
                loss = loss + extra * (count_labels(batch, model) / num_items)
        return loss

    def after_step_(self) -> None:
        """Go on after a step of the optimizer, in a loop of your own."""
        self._go_on_(self.step + 1, self.model)

    def __call__(self, trainer: Any, row: Any) -> None:
        """Be a callback of a Trainer."""
        self._go_on_(trainer.step, trainer.model)

    def _go_on_(self, step: int, model: nn.Module) -> None:
        self.step = step
        if self.distiller is not None:
            self.distiller.step = step
        for method in self.methods:
            method.after_step_(model, step)

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands: plain numbers, the same on every process."""
        return {
            "step": self.step,
            "methods": {method.name: method.state_dict() for method in self.methods},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ConfigError: other methods were at work there.
        """
        here = [method.name for method in self.methods]
        if set(state["methods"]) != set(here):
            raise ConfigError(
                f"the run that is to go on does {', '.join(state['methods']) or 'nothing'}, this "
                f"one {', '.join(here) or 'nothing'}. Go on with the recipe that it began with."
            )
        self.step = int(state["step"])
        if self.distiller is not None:
            self.distiller.step = self.step
        for method in self.methods:
            method.load_state_dict(state["methods"][method.name])

    def leave_teacher_(self) -> None:
        """Take out what is there for the teacher's sake alone; the model is then what is saved."""
        if self.distiller is not None:
            self.distiller.leave_()

    def finish_(self) -> CompressReport:
        """Leave the small model, and say what became of it.

        Of a model that is laid out it is a plain one in its place, `model`, on every process.

        Raises:
            ConfigError: it is finished already, or cut into stages of a pipeline.

        Comm: of a model that is laid out, a gather of each tensor.
        """
        if self._is_finished:
            raise ConfigError("the model is small already: finish_ is called once.")
        self.leave_teacher_()
        self.model = _plain_model(self.model, self._plain)
        facts = {method.name: method.finish_(self.model) for method in self.methods}
        if "zeros" in facts and "quantize" in facts:  # rounding comes after the zeros were counted
            facts["zeros"] |= measure_zeros(self.model, facts["zeros"].get("layers", ()))
        self._is_finished = True
        done = " + ".join(METHOD_WORDS[method.name] for method in self.methods) or "distilled"
        phase = PhaseFacts(done, measure_sizes(self.model), facts, steps=self.step)
        return CompressReport(type(self.model).__name__, self._before, (phase,))


METHOD_WORDS = dict(
    zip(METHOD_NAMES, ("smaller shapes", "experts", "zeros", "integers"), strict=True)
)


def _plain_model(model: nn.Module, plain: nn.Module) -> nn.Module:
    """Return the model itself, or of one that is laid out the plain one with its values."""
    if not any(isinstance(tensor, DTensor) for tensor in persistent_tensors(model).values()):
        return model
    record = laid_out(model)
    if record is not None and record.pipeline is not None:
        raise ConfigError(
            "the model is cut into stages of a pipeline, and no process has all of it: use a "
            "layout with pp=1."
        )
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    memo: dict[int, Any] = {}
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        values: Tensor = whole_tensor(live[name].detach()).cpu()
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = values
    made: nn.Module = copy.deepcopy(plain, memo)
    return made.train(model.training)
