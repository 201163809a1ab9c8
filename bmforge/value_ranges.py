"""Allowed values of the config fields of training runs, also checked before torch is imported.

The config classes and the command line read the same table, so each limit is stated once. Limits
that depend on other fields, on the model or on the data are checked by the config classes alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bmforge.errors import ConfigError, suggest

__all__ = ["VALUES", "Choice", "Range", "check_values", "find_problem", "list_problems"]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of a number; NaN is outside of every range.

    Args:
        least, above: lower limit, which is allowed (least) or not (above).
        most, below: upper limit, which is allowed (most) or not (below).
        is_finite: whether infinity is refused.
        or_none: whether None disables the field.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    is_finite: bool = False
    or_none: bool = False

    def find_problem(self, path: str, value: Any) -> str | None:
        """Return a sentence about a number that is out of range; None for any other value."""
        if not isinstance(value, int | float):
            return None
        is_inside = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and not (self.is_finite and math.isinf(value))
            and not math.isnan(value)
        )
        return None if is_inside else f"{path}={value} must be {self}."

    def __str__(self) -> str:
        """Describe the range, such as "at least 0 and below 1"."""
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        limits = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        words = " and ".join(f"{word} {n}" for word, n in limits.items() if n is not None)
        parts = [*([words] if words else []), *(["finite"] if self.is_finite else [])]
        return ", and ".join(parts) + (", or None" if self.or_none else "")


@dataclass(frozen=True)
class Choice:
    """Names that a field may have.

    Args:
        noun: word for the named thing in the error message, such as adapter.
        names: the supported names.
    """

    noun: str
    names: tuple[str, ...]

    def find_problem(self, path: str, value: Any) -> str | None:
        """Return a sentence about an unknown name; None for a supported name or None."""
        if value is None or value in self.names:
            return None
        return (
            f"unknown {self.noun}: {path}={value!r} (supported: {', '.join(self.names)})."
            f"{suggest(str(value), self.names)}"
        )


_ADAPTERS = "lora adapter low-rank compacter parallel-adapter bitfit ia3 prefix soft-prompt"
_OPTIMIZERS = "adamw muon sgd"
_SCHEDULES = "constant linear cosine exponential noam wsd"
# Allowed values, and the fields that have them.
_FIELDS: tuple[tuple[Range | Choice, str], ...] = (
    (
        Range(least=1),
        """
        data.seq_len data.global_batch_size data.micro_batch_size data.grad_accum_steps data.seeds
        loss_scale.hysteresis mean_span_length rollout.max_new_tokens
        rollout.max_num_seqs rollout.num_generations rollout.num_iterations
        rollout.steps_per_generation train.keep_last train.log_every_steps train.num_epochs
        train.steps
        """,
    ),
    (Range(least=2), "search.keep_ratio target_len"),
    (Range(least=1, most=99), "train.optim.ns_steps"),
    (
        Range(least=0),
        """
        data.shots distill_top_k rollout.log_completions rollout.overlong_tokens search.max_trained
        train.early_stopping_threshold train.profile_steps train.schedule.decay_steps
        train.schedule.warmup_steps value.lr
        """,
    ),
    (
        Range(least=0, is_finite=True),
        """
        center_rewards_coefficient desirable_weight nll_weight rl.beta rl.clip_high rl.clip_low
        train.optim.eps train.optim.lr train.optim.muon_lr train.optim.weight_decay
        undesirable_weight
        """,
    ),
    (
        Range(above=0),
        "data.std rollout.temperature rollout.tool_timeout_s timeout_s value.cliprange",
    ),
    (
        Range(above=0, or_none=True),
        """
        train.early_stopping_patience train.eval_every_steps train.grad_clip
        train.keep_every_steps train.save_every_steps train.spike_sigmas
        """,
    ),
    (Range(is_finite=True), "rl.clip_dual rl.entropy_bonus simpo_gamma"),
    (Range(least=1, is_finite=True), "rl.correction_cap"),
    (Range(above=0, is_finite=True), "beta distill_temperature epochs"),
    (Range(above=0, below=1), "mask_ratio noise_density"),
    (Range(above=0, most=1), "data.smallest_crop"),
    (Range(least=0, below=1), "data.validation_fraction train.optim.momentum"),
    (Range(least=0, below=0.5), "label_smoothing"),
    (Range(least=0, most=1), "jsd_beta long_ratio rl.gamma rl.lam train.schedule.min_lr_ratio"),
    (Choice("adapter", tuple(_ADAPTERS.split())), "adapter.kind"),
    (Choice("optimizer", tuple(_OPTIMIZERS.split())), "train.optim.name"),
    (Choice("schedule", tuple(_SCHEDULES.split())), "train.schedule.kind"),
    (Choice("decay", ("linear", "cosine", "1-sqrt")), "train.schedule.decay_kind"),
)
# Path of a config field -> its allowed values.
VALUES: Mapping[str, Range | Choice] = {
    path: allowed for allowed, paths in _FIELDS for path in paths.split()
}


def find_problem(path: str, value: Any) -> str | None:
    """Return a sentence about a value that a config field may not have; None if it may."""
    allowed = VALUES.get(path)
    return None if allowed is None else allowed.find_problem(path, value)


def list_problems(config: Any, prefix: str = "") -> list[str]:
    """Return a sentence for each value that a field of a config may not have.

    Args:
        config: config dataclass; its nested configs are checked too.
        prefix: path of the config in that of a run, such as "data.".
    """
    problems = (find_problem(path, value) for path, value in _iter_fields(config, prefix))
    return [problem for problem in problems if problem is not None]


def check_values(config: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the values in a config that are not allowed; see `list_problems`."""
    problems = list_problems(config, prefix)
    if problems:
        raise ConfigError(" ".join(problems))


def _iter_fields(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _iter_fields(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value
