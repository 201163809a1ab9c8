"""BMCook's distillation, quantization-aware training, and recording of MLP inputs.

Distillation compares logits and paired hidden states. Quantized layers have int8 products in
forward and backward. Recording MLP inputs is the first step of MoEfication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.compat.bmcook.addresses import modules_with, read_pair
from bmforge.compress.distill.capture import Recorder
from bmforge.compress.distill.losses import compare_logits, compare_states
from bmforge.compress.quantize import FakeQuantize, QuantizeConfig
from bmforge.errors import ConfigError
from bmforge.nn.low_rank import linear_sizes
from bmforge.surgery import find_repeated_blocks, freeze_

__all__ = ["BMDistill", "BMMoE", "BMQuant", "Teaching", "logits_of"]

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
                "the config has a section distillation, but no teacher was passed. Pass the "
                "teacher model to set_compression."
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
        self._pairs: list[list[str]] = []
        self.projections = nn.ModuleDict()
        for text in section["mse_hidn_module"] if section["mse_hidn_scale"] else ():
            pair = read_pair(text, (student, teacher))
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
            logits = [logits_of(out).flatten(0, -2) for out in (student_out, teacher_out)]
            each = compare_logits(logits[0], logits[1].detach(), float(section["ce_temp"]))
            if counted.shape != each.shape:
                counted = torch.ones_like(each, dtype=torch.bool)
            mean = each.where(counted, 0).sum() / counted.sum().clamp(1)
            total = total + section["ce_scale"] * mean
        for number, (name, other) in enumerate(self._pairs):
            state, taught = self._mine.states[name], self._theirs.states[other].detach()
            if str(number) in self.projections:
                taught = self.projections[str(number)](taught)
            weights = torch.ones(state.shape[:2], device=state.device)
            distance = compare_states(state, taught, weights, "mean_norm").mean()
            total = total + section["mse_hidn_scale"] * distance
        return total


def logits_of(out: Any) -> Tensor:
    """Return the logits of a model's output, which may be a tuple."""
    logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
    return logits


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
    for width in (getattr(config, name, None) for name in ("dim_model", "hidden_size")):
        if isinstance(width, int):
            return width
    raise ConfigError(
        f"mse_hidn_proj needs dim_model, which the config of {type(model).__name__} lacks. Set "
        "mse_hidn_proj to false."
    )


class BMMoE:
    """Records MLP activations, from which `bmforge.compress.moefy` builds experts."""

    @staticmethod
    def get_hidden(model: nn.Module, config: Any, forward_fn: Forward) -> Forward:
        """Return a forward function whose output includes the recorded tensors, `moe_records`.

        Args:
            model: any model.
            config: a `ConfigParser`, whose `first_FFN_module` lists substrings of module names.
            forward_fn: ``(model, loss_func, targets, *args, **kwargs)`` -> output.

        Raises:
            ConfigError: an entry matches no module name.
        """
        section = config.get("MoEfication")
        if not section["is_moefy"]:
            return forward_fn
        records: dict[str, Tensor] = {}
        for name, label in modules_with(
            model, section["first_FFN_module"], "MoEfication.first_FFN_module", _is_leaf
        ).items():
            hook = partial(_record, records, label)
            model.get_submodule(name).register_forward_hook(hook)
        return partial(_forward, records, forward_fn)


def _forward(records: dict[str, Tensor], forward_fn: Forward, *args: Any, **kwargs: Any) -> Any:
    records.clear()
    out = forward_fn(*args, **kwargs)
    out.moe_records = dict(records)
    records.clear()
    return out


def _is_leaf(module: nn.Module) -> bool:
    return not list(module.children())


def _record(records: dict[str, Tensor], label: str, module: nn.Module, args: Any, out: Any) -> None:
    records[label] = (out[0] if isinstance(out, tuple) else out).detach()


class BMQuant:
    """Converts linear layers to int8 computation for training."""

    @classmethod
    def quantize(
        cls, model: nn.Module, config: Any, target_linear: type[nn.Module] | None = None
    ) -> FakeQuantize | None:
        """Convert the linear layers that a config names to int8 computation.

        Args:
            model: any model.
            config: a `ConfigParser`.
            target_linear: class of the layers to convert (default: every kind of linear layer; in
                a model with repeated blocks, only the layers inside these blocks).

        Returns:
            the `FakeQuantize` method that was applied; None if the config disables quantization.

        Raises:
            ConfigError: a pattern matches no module name, or no layer matches all conditions.
        """
        section = config.get("quantization")
        if not section["is_quant"]:
            return None
        where: tuple[str, ...] = ()
        if section["quantized_module"]:
            names = section["quantized_module"]
            where = tuple(modules_with(model, names, "quantization.quantized_module"))
        elif target_linear is None and not find_repeated_blocks(model):
            where = tuple(n for n, m in model.named_modules() if linear_sizes(m) is not None)
        if target_linear is not None:
            layers = [n for n, m in model.named_modules() if isinstance(m, target_linear)]
            where = tuple(name for name in layers if not where or name in where)
            if not where:
                raise ConfigError(
                    f"the model has no {target_linear.__name__} to quantize. Pass the class of its "
                    "linear layers as quant_layer_cls."
                )
        method = FakeQuantize(
            QuantizeConfig(scheme="int8-dynamic", training="int8-both", where=where)
        )
        method.attach_(model)
        return method
