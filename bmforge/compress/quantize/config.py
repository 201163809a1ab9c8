"""Configuration of weight quantization, after or during training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from bmforge.errors import ConfigError, suggest
from bmforge.nn.packing import QuantSpec, find_preset

__all__ = ["AUTO", "QuantizeConfig"]

AUTO = "auto"
_CHOICES = {
    "method": ("absmax", "smooth", "awq", "gptq"),
    "training": ("none", "fake", "int8", "int8-both"),
}
# Setting -> the method that uses it.
_OF_METHOD = {"strength": "smooth", "grid": "awq", "damp": "gptq", "block_columns": "gptq"}


@dataclass(frozen=True)
class QuantizeConfig:
    """Settings of quantization: scheme, method and layers.

    Args:
        scheme: name in `nn.packing.PRESETS`, or "auto" to choose "int4" or "int8" per module by
            sensitivity, within `average_bits`.
        spec: explicit `QuantSpec` that replaces `scheme`.
        method: "absmax": round to nearest; "smooth" (SmoothQuant) and "awq": scale input channels
            before rounding; "gptq": compensate for errors in later columns. All methods except
            "absmax" need calibration batches.
        where: name globs of modules; if empty, the blocks' linear layers and experts.
        average_bits: mean bits per weight for "auto", including scales.
        training: quantization during training: "none"; "fake" for fake quantization of weights and
            activations; "int8" for int8 matrix products in the forward pass; "int8-both" for int8
            products also in the backward pass. The int8 modes need the scheme "int8-dynamic".
        strength: exponent alpha of SmoothQuant: how much of the activations' range moves into the
            weights, 0 to 1 (smooth only).
        grid: number of scale exponents to try (awq only).
        damp: fraction of the Hessian's mean diagonal that is added to the diagonal (gptq only).
        block_columns: number of columns per block, after which the remaining columns are
            updated (gptq only).
    """

    scheme: str = "int8"
    spec: QuantSpec | None = None
    method: Literal["absmax", "smooth", "awq", "gptq"] = "absmax"
    where: tuple[str, ...] = ()
    average_bits: float | None = None
    training: Literal["none", "fake", "int8", "int8-both"] = "none"
    strength: float = 0.5
    grid: int = 20
    damp: float = 0.01
    block_columns: int = 128

    def __post_init__(self) -> None:
        """Raise a `ConfigError` that lists contradictory settings and settings without effect."""
        where = (self.where,) if isinstance(self.where, str) else tuple(self.where)
        object.__setattr__(self, "where", where)
        for name, choices in _CHOICES.items():
            value = str(getattr(self, name))
            if value not in choices:
                raise ConfigError(
                    f"unknown value: quantize.{name}={value!r} (supported: "
                    f"{', '.join(choices)}).{suggest(value, choices)}"
                )
        problems = [*self._scheme_problems(), *self._method_problems()]
        if problems:
            raise ConfigError(f"quantize: {'; '.join(problems)}.")

    def _scheme_problems(self) -> list[str]:
        problems = []
        if self.is_auto != (self.average_bits is not None):
            problems.append(
                'scheme="auto" needs average_bits, for example 5.0'
                if self.is_auto
                else f'average_bits={self.average_bits} has no effect without scheme="auto"'
            )
        if self.spec is not None:
            problems += self._without_effect("scheme", "together with spec")
        elif not self.is_auto:
            find_preset(self.scheme)
        if self.training.startswith("int8") and not self.is_rows_by_tokens:
            problems.append(
                f"training={self.training!r} needs one scale per row and per token: use "
                'scheme="int8-dynamic", or training="fake"'
            )
        return problems

    def _method_problems(self) -> list[str]:
        problems = []
        for name, method in _OF_METHOD.items():
            if self.method != method:
                problems += self._without_effect(name, f"with method={self.method!r}")
        if not 0 <= self.strength <= 1:
            problems.append(f"strength={self.strength} must be from 0 to 1")
        if self.grid < 1 or self.block_columns < 1:
            problems.append(
                f"grid={self.grid} and block_columns={self.block_columns} must be above 0"
            )
        if not self.damp > 0:
            problems.append(f"damp={self.damp} must be above 0")
        if self.training != "none" and self.method != "absmax":
            problems.append(
                f"method={self.method!r} quantizes after training, but with "
                f"training={self.training!r} the weights are already quantized in training: "
                "leave method out"
            )
        if self.spec is not None and self.spec.outlier_ratio:
            if self.method == "gptq":
                problems.append("gptq does not support outlier columns: set spec.outlier_ratio=0")
            if self.training != "none":
                problems.append(
                    "training does not support outlier columns: set spec.outlier_ratio=0"
                )
        return problems

    def _without_effect(self, name: str, when: str) -> list[str]:
        usual = next(field.default for field in fields(self) if field.name == name)
        value = getattr(self, name)
        return [] if value == usual else [f"{name}={value!r} has no effect {when}"]

    @property
    def is_auto(self) -> bool:
        """True if the scheme is chosen per module."""
        return self.scheme == AUTO and self.spec is None

    @property
    def used_spec(self) -> QuantSpec:
        """`QuantSpec` of the scheme; not available for "auto"."""
        return self.spec or find_preset(self.scheme)

    @property
    def is_rows_by_tokens(self) -> bool:
        """True for int8 weights with one scale per row and dynamic int8 activations."""
        if self.is_auto:
            return False
        spec = self.used_spec
        is_per_row = spec.bits == 8 and spec.group_size == 0 and spec.symmetric
        return is_per_row and spec.activations == "int8"

    @property
    def is_calibrated(self) -> bool:
        """True if calibration batches are needed."""
        return self.method != "absmax" or self.is_auto
