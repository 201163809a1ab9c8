"""Weight-name maps: how a tensor of ours lies in a tensor of a published checkpoint.

A rule says where our parameter is: under which name, transposed or not, which rows of a fused
tensor, or which entry of a stacked one of ours. Read in one direction it loads any slice of our
parameter, in the other it saves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bmforge.shards import Box

__all__ = [
    "OWN_PREFIX",
    "WeightRule",
    "assemble_source",
    "PACKED_KEYS",
    "expand_rules",
    "group_by_source",
    "linear_rules",
]


@dataclass(frozen=True)
class WeightRule:
    """Our tensor `ours` is (a part of) their tensor `theirs`.

    `{i}` stands for the layer number; `{e}` in `theirs` for the expert, the first dim of ours.

    Args:
        ours: canonical name.
        theirs: published name.
        transpose: theirs is stored (in, out).
        part: (first row, all rows) of the fused tensor, in our orientation; None: it is all ours.
            In layers of other sizes than the usual the parts' own rows count, in the same order.
        index: theirs is this entry of our stacked tensor; `expand_rules` sets it.
        part_dim: what `part` counts, in our orientation: 0 rows, 1 columns.
    """

    ours: str
    theirs: str
    transpose: bool = False
    part: tuple[int, int] | None = None
    index: int | None = None
    part_dim: int = 0

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape `theirs` must have when our whole tensor has `shape`."""
        shape = shape if self.index is None else shape[1:]
        whole = list(shape)
        if self.part is not None:
            whole[self.part_dim] = self.part[1]
        return tuple(reversed(whole)) if self.transpose else tuple(whole)

    def source_slices(self, box: Box) -> tuple[slice, ...] | None:
        """Return where in `theirs` the box of our tensor lies; None where it has nothing of it."""
        slices = [slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
        if self.index is not None:
            stack = slices.pop(0)
            if not stack.start <= self.index < stack.stop:
                return None
        if self.part is not None:
            first, own = self.part[0], slices[self.part_dim]
            slices[self.part_dim] = slice(own.start + first, own.stop + first)
        return tuple(reversed(slices)) if self.transpose else tuple(slices)

    def target(self, local: Tensor, box: Box) -> Tensor:
        """Return the part of our local tensor (the box) that theirs fills."""
        return local if self.index is None else local[self.index - box.offsets[0]]

    def source_view(self, target: Tensor) -> Tensor:
        """Return a view of a piece of ours in their order of dims."""
        return target.t() if self.transpose else target

    @property
    def is_renaming(self) -> bool:
        """Whether theirs is ours under another name, whole and as it lies."""
        return not self.transpose and self.part is None and self.index is None

    def to_source(self, whole: Tensor) -> Tensor:
        """Return theirs, not yet transposed, of our whole tensor."""
        return whole if self.index is None else whole[self.index]


def linear_rules(
    pairs: Mapping[str, str], kinds: Iterable[str] = ("weight", "bias")
) -> list[WeightRule]:
    """Return rules for modules whose weights (and biases) differ in their names only."""
    return [WeightRule(f"{a}.{kind}", f"{b}.{kind}") for kind in kinds for a, b in pairs.items()]


# What stands before the names of tensors that no published checkpoint has.
OWN_PREFIX = "bmforge."
# Tensors of a packed weight: in files they stand beside the name that the weight would have.
PACKED_KEYS = frozenset({"packed", "scales", "minima", "outlier_columns", "outlier_weight"})


def expand_rules(
    rules: Iterable[WeightRule],
    shapes: Mapping[str, tuple[int, ...]],
    own: Collection[str] = (),
    expanded: Sequence[WeightRule] = (),
) -> list[WeightRule]:
    """Return the rules of the tensors in `shapes`, in their order, with numbers put in.

    Args:
        rules: of a family; those without a tensor are left out.
        shapes: our tensors' names and whole shapes.
        own: names of tensors that were changed, and what shares a published tensor with them:
            published checkpoints have no place for them, and files have them under our names,
            but for those of which `expanded` says more.
        expanded: rules with numbers put in already, of some of them.

    Raises:
        TypeError: a tensor that no rule names, which saving would lose.
    """
    patterns = [(_pattern_of(rule), rule) for rule in rules]
    kept = _expand_family(patterns, {n: s for n, s in shapes.items() if n not in own})
    kept += expanded
    ours = {rule.ours for rule in kept}
    alone = [WeightRule(n, _own_name(n, patterns)) for n in shapes if n not in ours]
    places = {name: place for place, name in enumerate(shapes)}
    return sorted([*kept, *alone], key=lambda rule: places[rule.ours])


def _pattern_of(rule: WeightRule) -> re.Pattern[str]:
    return re.compile(re.escape(rule.ours).replace(r"\{i\}", r"(\d+)"))


def _fill_numbers(theirs: str, match: re.Match[str]) -> str:
    for number in match.groups():
        theirs = theirs.replace("{i}", number)
    return theirs


def _own_name(name: str, patterns: Sequence[tuple[re.Pattern[str], WeightRule]]) -> str:
    """Return the name in files of a tensor that no published checkpoint has."""
    module, _, key = name.rpartition(".")
    if key in PACKED_KEYS:
        for pattern, rule in patterns:
            match = pattern.fullmatch(f"{module}.weight")
            is_whole = rule.part is None and "{e}" not in rule.theirs
            if match and is_whole and rule.theirs.endswith(".weight"):
                return _fill_numbers(rule.theirs, match).removesuffix("weight") + key
    return OWN_PREFIX + name


def _expand_family(
    patterns: list[tuple[re.Pattern[str], WeightRule]], shapes: Mapping[str, tuple[int, ...]]
) -> list[WeightRule]:
    """Return the family's rules of these tensors, but for those that do not fill a fused one."""
    fused: dict[tuple[str, str], list[int]] = {}
    out: list[WeightRule] = []
    for name, shape in shapes.items():
        found = [(match, rule) for pattern, rule in patterns if (match := pattern.fullmatch(name))]
        if not found:
            raise TypeError(f"no weight rule for {name}")
        for match, rule in found:
            theirs = _fill_numbers(rule.theirs, match)
            if rule.part is not None:
                fused.setdefault((rule.theirs, theirs), []).append(len(out))
            count = range(shape[0]) if "{e}" in theirs else (None,)
            out += [
                replace(rule, ours=name, theirs=theirs.replace("{e}", str(e)), index=e)
                for e in count
            ]
    members = Counter(rule.theirs for _, rule in patterns if rule.part is not None)
    broken = set()
    for (template, theirs), places in fused.items():
        if len(places) < members[template]:
            broken.add(theirs)
        elif "{i}" in template:
            _fit_parts_(out, places, shapes)
    return [rule for rule in out if rule.theirs not in broken]


def _fit_parts_(
    rules: list[WeightRule], places: list[int], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Give the parts of a layer's fused tensor, one behind the other, the rows that ours have."""
    total, first = sum(shapes[rules[place].ours][0] for place in places), 0
    for place in sorted(places, key=lambda place: (rules[place].part or (0, 0))[0]):
        rules[place] = replace(rules[place], part=(first, total))
        first += shapes[rules[place].ours][0]


def group_by_source(rules: Iterable[WeightRule]) -> dict[str, list[WeightRule]]:
    """Return their name -> the rules that read from it, in order of the rows."""
    groups: dict[str, list[WeightRule]] = {}
    for rule in rules:
        groups.setdefault(rule.theirs, []).append(rule)
    return {n: sorted(g, key=lambda r: r.part[0] if r.part else 0) for n, g in groups.items()}


def assemble_source(rules: list[WeightRule], whole: Callable[[str], Tensor]) -> Tensor:
    """Build their tensor from ours; `whole` returns our whole tensor by name."""
    parts = [rule.to_source(whole(rule.ours)) for rule in rules]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, rules[0].part_dim)
    return joined.t().contiguous() if rules[0].transpose else joined.contiguous()
