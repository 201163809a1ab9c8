"""Configuration of distillation: losses, weights and layer pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bmforge.errors import ConfigError

__all__ = ["DistillConfig", "DistillLoss"]

Kind = Literal["logits", "hidden", "attention", "relation", "value"]
Form = Literal["mean_norm", "plain", "cosine"]
Layers = Literal["same", "uniform", "last", "skip"]
Schedule = Literal["constant", "rise", "fall"]


@dataclass(frozen=True, kw_only=True)
class DistillLoss:
    """One loss of the distillation.

    Args:
        kind: "logits": KL divergence of the predictions times T^2; "hidden": distance of the
            blocks' hidden states; "attention": KL divergence of the attention probabilities;
            "relation": KL divergence of the similarities between tokens' queries, keys or values
            (MiniLM); "value": distance of the attention values.
        weight: factor on the loss.
        temperature: temperature T of the logits.
        form: distance of hidden states: "plain" is the mean squared difference, "mean_norm" the
            same after the student's and the teacher's vectors are divided by their mean norm
            (BMCook), "cosine" one minus the cosine similarity.
        of: tensor of the relation loss: "query", "key" or "value".
        relation_heads: number of relation heads; 0 for the student's number of attention heads.
        layers: pairing of student and teacher blocks; see `maps.pair_layers`.
        pairs: explicit pairs (student module, teacher module) instead of `layers`; "into:NAME"
            means the input of a module.
        stack: "encoder" or "decoder" of an encoder-decoder; "" for both.
        schedule: weight over the steps: "constant", "rise" from 0, or "fall" to 0.
        steps: length of the schedule in optimizer steps.
    """

    kind: Kind = "logits"
    weight: float = 1.0
    temperature: float = 1.0
    form: Form = "plain"
    of: Literal["query", "key", "value"] = "value"
    relation_heads: int = 0
    layers: Layers = "same"
    pairs: tuple[tuple[str, str], ...] = ()
    stack: Literal["", "encoder", "decoder"] = ""
    schedule: Schedule = "constant"
    steps: int = 0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range and settings without effect."""
        for name in ("weight", "temperature"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(
                    f"distill.losses: {name}={value} of {self.kind!r} must be finite and above "
                    "0. To disable a loss, remove it from the list."
                )
        if (self.schedule == "constant") != (self.steps == 0) or self.steps < 0:
            raise ConfigError(
                f"distill.losses: schedule={self.schedule!r} and steps={self.steps} do not match "
                "(allowed: steps above 0 with rise and fall, and steps=0 with constant)."
            )
        if self.relation_heads < 0:
            raise ConfigError(
                f"distill.losses: relation_heads={self.relation_heads} must be at least 0."
            )
        needed = {
            "temperature": "logits",
            "form": "hidden",
            "of": "relation",
            "relation_heads": "relation",
        }
        for name, kind in needed.items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                self._refuse(name, self.kind != kind)
        for name in ("layers", "pairs", "stack"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                self._refuse(name, self.kind == "logits")
        if self.pairs and (self.layers != "same" or self.stack):
            raise ConfigError(
                "distill.losses: pairs has no effect together with layers or stack. Leave layers "
                "and stack out."
            )

    def _refuse(self, name: str, has_no_effect: bool) -> None:
        if has_no_effect:
            raise ConfigError(
                f"distill.losses: {name}={getattr(self, name)!r} has no effect with "
                f"kind={self.kind!r}. Leave {name} out."
            )

    def weight_at(self, step: int) -> float:
        """Return the loss weight at an optimizer step, counted from 0."""
        if self.schedule == "constant":
            return self.weight
        done = min(1.0, step / self.steps)
        return self.weight * (done if self.schedule == "rise" else 1.0 - done)


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation from a teacher, in addition to the task's loss.

    Args:
        teacher: directory or hub id of the teacher; only for recipes, as programs pass the model
            itself.
        answers: directory of the teacher's saved answers (`write_answers`) instead of a teacher.
        teacher_quantize: quantization scheme of the teacher's weights.
        losses: distillation losses; their weighted sum is added to the task's loss.
        task_weight: factor on the task's loss; 0 to learn only from the teacher.
    """

    teacher: str | None = None
    answers: str | None = None
    teacher_quantize: str | None = None
    losses: tuple[DistillLoss, ...] = (DistillLoss(),)
    task_weight: float = 1.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an empty list of losses or values out of range."""
        if not self.losses:
            raise ConfigError(
                "distill.losses is empty. Add at least one loss, or leave distill out."
            )
        if not (self.task_weight >= 0 and math.isfinite(self.task_weight)):
            raise ConfigError(
                f"distill.task_weight={self.task_weight} must be finite and at least 0."
            )
        if sum(loss.kind == "logits" for loss in self.losses) > 1:
            raise ConfigError(
                "distill.losses contains logits more than once. Keep one logits loss, with one "
                "temperature."
            )
        if self.teacher is not None and self.answers is not None:
            raise ConfigError(
                "distill.teacher and distill.answers are both set. Set only one of them."
            )
        if self.teacher_quantize is not None and self.teacher is None:
            raise ConfigError(
                "distill.teacher_quantize has no effect without distill.teacher. Leave it out."
            )

    @property
    def looks_inside(self) -> bool:
        """True if any loss compares internal tensors, not only predictions."""
        return any(loss.kind != "logits" for loss in self.losses)
