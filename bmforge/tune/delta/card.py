"""Writes an adapter's model card: a README with base model, data, license and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bmforge import __version__
from bmforge.errors import ConfigError, suggest
from bmforge.tune.delta.attached import whole_model
from bmforge.tune.delta.base import AttachedDelta

__all__ = ["CARD_FIELDS", "write_card"]

CARD_FIELDS = ("base", "data", "license", "scores", "command")


def write_card(delta: AttachedDelta, facts: Mapping[str, Any]) -> str:
    """Return a model card in Markdown, with the YAML header that model hubs read.

    Args:
        delta: adapter that the card describes.
        facts: dict from a field of `CARD_FIELDS` to its value; the value of `scores` is a dict from
            name to number.

    Raises:
        ConfigError: `facts` has an unknown field.
    """
    for key in facts:
        if key not in CARD_FIELDS:
            raise ConfigError(
                f"unknown field of the model card: {key!r} (supported: "
                f"{', '.join(CARD_FIELDS)}).{suggest(key, CARD_FIELDS)}"
            )
    base = facts.get("base")
    head = ["---", *([f"base_model: {base}"] if base else []), "library_name: peft"]
    head += [f"license: {facts['license']}"] if facts.get("license") else []
    model = whole_model(delta.model)
    parts = [p for attached in delta.held for p in attached.part.parameters()]
    trained = sum(p.numel() for p in {id(p): p for p in parts}.values())
    trained += sum(p.numel() for p in delta.fully_trained_parameters().values())
    of_base = sum(p.numel() for n, p in model.named_parameters() if n not in set(delta.names()))
    share = 100 * trained / max(of_base, 1)
    options = ", ".join(f"{k}={v!r}" for k, v in delta.options.items() if v not in ({}, None))
    rows = {
        "type": f"{type(delta).__name__} ({options})" if options else type(delta).__name__,
        "base": base or type(delta.model).__name__,
        "data": facts.get("data"),
        "targets": _shorten(delta.places()),
        "trained parameters": f"{trained:,} ({share:.3f} % of the base's)",
        "scores": ", ".join(f"{k} {v}" for k, v in (facts.get("scores") or {}).items()) or None,
        "command": facts.get("command"),
        "made with": f"bmforge {__version__}, torch {torch.__version__}",
    }
    lines = [*head, "---", "", f"# {type(delta).__name__} for {rows['base']}", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items() if value]
    lines += ["", "Load it with `bmforge.tune.delta.load_delta(model, directory)`.", ""]
    return "\n".join(lines)


def _shorten(places: list[str]) -> str:
    """Return the distinct module names as text, with layer indices replaced by ``*``."""
    kinds = dict.fromkeys(
        ".".join("*" if part.isdigit() else part for part in name.split(".")) for name in places
    )
    return ", ".join(f"`{kind}`" for kind in kinds)
