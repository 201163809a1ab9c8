"""Clusters of duplicate documents: a union-find whose root is the document to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.tokens import Hashes

__all__ = ["Clusters", "equal_groups", "join_group", "place_source", "rank_documents"]

_MOST_COMPARED = 128  # maximum number of comparisons per text within a group


class Clusters:
    """Union-find over the integers 0 to `size` - 1; the smallest integer of a set is its root."""

    def __init__(self, size: int) -> None:
        self._parent = np.arange(size, dtype=np.int64)

    def find(self, number: int) -> int:
        """Return the root of the set that contains a number."""
        parent = self._parent
        while (above := int(parent[number])) != number:
            parent[number] = parent[above]
            number = int(parent[number])
        return number

    def join(self, first: int, second: int) -> bool:
        """Merge two sets; return True if they were different."""
        first_root, other = self.find(first), self.find(second)
        self._parent[max(first_root, other)] = min(first_root, other)
        return first_root != other

    def members(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all numbers that are not roots, in ascending order, and their roots.

        Shape: both (M,)
        """
        numbers = np.flatnonzero(self._parent != np.arange(len(self._parent)))
        roots = np.fromiter((self.find(int(n)) for n in numbers), np.int64, len(numbers))
        return numbers, roots


def place_source(source: str, preferred: Sequence[str]) -> int:
    """Return the priority of a source: the index of the first preferred prefix that matches it.

    A source without a matching prefix gets ``len(preferred)``, the lowest priority.
    """
    places = (index for index, name in enumerate(preferred) if source.startswith(name))
    return next(places, len(preferred))


def rank_documents(
    sources: NDArray[np.int64],
    sizes: NDArray[np.int64],
    texts: NDArray[np.uint64],
    ids: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Return the rank of each document; of each cluster, the lowest-ranked document is kept.

    Args:
        sources: priorities from `place_source`; lower numbers rank first.
        sizes: lengths; among equal sources, longer texts rank first.
        texts: hashes of the texts, a tie-breaker that does not depend on positions.
        ids: hashes of the ids, a tie-breaker between exact duplicates.

    Shape: each (N,), ids (N, 2); returned (N,), a permutation of 0 to N - 1.
    """
    order = np.lexsort((ids[:, 1], ids[:, 0], texts, -sizes, sources))
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return ranks


def equal_groups(
    keys: Hashes, numbers: NDArray[np.int64], least: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group documents by equal keys; return the members of all groups of at least two documents.

    Args:
        keys: key of each document.
        numbers: number of each document.
        least: first number of the current corpus (earlier corpora are numbered before it); groups
            without a document of the current corpus are omitted.

    Shape: keys, numbers (N,); returned: the numbers of all members (M,), sorted within each group,
        and the sizes of the groups (G,).
    """
    if not len(keys):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort((numbers, keys))
    keys, numbers = keys[order], numbers[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    sizes = np.diff(np.append(starts, len(keys)))
    taken = (sizes > 1) & (numbers[starts + sizes - 1] >= least)
    return numbers[np.repeat(taken, sizes)], sizes[taken]


def join_group(
    clusters: Clusters, group: Iterable[int], similar: Callable[[int, int], bool] | None
) -> None:
    """Put the similar documents of a group of candidates into one cluster.

    A document is compared with at most 128 earlier documents of other clusters, beginning with the
    first document of each cluster, so that a group of many thousands of different texts takes
    linear time. If `similar` is None, the whole group becomes one cluster.
    """
    first: list[int] = []  # first document of each cluster
    others: list[int] = []
    for number in group:
        if similar is None:
            if first:
                clusters.join(first[0], number)
            first = first or [number]
            continue
        compared, joined = 0, False
        for other in (*first[:_MOST_COMPARED], *others[-_MOST_COMPARED:]):
            if clusters.find(other) == clusters.find(number):
                joined = True
            elif compared < _MOST_COMPARED:
                compared += 1
                if similar(other, number):
                    joined = clusters.join(other, number)
        (others if joined else first).append(number)
