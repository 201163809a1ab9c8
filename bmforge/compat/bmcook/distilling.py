"""BMCook's distillation of logits and of paired hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.compat.bmcook.addresses import find_old_module
from bmforge.compress.distill.capture import INTO, Recorder
from bmforge.compress.distill.losses import compare_logits, compare_states
from bmforge.errors import ConfigError
from bmforge.surgery import freeze_

__all__ = ["BMDistill", "Teaching"]

Forward = Callable[..., Any]


class BMDistill:
    """Adds a distillation loss to a model's forward."""

    @classmethod
    def set_forward(
        cls,
        student: nn.Module,
        teacher: nn.Module | None,
        forward_fn: Forward,
        config: Any,
        target_linear: type[nn.Module] | None = None,
    ) -> Forward:
        """Return a forward function that adds the distillation loss, `d_loss`, to `loss`.

        Args:
            student: model that learns.
            teacher: frozen teacher; None if the config has no distillation.
            forward_fn: ``(model, loss_func, targets, *args, **kwargs)`` -> output.
            config: a `ConfigParser`.
            target_linear: class of the projection for `mse_hidn_proj` (default: nn.Linear).

        Raises:
            ConfigError: the teacher is missing, or the config names unknown modules.
        """
        section = config.get("distillation")
        if not any(section[f"{what}_scale"] for what in ("ce", "mse_hidn", "mse_att")):
            return forward_fn
        if section["mse_att_scale"]:
            raise ConfigError(
                "distillation.mse_att_scale had no effect in BMCook. Set it to 0, or distill "
                'attention with a recipe: kind="attention" (docs/guides/compression.md).'
            )
        if teacher is None:
            raise ConfigError(
                "the config has a section distillation, but there is no teacher. Pass the teacher."
            )
        freeze_(teacher)
        return Teaching(student, teacher, section, target_linear).wrap(forward_fn)


class Teaching:
    """Distillation from a teacher to a student.

    Args:
        student, teacher: the models.
        section: distillation section of the config.
        linear: class of the hidden-state projections.

    Attributes:
        projections: projections from the teacher's width to the student's, if the config requires
            them; an optimizer must train them.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        section: Mapping[str, Any],
        linear: type[nn.Module] | None,
    ) -> None:
        self.teacher, self.section = teacher, section
        self._mine, self._theirs = Recorder(student), Recorder(teacher)
        self._pairs: list[tuple[str, str]] = []
        self.projections = nn.ModuleDict()
        for text in section["mse_hidn_module"] if section["mse_hidn_scale"] else ():
            sides = text.split(":")
            if len(sides) != 2:
                raise ConfigError(
                    f"{text!r} is not a pair of modules, such as '[post]a.b:[post]a.b'."
                )
            pair = _place(student, sides[0]), _place(teacher, sides[1])
            self._mine.watch_state_(student, pair[0])
            self._theirs.watch_state_(teacher, pair[1])
            self._pairs.append(pair)
            if section["mse_hidn_proj"]:
                key = str(len(self._pairs) - 1)
                self.projections[key] = _projection(student, teacher, linear)

    def wrap(self, forward_fn: Forward) -> Forward:
        """Add the distillation loss to a forward function."""
        return partial(self._forward, forward_fn)

    def _forward(
        self,
        forward_fn: Forward,
        model: nn.Module,
        loss_func: Any,
        targets: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with self._mine.recording(), self._theirs.recording():
            out = forward_fn(model, loss_func, targets, *args, **kwargs)
            with torch.no_grad():
                taught = self.teacher(*args, **kwargs)
            d_loss = self._compare(out.original_output, taught, targets)
        out.loss, out.d_loss = out.loss + d_loss, d_loss
        return out

    def _compare(self, student_out: Any, teacher_out: Any, targets: Tensor) -> Tensor:
        section = self.section
        counted = (targets != IGNORE_INDEX).flatten()
        total = torch.zeros((), device=targets.device)
        if section["ce_scale"]:
            logits = [
                out.logits if hasattr(out, "logits") else out[0]
                for out in (student_out, teacher_out)
            ]
            flat = [student_name.flatten(0, -2) for student_name in logits]
            each = compare_logits(flat[0], flat[1].detach(), float(section["ce_temp"]))
            counted = (
                counted if counted.shape == each.shape else torch.ones_like(each, dtype=torch.bool)
            )
            total = total + section["ce_scale"] * each.where(
                counted, 0
            ).sum() / counted.sum().clamp(1)
        for number, (student_name, other) in enumerate(self._pairs):
            state, taught = self._mine.states[student_name], self._theirs.states[other].detach()
            if str(number) in self.projections:
                taught = self.projections[str(number)](taught)
            weights = torch.ones(state.shape[:2], device=state.device)
            distance = compare_states(state, taught, weights, "mean_norm").mean()
            total = total + section["mse_hidn_scale"] * distance
        return total


def _place(model: nn.Module, text: str) -> str:
    """Convert an entry such as ``[post]a.b`` to the module name that `Recorder` accepts."""
    kind, mark, name = text.partition("]")
    if not mark or kind not in ("[post", "[pre"):
        raise ConfigError(f"module {text!r} must begin with [post] or [pre], such as '[post]a.b'.")
    module_name = find_old_module(model, name)
    return module_name if kind == "[post" else f"{INTO}{module_name}"


def _projection(
    student: nn.Module, teacher: nn.Module, linear: type[nn.Module] | None
) -> nn.Module:
    widths = [_width(model) for model in (teacher, student)]
    if linear is None or linear is nn.Linear:
        projection = nn.Linear(*widths, bias=False)
        nn.init.normal_(projection.weight, std=0.02)
        like = next(student.parameters())
        return projection.to(like.device, like.dtype)
    return linear(*widths, init_std=0.02)


def _width(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    for name in ("dim_model", "hidden_size"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    raise ConfigError(
        f"mse_hidn_proj needs dim_model, which the config of {type(model).__name__} lacks. Set "
        "mse_hidn_proj to false."
    )
