"""Weight-name maps: how a tensor of ours lies in a tensor of a published checkpoint.

A rule says where our parameter is: under which name, transposed or not, and which rows of a fused
tensor. Read in one direction it loads any slice of our parameter, in the other it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bmforge.shards import Box

__all__ = ["WeightRule", "expand_rules", "group_by_source"]


@dataclass(frozen=True)
class WeightRule:
    """Our tensor `ours` is (a part of) their tensor `theirs`; `{i}` stands for the layer number.

    Args:
        ours: canonical name.
        theirs: published name.
        transpose: theirs is stored (in, out).
        part: (first row, all rows) of the fused tensor, in our orientation; None: it is all ours.
    """

    ours: str
    theirs: str
    transpose: bool = False
    part: tuple[int, int] | None = None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape `theirs` must have when our whole tensor has `shape`."""
        rows = (self.part[1] if self.part else shape[0], *shape[1:])
        return rows[::-1] if self.transpose else rows

    def source_slices(self, box: Box) -> tuple[slice, ...]:
        """Return where in `theirs` the box of our tensor lies."""
        first = self.part[0] if self.part else 0
        slices = [slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
        slices[0] = slice(slices[0].start + first, slices[0].stop + first)
        return tuple(reversed(slices)) if self.transpose else tuple(slices)

    def from_source(self, piece: Tensor) -> Tensor:
        """Turn a slice of theirs into a slice of ours."""
        return piece.t() if self.transpose else piece


def expand_rules(rules: Iterable[WeightRule], num_layers: int) -> list[WeightRule]:
    """Return the rules with `{i}` replaced by every layer number."""
    out = []
    for rule in rules:
        if "{i}" not in rule.ours:
            out.append(rule)
            continue
        for i in range(num_layers):
            ours, theirs = (n.replace("{i}", str(i)) for n in (rule.ours, rule.theirs))
            out.append(replace(rule, ours=ours, theirs=theirs))
    return out


def group_by_source(rules: Iterable[WeightRule]) -> dict[str, list[WeightRule]]:
    """Return their name -> the rules that read from it, in order of the rows."""
    groups: dict[str, list[WeightRule]] = {}
    for rule in rules:
        groups.setdefault(rule.theirs, []).append(rule)
    return {n: sorted(g, key=lambda r: r.part[0] if r.part else 0) for n, g in groups.items()}


def assemble_source(rules: list[WeightRule], whole: Callable[[str], Tensor]) -> Tensor:
    """Build their tensor from ours; `whole` returns our whole tensor by name."""
    parts = [whole(rule.ours) for rule in rules]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.t().contiguous() if rules[0].transpose else joined.contiguous()
