"""Rule for a stored tensor that holds a region of a parameter, with permuted dims if needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bmforge.models.weights import WeightRule
from bmforge.shards import Box

__all__ = ["BoxRule"]


@dataclass(frozen=True)
class BoxRule(WeightRule):
    """Rule for a stored tensor, or part of one, that is a region (box) of a permuted parameter.

    Args:
        box: one tuple (start, stop, step, True if the stored tensor has this dim) per dim of the
            parameter.
        order: permutation of dims: of the parameter dims that the stored tensor has, listed in
            their order, entry `order[d]` is dim d of the stored tensor.
        part: (offset of the region in the stored tensor, size of the stored tensor) along the
            stored dim `part_dim`; None if the region is the whole stored tensor. With `step`, the
            rows of the region are `step` apart in the stored tensor.
    """

    box: tuple[tuple[int, int, int, bool], ...] = ()
    order: tuple[int, ...] = ()

    def _own_shape(self) -> list[int]:
        sizes = [len(range(a, b, s)) for a, b, s, keeps in self.box if keeps]
        return [sizes[dim] for dim in self.order]

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor."""
        full_shape = self._own_shape()
        if self.part is not None:
            full_shape[self.part_dim] = self.part[1]
        return tuple(full_shape)

    def source_slices(self, box: Box) -> tuple[slice, ...] | None:
        """Return the stored tensor's slices for a region of the parameter; None if disjoint."""
        spans = []
        for dim in range(len(self.box)):
            first, last = self._overlap(dim, box)
            if first >= last:
                return None
            if self.box[dim][3]:
                spans.append(slice(first, last))
        slices = [spans[dim] for dim in self.order]
        if self.part is not None:
            own = slices[self.part_dim]
            slices[self.part_dim] = self._stored_slice(own.start, own.stop)
        return tuple(slices)

    def _stored_slice(self, start: int, stop: int) -> slice:
        """Return the slice of the stored dim `part_dim` for a range of the region's rows."""
        first = self.part[0] if self.part else 0
        end = first + (stop - 1) * self.step + 1
        return slice(first + start * self.step, end, self.step if self.step > 1 else None)

    def _overlap(self, dim: int, box: Box) -> tuple[int, int]:
        """Return the range of stored elements in the region `box` along parameter dim `dim`.

        The range is (start, stop), and empty (start >= stop) if the region contains none.
        """
        start, stop, step, _ = self.box[dim]
        low, high = box.offsets[dim], box.offsets[dim] + box.lengths[dim]
        first = max(0, -(-(low - start) // step))
        last = min(len(range(start, stop, step)), -(-(high - start) // step))
        return first, last

    def target(self, local: Tensor, box: Box) -> Tensor:
        """Return a view of the elements of a rank's shard that are read from the stored tensor."""
        index: list[Any] = []
        for dim, (start, _, step, keeps) in enumerate(self.box):
            first, last = self._overlap(dim, box)
            low = start + first * step - box.offsets[dim]
            index.append(slice(low, low + (last - first - 1) * step + 1, step) if keeps else low)
        return local[tuple(index)]

    def source_view(self, target: Tensor) -> Tensor:
        """Return a view of `target` with its dims in the stored tensor's order."""
        return target.permute(self.order)

    @property
    def is_renaming(self) -> bool:
        """Always False: the stored tensor differs from the parameter."""
        return False

    def to_source(self, tensor: Tensor) -> Tensor:
        """Return the stored tensor (or part of one), computed from the full parameter."""
        index = tuple(slice(a, b, s) if keeps else a for a, b, s, keeps in self.box)
        return tensor[index].permute(self.order)

    def stored_numel(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements in the stored tensor that belong to this parameter."""
        return math.prod(self._own_shape())

    def join(self, parts: Sequence[Tensor], rules: Sequence[WeightRule]) -> Tensor:
        """Assemble the stored tensor from the regions in `parts`; rows outside of them are 0."""
        if self.part is None:
            return parts[0].contiguous()
        shape = list(parts[0].shape)
        shape[self.part_dim] = self.part[1]
        out = parts[0].new_zeros(shape)
        for rule, part in zip(rules, parts, strict=True):
            assert isinstance(rule, BoxRule)
            index = [slice(None)] * out.dim()
            index[self.part_dim] = rule._stored_slice(0, part.shape[self.part_dim])
            out[tuple(index)] = part
        return out
