"""Chooses the sizes of the programs that multiply packed matrices."""

from __future__ import annotations

from typing import NamedTuple

from bmforge.nn.packing import QuantSpec

__all__ = ["Tile", "choose_tile", "up_to_power"]

# Wider groups than this do not fit into registers in one iteration.
_WIDEST_GROUP = 256


class Tile(NamedTuple):
    """Sizes of the programs of a product.

    Args:
        kind: "few", "tiles" or "wide"; see `multiply_matrices`.
        tokens: tokens per program.
        stages: stages of the pipelined loop.
        per_iteration: groups per iteration, or blocks if the kind is "wide".
        panels: panels (blocks of 16 rows) per program.
        warps: warps per program.
    """

    kind: str
    tokens: int
    stages: int
    per_iteration: int
    panels: int
    warps: int


def up_to_power(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def choose_tile(
    tokens: int, spec: QuantSpec, group: int, *, is_plain: bool, is_tiled: bool
) -> Tile:
    """Return the fastest measured sizes.

    Args:
        tokens: number of tokens.
        spec: quantization scheme.
        group: columns in a group.
        is_plain: the matrices have no minima.
        is_tiled: use tensor cores if the groups allow it.
    """
    at_once = 1 if tokens == 1 else 2 if tokens == 2 else 4
    blocks = group * spec.bits // 32
    if group != up_to_power(group) or group > _WIDEST_GROUP:
        return Tile("wide", at_once, 3, min(64, up_to_power(blocks)), 1, 4)
    if is_tiled and group >= 32:
        # Two panels share the loads of the activations: 1.2 times as fast on an H200.
        turn = max(8 if is_plain else 4, 256 // group)
        panels = 2 if spec.bits == 4 and group <= 64 else 1
        warps = 4 if turn * group <= 512 else 8
        return Tile("tiles", 16, 3 if group <= 64 else 2, turn, panels, warps)
    # One warp, and at most 256 words of a row per iteration: the fastest of 12 to 40 variants
    # for each of seven shapes on an H200. Several warps wait for each other.
    turn = min(32 if tokens == 1 else 16, max(8, 256 // blocks)) // (1 if is_plain else 2)
    return Tile("few", at_once, 3, turn, 1, 1)
