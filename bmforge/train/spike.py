"""Skips steps with NaN or infinity and, optionally, steps with a loss spike.

The decision is a pure function of all-reduced losses and gradient norms, so all processes make the
same decision without another collective.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from bmforge.errors import BmforgeError, ConfigError
from bmforge.value_ranges import find_problem

__all__ = ["DivergenceError", "SpikeGuard"]


class DivergenceError(BmforgeError, RuntimeError):
    """Raised if too many consecutive steps are skipped: the run no longer trains."""


class SpikeGuard:
    """Decides for each step whether to skip it, and gives up after too many skipped steps.

    Args:
        spike_sigmas: skip if loss > mean + spike_sigmas * standard deviation of the last
            `window_steps` applied losses; if None (the default), only non-finite steps are skipped.
        window_steps: number of applied losses in the window; spikes are detected once it is full.
        max_consecutive_skips: number of consecutive skipped steps after which the run fails.
            The default is enough for a float16 loss scale to decrease from 2**16 to 1.
    """

    def __init__(
        self,
        spike_sigmas: float | None = None,
        window_steps: int = 128,
        max_consecutive_skips: int = 25,
    ) -> None:
        if problem := find_problem("train.spike_sigmas", spike_sigmas):
            raise ConfigError(problem)
        if window_steps < 2 or max_consecutive_skips < 1:
            raise ConfigError(
                f"window_steps={window_steps} must be at least 2 and "
                f"max_consecutive_skips={max_consecutive_skips} at least 1."
            )
        self.skipped_steps = 0
        self.consecutive_skips = 0
        self._spike_sigmas = spike_sigmas
        self._max_consecutive_skips = max_consecutive_skips
        self._window: deque[float] = deque(maxlen=window_steps)

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Return the reason to skip this step, or None if it may be applied.

        Args:
            loss: mean loss over the whole global batch, unscaled, the same on every process.
            grad_norm: norm of the whole gradient, unscaled, before clipping, the same on every
                process.

        Raises:
            DivergenceError: `max_consecutive_skips` steps in a row were skipped.
        """
        reason = self._reason(loss, grad_norm)
        if reason is None:
            self.consecutive_skips = 0
            self._window.append(loss)
            return None
        self.skipped_steps += 1
        self.consecutive_skips += 1
        if self.consecutive_skips >= self._max_consecutive_skips:
            raise DivergenceError(
                f"{self.consecutive_skips} steps in a row were skipped, the last one because of "
                f"{reason} (loss={loss}, grad_norm={grad_norm}). Skipped steps do not change the "
                "parameters. Continue from an earlier checkpoint with a lower learning rate, a "
                "longer warm-up or other data, or raise max_consecutive_skips."
            )
        return reason

    def _reason(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return "a non-finite loss"
        if not math.isfinite(grad_norm):
            return "a non-finite gradient"
        if self._spike_sigmas is None or len(self._window) < (self._window.maxlen or 0):
            return None
        mean = math.fsum(self._window) / len(self._window)
        variance = math.fsum((x - mean) ** 2 for x in self._window) / len(self._window)
        if loss > mean + self._spike_sigmas * math.sqrt(variance):
            return f"a loss spike above the recent mean of {mean:.4g}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of numbers and one list."""
        return {
            "skipped_steps": self.skipped_steps,
            "consecutive_skips": self.consecutive_skips,
            "window": list(self._window),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; a shorter window keeps the newest losses."""
        missing = {"skipped_steps", "consecutive_skips", "window"} - set(state)
        if missing:
            raise ConfigError(
                f"the state of the spike guard lacks {', '.join(sorted(missing))}. Pass a result "
                "of SpikeGuard.state_dict()."
            )
        self.skipped_steps = int(state["skipped_steps"])
        self.consecutive_skips = int(state["consecutive_skips"])
        self._window.clear()
        self._window.extend(float(loss) for loss in state["window"])
