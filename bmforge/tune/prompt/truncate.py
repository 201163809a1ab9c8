"""Truncates the parts of a prompt that may be shortened, to fit the maximum length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bmforge.errors import ConfigError

__all__ = ["CUTS", "Cut", "cut_parts"]

Cut = Literal["tail", "head", "balanced"]
CUTS = ("tail", "head", "balanced")


def cut_parts(
    parts: Sequence[tuple[list[int], bool]], room: int, cut: Cut, name: str
) -> list[list[int]]:
    """Truncate the shortenable parts of a prompt to fit into `room` tokens; return all parts.

    Args:
        parts: (ids, flag) of every part; the flag is True if the part may be truncated.
        room: maximum number of tokens of all parts together.
        cut: "tail" removes tokens from the end, starting with the last part; "head" removes them
            from the beginning, starting with the first part; "balanced" removes them from the end
            of every part, in proportion to its length.
        name: name of the example, used in messages.

    Raises:
        ConfigError: `cut` is unknown, or the parts that may not be truncated are longer than
            `room`.
    """
    if cut not in CUTS:
        raise ConfigError(f"unknown method: cut={cut!r} (supported: {', '.join(CUTS)}).")
    lengths = [len(ids) if shortenable else 0 for ids, shortenable in parts]
    excess = sum(len(ids) for ids, _ in parts) - room
    if excess > sum(lengths):
        fixed = sum(len(ids) for ids, _ in parts) - sum(lengths)
        raise ConfigError(
            f"{name} does not fit into max_seq_len: the parts that must not be truncated have "
            f"{fixed} tokens, but only {max(room, 0)} tokens are available. Increase "
            "max_seq_len, or allow more parts of the template to be shortened "
            '("shortenable": True).'
        )
    if excess <= 0:
        return [list(ids) for ids, _ in parts]
    if cut == "balanced":
        losses = _share(lengths, excess)
    else:
        losses = [0] * len(parts)
        order = range(len(parts)) if cut == "head" else reversed(range(len(parts)))
        for number in order:
            losses[number] = min(lengths[number], excess)
            excess -= losses[number]
    if cut == "head":
        return [ids[loss:] for (ids, _), loss in zip(parts, losses, strict=True)]
    return [ids[: len(ids) - loss] for (ids, _), loss in zip(parts, losses, strict=True)]


def _share(lengths: Sequence[int], excess: int) -> list[int]:
    """Return how many of `excess` tokens to remove from each part, in proportion to its length."""
    total, losses = sum(lengths), []
    for length in lengths:  # the part's share of the remaining excess, rounded up
        loss = 0 if not total else -(-excess * length // total)
        losses.append(loss)
        total, excess = total - length, excess - loss
    return losses
