"""What can be asked of `generate`, checked as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from bmforge.errors import ConfigError, suggest

__all__ = ["GenerationConfig"]


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How to continue a prompt. The names and defaults are transformers', but `top_k` is off.

    Args:
        max_new_tokens: longest continuation in tokens.
        min_new_tokens: an end token is not chosen before so many.
        do_sample: draw tokens at random; otherwise take the likeliest.
        temperature: scores are divided by it before drawing.
        top_k: draw among the k likeliest; None or 0 takes all.
        top_p: draw among the likeliest that together have this probability; None or 1 takes all.
        repetition_penalty: above 1, tokens already there become less likely (Keskar et al. 2019).
        num_beams: above 1, search with so many beams.
        length_penalty: beam scores are divided by length to this power.
        early_stopping: when a beam search ends: False by a heuristic, True as soon as `num_beams`
            rows are finished, "never" only when no better row is possible.
        num_return_sequences: continuations per prompt (rows of one prompt are neighbours).
        eos_token_id: one or several end tokens; None takes the config.json's, () none.
        pad_token_id: fills rows that ended early; None takes the config.json's, or else the
            first end token.
        seed: of the drawing; None uses torch's global generator.
    """

    max_new_tokens: int = 20
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` with every value out of range and every setting without effect."""
        problems = [
            f"{name}={getattr(self, name)!r} must be {needed}"
            for name, needed, fits in _RANGES
            if not fits(getattr(self, name))
        ]
        problems += self._contradictions() if not problems else []
        if problems:
            raise ConfigError(f"GenerationConfig: {'; '.join(problems)}.")

    def _contradictions(self) -> list[str]:
        problems = []
        if self.min_new_tokens > self.max_new_tokens:
            problems.append(
                f"min_new_tokens={self.min_new_tokens} is above "
                f"max_new_tokens={self.max_new_tokens}"
            )
        if self.do_sample and self.num_beams > 1:
            problems.append(f"do_sample=True and num_beams={self.num_beams} exclude each other")
        if not self.do_sample:
            idle = [name for name, off in _SAMPLING if getattr(self, name) not in off]
            problems += [f"{name}={getattr(self, name)} needs do_sample=True" for name in idle]
        if not self.do_sample and self.num_return_sequences > self.num_beams:
            problems.append(
                f"num_return_sequences={self.num_return_sequences} needs do_sample=True or at "
                f"least as many beams (num_beams={self.num_beams})"
            )
        if self.num_beams == 1 and (self.length_penalty != 1.0 or self.early_stopping is not False):
            problems.append("length_penalty and early_stopping need num_beams above 1")
        return problems

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """The end tokens as a tuple, empty when there is none."""
        if self.eos_token_id is None:
            return ()
        return (
            (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with fields changed.

        Raises:
            ConfigError: no such field (the nearest is named), or the result does not hold together.
        """
        fields = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in fields:
                raise ConfigError(
                    f"generate has no option {name!r}.{suggest(name, fields)} "
                    f"It has: {', '.join(fields)}."
                )
        return dataclasses.replace(self, **changes)


# field -> (values that switch it off)
_SAMPLING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("temperature", (1.0,)),
    ("top_k", (None, 0)),
    ("top_p", (None, 1.0)),
    ("seed", (None,)),
)
_RANGES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("max_new_tokens", "at least 1", lambda v: v >= 1),
    ("min_new_tokens", "at least 0", lambda v: v >= 0),
    ("temperature", "above 0 (for the likeliest token set do_sample=False)", lambda v: v > 0),
    ("top_k", "a positive number, or None", lambda v: v is None or v >= 0),
    ("top_p", "above 0 and at most 1, or None", lambda v: v is None or 0 < v <= 1),
    ("repetition_penalty", "above 0", lambda v: v > 0),
    ("num_beams", "at least 1", lambda v: v >= 1),
    ("early_stopping", "False, True or 'never'", lambda v: v in (False, True, "never")),
    ("num_return_sequences", "at least 1", lambda v: v >= 1),
)
