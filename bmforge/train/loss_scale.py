"""Loss scaling of fp16 runs: a fixed scale, or a dynamic one with hysteresis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bmforge.errors import ConfigError
from bmforge.train.precision import LossScaler
from bmforge.value_ranges import check_values

__all__ = ["LossScaleConfig", "PatientScaler", "build_scaler"]


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss-scaling settings for ``train.precision = "fp16"``; other precisions do not use them.

    Args:
        fixed: constant loss scale for the whole run (if None: dynamic loss scaling).
        init_scale: initial loss scale of dynamic loss scaling.
        growth_interval_steps: number of consecutive steps without an overflow after which the loss
            scale doubles.
        min_scale: lower bound of the dynamic loss scale.
        hysteresis: number of overflows that are needed to halve the loss scale for the first time
            after it has grown; each later overflow halves it again. With 1, every overflow halves
            it.
    """

    fixed: float | None = None
    init_scale: float = 2.0**16
    growth_interval_steps: int = 2000
    min_scale: float = 1.0
    hysteresis: int = 1

    def check(self, precision: str) -> None:
        """Raise `ConfigError` for values out of range or settings without effect."""
        if self != LossScaleConfig() and precision != "fp16":
            raise ConfigError(
                f"loss_scale has no effect with train.precision={precision!r}, because only "
                "fp16 uses loss scaling. Leave it out, or set train.precision='fp16'."
            )
        others = LossScaleConfig(fixed=self.fixed)
        if self.fixed is not None and self != others:
            raise ConfigError(
                f"loss_scale.fixed={self.fixed} makes the scale constant, so the other fields "
                "of loss_scale have no effect. Leave out the other fields, or fixed."
            )
        check_values(self, "loss_scale.")
        build_scaler(self)


class PatientScaler(LossScaler):
    """Loss scaler that tolerates some overflows before it lowers the scale.

    Args:
        config: loss-scale settings.

    Source: ``DynamicLossScaler`` of Megatron-LM and DeepSpeed (`delayed_shift`).
    """

    def __init__(self, config: LossScaleConfig) -> None:
        super().__init__(
            config.init_scale if config.fixed is None else config.fixed,
            config.growth_interval_steps,
            min_scale=config.min_scale if config.fixed is None else min(config.fixed, 1.0),
        )
        self._is_fixed = config.fixed is not None
        self._hysteresis = self._patience = config.hysteresis

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step; `overflow` must be the same on every process."""
        if self._is_fixed:
            return
        if overflow and self._patience > 1:
            self._patience -= 1
            self._sound_steps = 0
            return
        super().update(overflow)
        if not overflow and self._sound_steps == 0:  # the scale has just grown
            self._patience = self._hysteresis

    def state_dict(self) -> dict[str, float]:
        """Return the state as a dict of numbers."""
        return {**super().state_dict(), "patience": self._patience}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state returned by `state_dict`."""
        super().load_state_dict(state)
        self._patience = int(state.get("patience", self._hysteresis))


def build_scaler(config: LossScaleConfig) -> LossScaler:
    """Create the loss scaler of an fp16 run.

    Raises:
        ConfigError: a number is out of range.
    """
    return PatientScaler(config)
