"""Loads and removes adapters of an engine's model while requests run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bmforge.models.file_fingerprint import fingerprint_of_files
from bmforge.tune.delta import list_deltas, load_delta, use_deltas

__all__ = ["load_adapter_", "remove_adapter_"]


def load_adapter_(
    engine: Any,
    directory: Path,
    name: str,
    *,
    allow_other_base: bool = False,
    base_directory: Path | None = None,
) -> None:
    """Attach a saved adapter between two steps of the engine, disabled until requests select it.

    Running sequences are recomputed from their tokens, so their answers do not change.

    Args:
        engine: engine that holds its whole model in memory.
        directory: directory of the adapter or of a run, as `load_delta` reads it.
        name: new name of the adapter in the model.
        allow_other_base: True to accept an adapter that was trained on a different base model.
        base_directory: directory of the engine's model. If the model is quantized, the directory
            is read to compare the base model; if None, a quantized base is not compared.

    Raises:
        CheckpointError: the directory has no adapter, or the adapter does not fit the model; the
            model is not changed.
        ConfigError: the adapter has an unknown type or setting.
    """

    def load() -> None:
        model = engine.model
        enabled = {key: delta.weight for key, delta in list_deltas(model).items() if delta.weight}
        reader = None
        if base_directory is not None:
            reader = partial(fingerprint_of_files, model, base_directory)
        load_delta(
            model,
            directory,
            name=name,
            allow_other_base=allow_other_base,
            base_fingerprint=reader,
            trainable=False,
        )
        use_deltas(model, list(enabled), enabled)
        engine.weights_changed()

    engine.call(load)


def remove_adapter_(engine: Any, name: str) -> None:
    """Detach an adapter between two steps of the engine, after the last request that uses it.

    Args:
        engine: engine of the model.
        name: name of the adapter in the model.
    """

    def remove() -> None:
        list_deltas(engine.model)[name].remove()
        engine.weights_changed()

    engine.call(remove)
