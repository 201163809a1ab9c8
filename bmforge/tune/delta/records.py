"""Checks an adapter's options, and orders the adapters in the model's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bmforge.errors import ConfigError, suggest
from bmforge.surgery import match_glob
from bmforge.tune.delta.address import excludes_of, known_names
from bmforge.tune.delta.attached import deltas_of

__all__ = ["check_patterns", "embedding_name", "order_changes_"]


# An adapter of these kinds, and a layer that is trained in full, would have the same saved name.
_ON_WEIGHTS = ("low_rank", "shift")


def check_patterns(delta: Any, names: Sequence[str]) -> None:
    """Check the modules of an adapter before it is attached.

    Raises:
        ConfigError: a pattern in `ranks`, `alphas` or `exclude` matches no module, or a module
            gets an adapter and is also trained in full.
    """
    # PEFT's `bias="all"` trains the biases of layers that have a LoRA adapter.
    is_low_rank = delta.kind == "low_rank"
    trained = [name.rpartition(".") for name in delta.fully_trained_parameters()]
    owners = {n for n, _, last in trained if not (is_low_rank and last == "bias")} & set(names)
    if owners and delta.kind in _ON_WEIGHTS:
        raise ConfigError(
            f"{min(owners)} would get an adapter and be trained in full (modules_to_save). Exclude "
            "the module from the adapter with exclude=[...], or from modules_to_save."
        )
    for option in ("ranks", "alphas"):
        for glob in delta.options.get(option) or {}:
            if not any(match_glob(name, glob) for name in names):
                raise ConfigError(
                    f"{option} has {glob!r}, which matches none of the modules to which the "
                    f"{type(delta).__name__} is attached.{suggest(glob, names)} Use a glob of "
                    "module names, such as '**.v_proj'."
                )
    names_in_model = known_names(delta.model)
    for pattern in delta.exclude:
        if not excludes_of(names_in_model, (pattern,)):
            raise ConfigError(
                f"exclude has {pattern!r}, which matches no module of this "
                f"{type(delta.model).__name__}.{suggest(pattern, names_in_model)} Remove "
                "the pattern."
            )


def order_changes_(model: Any, name: str) -> None:
    """Sort the adapters in the config into the order in which they apply.

    The order matters, since some adapters do not commute.
    """
    order = {delta_name: number for number, delta_name in enumerate(deltas_of(model))}
    order.setdefault(name, len(order))
    changes = list(model.config.changes)
    places = [n for n, change in enumerate(changes) if change.name in order]
    ordered = sorted((changes[n] for n in places), key=lambda change: order[change.name])
    for n, change in zip(places, ordered, strict=True):
        changes[n] = change
    model.config = model.config.replace(changes=tuple(changes))


def embedding_name(model: Any) -> str:
    """Return the name of a model's token embedding.

    Raises:
        ConfigError: the model has no token embedding.
    """
    table = getattr(model, "embed", None)
    if table is None and hasattr(model, "get_input_embeddings"):
        table = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is table]
    if table is None or not names:
        raise ConfigError(
            f"trainable_token_indices needs a token embedding, which {type(model).__name__} does "
            "not have. Pass a dict from layer names to token ids."
        )
    return names[0]
