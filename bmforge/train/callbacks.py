"""Saves and restores the states of a trainer's callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bmforge.errors import ConfigError

__all__ = ["load_callback_states", "read_callback_states"]


def read_callback_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return a dict from the name of each callback with a `state_dict` to its state.

    Raises:
        ConfigError: two callbacks with a state have the same name.
    """
    return {name: callback.state_dict() for name, callback in _stateful(callbacks).items()}


def load_callback_states(callbacks: Sequence[Any], states: dict[str, Any]) -> None:
    """Restore the callbacks' states.

    Args:
        callbacks: callbacks of the run, with or without a state.
        states: result of `read_callback_states`.

    Raises:
        ConfigError: the run was saved with other callbacks.
    """
    own = _stateful(callbacks)
    if set(own) != set(states):
        raise ConfigError(
            f"the run to resume had the callbacks {sorted(states) or 'none'}, but this run has "
            f"{sorted(own) or 'none'}. Pass the same callbacks to the Trainer."
        )
    for name, callback in own.items():
        callback.load_state_dict(states[name])


def _stateful(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the callbacks that have a state, as a dict from name to callback."""
    stateful = [c for c in callbacks if hasattr(c, "state_dict")]
    named = {getattr(c, "name", type(c).__name__): c for c in stateful}
    if len(named) < len(stateful):
        raise ConfigError(
            f"several callbacks have the same name (names: {', '.join(sorted(named))}). Give "
            "each callback another value of its attribute `name`."
        )
    return named
