"""Rules that map parameters to tensors in checkpoints.

A rule contains a parameter's name in checkpoints, and how it is stored there: transposed, as rows
of a fused tensor (concatenated or interleaved), or as one expert of a stacked parameter. The same
rule is used to load and to save any slice of the parameter.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

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

_T = TypeVar("_T")


@dataclass(frozen=True)
class WeightRule:
    """Rule that maps a parameter to a checkpoint tensor, `source`, or to a part of it.

    `{i}` is the layer index; `{e}` in `source` is the expert's index in the parameter's first dim.

    Args:
        parameter: parameter name in bmforge.
        source: tensor name in checkpoints.
        transpose: True if the checkpoint tensor has shape (in, out), or (E, in, out) for a stack.
        part: (first row, number of rows) in the fused tensor, in bmforge's orientation; None
            for the whole tensor. For resized layers the rows are recomputed, in the same order.
        index: expert index in the stacked tensor `parameter`; set by `expand_rules`.
        part_dim: dim that `part` slices, in bmforge's orientation: 0 for rows, 1 for columns (of a
            stack: 1 for rows).
        step: number of parts whose rows alternate in the fused tensor; `part` then contains the
            index of the first row and the total number of rows of all parts.
        groups: number of groups of rows in the fused tensor, each with rows of all parts, such as
            q, k and v of one head; all groups have the same number of rows of a part.
        rows: (first row, number of rows) of `parameter` that the rule maps; None for all. Set by
            `expand_rules`, which creates one rule for each group.
    """

    parameter: str
    source: str
    transpose: bool = False
    part: tuple[int, int] | None = None
    index: int | None = None
    part_dim: int = 0
    step: int = 1
    groups: int = 1
    rows: tuple[int, int] | None = None

    @staticmethod
    def interleaved_order(rules: Iterable[WeightRule]) -> Tensor | None:
        """Return the row order of a checkpoint tensor: indices into the concatenated parameters.

        Args:
            rules: expanded rules of one checkpoint tensor, in any order.

        Returns:
            (number of rows,) indices; None if the checkpoint tensor is the concatenation
        """
        ordered = sorted(rules, key=lambda rule: rule.part[0] if rule.part else 0)
        sizes: dict[str, int] = {}
        for rule in ordered:
            if rule.rows is None:
                return None
            sizes[rule.parameter] = max(sizes.get(rule.parameter, 0), sum(rule.rows))
        starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        ranges = (
            (starts[rule.parameter] + rule.rows[0], rule.rows[1]) for rule in ordered if rule.rows
        )
        return torch.cat([torch.arange(first, first + count) for first, count in ranges])

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the checkpoint tensor, given the shape of the full parameter."""
        shape = shape if self.index is None else shape[1:]
        full_shape = list(shape)
        if self.part is not None:
            full_shape[self.part_dim] = self.part[1]
        return tuple(self._published_order(full_shape))

    def source_slices(self, box: Box) -> tuple[slice, ...] | None:
        """Return the checkpoint tensor's slices for a region of the parameter; None if empty."""
        slices = [slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
        if self.index is not None:
            stack = slices.pop(0)
            if not stack.start <= self.index < stack.stop:
                return None
        if self.rows is not None:
            shared, first = self._shared_rows(box), self.rows[0]
            if shared.start >= shared.stop:
                return None
            slices[0] = slice(shared.start - first, shared.stop - first)
        if self.part is not None:
            first, own = self.part[0], slices[self.part_dim]
            end = first + (own.stop - 1) * self.step + 1
            step = self.step if self.step > 1 else None
            slices[self.part_dim] = slice(first + own.start * self.step, end, step)
        return tuple(self._published_order(slices))

    def _published_order(self, dims: list[_T]) -> list[_T]:
        """Reorder a list with one value per dim, such as a shape, as in the checkpoint."""
        return [*dims[:-2], *reversed(dims[-2:])] if self.transpose else dims

    def target(self, local: Tensor, box: Box) -> Tensor:
        """Return a view of the elements of a rank's shard (`local`) that are read from `source`."""
        if self.rows is not None:
            shared, first = self._shared_rows(box), box.offsets[0]
            return local[shared.start - first : shared.stop - first]
        return local if self.index is None else local[self.index - box.offsets[0]]

    def _shared_rows(self, box: Box) -> slice:
        """Return the rows of `parameter` that are both in the region `box` and in `rows`."""
        assert self.rows is not None
        first, end = box.offsets[0], box.offsets[0] + box.lengths[0]
        return slice(max(first, self.rows[0]), min(end, sum(self.rows)))

    def source_view(self, target: Tensor) -> Tensor:
        """Return a view of a parameter's slice with the dims in the checkpoint tensor's order."""
        return target.transpose(-1, -2) if self.transpose else target

    def stored_numel(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements in `source` that belong to a parameter of this shape."""
        if self.rows is not None:
            return math.prod((self.rows[1], *shape[1:]))
        return math.prod(shape if self.index is None else shape[1:])

    @property
    def is_renaming(self) -> bool:
        """True if the checkpoint tensor is the full parameter under another name."""
        return not self.transpose and self.part is None and self.index is None

    def to_source(self, tensor: Tensor) -> Tensor:
        """Return the part of the full parameter that `source` contains, before transposition."""
        if self.rows is not None:
            return tensor.narrow(0, *self.rows)
        return tensor if self.index is None else tensor[self.index]

    def join(self, parts: Sequence[Tensor], rules: Sequence[WeightRule]) -> Tensor:
        """Return the checkpoint tensor that consists of `parts`, given in row order.

        `self` is the first of their `rules`.
        """
        if self.step > 1:
            axis = self.part_dim + 1
            joined = _concatenate([part.unsqueeze(axis) for part in parts], axis)
            joined = joined.flatten(self.part_dim, axis)
        else:
            joined = parts[0] if len(parts) == 1 else _concatenate(parts, self.part_dim)
        return (joined.transpose(-1, -2) if self.transpose else joined).contiguous()


def _concatenate(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors of one dtype along `dim`; meta tensors only by their shapes.

    `torch.cat` of meta tensors imports torch._dynamo, which takes 5 s.
    """
    if not parts[0].is_meta:
        return torch.cat(tuple(parts), dim)
    sizes = list(parts[0].shape)
    sizes[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(sizes)


def linear_rules(
    pairs: Mapping[str, str], kinds: Iterable[str] = ("weight", "bias")
) -> list[WeightRule]:
    """Return `WeightRule`s that only rename the weights (and biases) of modules."""
    return [WeightRule(f"{a}.{kind}", f"{b}.{kind}") for kind in kinds for a, b in pairs.items()]


# Prefix of the file names of tensors that no published checkpoint contains.
OWN_PREFIX = "bmforge."
# Suffixes of a quantized weight's tensors, which replace "weight" in its published name.
PACKED_KEYS = frozenset({"packed", "scales", "minima", "outlier_columns", "outlier_weight"})


def expand_rules(
    rules: Iterable[WeightRule],
    shapes: Mapping[str, tuple[int, ...]],
    own: Collection[str] = (),
    expanded: Sequence[WeightRule] = (),
) -> list[WeightRule]:
    """Return one or more `WeightRule`s for each tensor in `shapes`, in the same order.

    Args:
        rules: `WeightRule`s of a family; rules without a matching tensor are skipped.
        shapes: mapping from parameter name to unsharded shape.
        own: names of changed tensors, and of tensors fused with them in published checkpoints,
            which are saved under bmforge's names, unless `expanded` has a rule for them.
        expanded: expanded `WeightRule`s for some of the tensors in `own`.

    Raises:
        TypeError: a tensor has no `WeightRule`, so that saving would lose it.
    """
    patterns = [(_pattern_of(rule), rule) for rule in rules]
    matched = _expand_family(patterns, {n: s for n, s in shapes.items() if n not in own})
    matched += expanded
    names = {rule.parameter for rule in matched}
    unmatched = [WeightRule(n, _own_name(n, patterns)) for n in shapes if n not in names]
    order = {name: index for index, name in enumerate(shapes)}
    return sorted([*matched, *unmatched], key=lambda rule: order[rule.parameter])


def _pattern_of(rule: WeightRule) -> re.Pattern[str]:
    return re.compile(re.escape(rule.parameter).replace(r"\{i\}", r"(\d+)"))


def _fill_numbers(published: str, match: re.Match[str]) -> str:
    for number in match.groups():
        published = published.replace("{i}", number)
    return published


def _own_name(name: str, patterns: Sequence[tuple[re.Pattern[str], WeightRule]]) -> str:
    """Return the saved name of a tensor that published checkpoints do not contain."""
    module, _, key = name.rpartition(".")
    if key in PACKED_KEYS:
        for pattern, rule in patterns:
            match = pattern.fullmatch(f"{module}.weight")
            is_whole = rule.part is None and "{e}" not in rule.source
            if match and is_whole and rule.source.endswith(".weight"):
                return _fill_numbers(rule.source, match).removesuffix("weight") + key
    return OWN_PREFIX + name


def _expand_family(
    patterns: list[tuple[re.Pattern[str], WeightRule]], shapes: Mapping[str, tuple[int, ...]]
) -> list[WeightRule]:
    """Expand the family's rules to the tensors in `shapes`; omit incomplete fused tensors."""
    fused: dict[tuple[str, str], list[int]] = {}
    out: list[WeightRule] = []
    for name, shape in shapes.items():
        matches = [(m, rule) for pattern, rule in patterns if (m := pattern.fullmatch(name))]
        if not matches:
            raise TypeError(f"no weight rule matches the tensor {name!r}.")
        for match, rule in matches:
            published = _fill_numbers(rule.source, match)
            if rule.part is not None:
                fused.setdefault((rule.source, published), []).append(len(out))
            count = range(shape[0]) if "{e}" in published else (None,)
            out += [
                replace(rule, parameter=name, source=published.replace("{e}", str(e)), index=e)
                for e in count
            ]
    members = Counter(rule.source for _, rule in patterns if rule.part is not None)
    broken = set()
    for (template, published), indices in fused.items():
        if len(indices) < members[template]:
            broken.add(published)
        elif "{i}" in template:
            _fit_parts_(out, indices, shapes)
    complete = [rule for rule in out if rule.source not in broken]
    return [piece for rule in complete for piece in _split_groups(rule, shapes[rule.parameter])]


def _fit_parts_(
    rules: list[WeightRule], indices: list[int], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Set each rule's row range (`part`) in a fused tensor from the shapes of the parameters.

    If a resized layer's rows do not divide evenly into groups, its parameters are concatenated.
    """
    dim = rules[indices[0]].part_dim
    rows = [shapes[rules[index].parameter][dim] for index in indices]
    groups = rules[indices[0]].groups
    groups = 1 if any(count % groups for count in rows) else groups
    total, first = sum(rows), 0
    for index in sorted(indices, key=lambda index: (rules[index].part or (0, 0))[0]):
        rules[index] = replace(rules[index], part=(first, total), groups=groups)
        first += 1 if rules[index].step > 1 else shapes[rules[index].parameter][dim]


def _split_groups(rule: WeightRule, shape: tuple[int, ...]) -> list[WeightRule]:
    """Split the rule of a parameter whose rows are interleaved with those of others by groups.

    An example is a tensor with q, k and v of the first head, then those of the second.

    Args:
        rule: rule whose `part` is (first row, number of rows of all parameters), as if the
            parameters were concatenated.
        shape: shape of the parameter.

    Returns:
        one rule for each group; [rule] if the parameter's rows are contiguous
    """
    if rule.groups == 1:
        return [rule]
    assert rule.part is not None
    (first, total), size = rule.part, shape[0] // rule.groups
    stride, inner = total // rule.groups, first // rule.groups
    return [
        replace(rule, groups=1, part=(group * stride + inner, total), rows=(group * size, size))
        for group in range(rule.groups)
    ]


def group_by_source(rules: Iterable[WeightRule]) -> dict[str, list[WeightRule]]:
    """Return a dict from each checkpoint tensor's name to its rules, sorted by their first row."""
    groups: dict[str, list[WeightRule]] = {}
    for rule in rules:
        groups.setdefault(rule.source, []).append(rule)
    return {n: sorted(g, key=lambda r: r.part[0] if r.part else 0) for n, g in groups.items()}


def assemble_source(rules: list[WeightRule], find_tensor: Callable[[str], Tensor]) -> Tensor:
    """Assemble a checkpoint tensor from parameters, which `find_tensor` returns by name."""
    whole = {name: find_tensor(name) for name in dict.fromkeys(rule.parameter for rule in rules)}
    return rules[0].join([rule.to_source(whole[rule.parameter]) for rule in rules], rules)
