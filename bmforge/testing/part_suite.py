"""Checks that an adapter module describes how its tensors are initialized and sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bmforge.nn.part import AdapterModule, Derived, tensor_notes
from bmforge.nn.random_init import init_from_note_
from bmforge.parallel.tensor.sharding import SHARD_DIMS

__all__ = ["check_part"]


def check_part(part: nn.Module) -> None:
    """Raise `AssertionError` unless every tensor of an adapter has a valid `nn.TensorNote`.

    Args:
        part: unsharded `nn.part.AdapterModule` or replacement layer, not on the meta device.
    """
    notes = tensor_notes(part)
    own: dict[str, Any] = dict(part.named_parameters(recurse=False))
    own |= dict(part.named_buffers(recurse=False))
    saved = {n for n in own if n not in part._non_persistent_buffers_set}
    plain = saved - set(notes)
    assert set(notes) <= saved, f"notes refer to missing tensors: {set(notes) - saved}"
    if isinstance(part, AdapterModule):
        assert not plain, f"tensors have no notes: {plain}"
        unknown = part.sharding_styles - set(SHARD_DIMS) - {""}
        assert not unknown, f"unknown sharding styles: {unknown}"
    for key, note in notes.items():
        tensor = own[key]
        assert set(note.shard_dims) <= set(SHARD_DIMS), f"{key} has unknown sharding styles"
        assert all(0 <= d < tensor.dim() for d in note.shard_dims.values()), (
            f"{key} lacks a sharded dim"
        )
        assert note.trains or not tensor.requires_grad, f"{key} is frozen but requires a gradient"
        assert not note.trains or tensor.is_floating_point(), (
            f"{key} is trained but is not floating-point"
        )
        if isinstance(note.initial, Derived):
            entries = -(-note.initial.shape[0] // note.initial.rows_each)
            assert entries == tensor.shape[0], f"{key} and its base have different numbers of rows"
        drawn = []
        for seed in (0, 0, 1):
            init_from_note_(tensor.data, f"part.{key}", note, 0.02, seed)
            drawn.append(tensor.detach().clone())
        assert torch.equal(drawn[0], drawn[1]), f"{key} differs with the same seed"
        is_random = not isinstance(note.initial, str)
        assert torch.equal(drawn[0], drawn[2]) != is_random, f"{key} ignores the seed"
