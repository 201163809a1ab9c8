"""Splits PEFT's tensors of a fused layer (`c_attn`) into those of bmforge's separate layers."""

from __future__ import annotations

from torch import Tensor

from bmforge.errors import CheckpointError
from bmforge.tune.delta.attached import AttachedModule

__all__ = ["concatenate_rows", "interleave_rows", "split_fused"]

_LEAVES = {
    "A": "down",
    "B": "up",
    "embedding_A": "down",
    "embedding_B": "up",
    "B.bias": "bias",
    "magnitude_vector": "magnitude",
    "": "weight",
}


def split_fused(
    parts: list[AttachedModule | None],
    rows: list[int],
    leaf: str,
    tensor: Tensor,
    ranks: list[int] | None,
) -> dict[str, Tensor]:
    """Split a fused layer's adapter tensor; return a dict from bmforge's name to tensor.

    Args:
        parts: adapter modules of the fused layer's bmforge layers, in order; None for a layer
            without an adapter.
        rows: number of output features of each bmforge layer; [] if the layer is not fused.
        leaf: PEFT's name of the tensor.
        tensor: tensor of the whole fused layer.
        ranks: rank of each adapter module, if they were written as one block-diagonal LoRA.
    """
    if leaf not in _LEAVES:
        raise CheckpointError(
            f"the adapter has the unsupported tensor lora_{leaf}. Merge the adapter with PEFT, and "
            "load the merged model."
        )
    key = _LEAVES[leaf]
    tensor = tensor.flatten() if key == "weight" else tensor
    chunks = [tensor] * len(parts)
    if key == "down" and ranks is not None:
        chunks = list(tensor.split(ranks))
    elif key != "down" and rows and sum(rows) == tensor.shape[0]:
        chunks = list(tensor.split(rows))
        if key == "up" and ranks is not None:
            ends = [sum(ranks[: number + 1]) for number in range(len(ranks))]
            chunks = [p[:, e - r : e] for p, e, r in zip(chunks, ends, ranks, strict=True)]
    return {
        f"{attached.owner}.{attached.slot}.{key}": chunk
        for attached, chunk in zip(parts, chunks, strict=True)
        if attached is not None
    }


def concatenate_rows(leaf: str, tensor: Tensor, order: Tensor | None) -> Tensor:
    """Reorder an interleaved fused tensor so that each bmforge layer's rows are contiguous.

    Args:
        leaf: PEFT's name of the tensor.
        tensor: tensor as read from the file.
        order: order of the rows in the file, see `interleaved_order`; None if they are contiguous
            already.
    """
    if order is None or leaf == "A" or tensor.shape[0] != order.shape[0]:
        return tensor
    return tensor[order.argsort()]


def interleave_rows(name: str, tensor: Tensor, order: Tensor | None) -> Tensor:
    """Return a tensor of a fused layer with its rows in the order of the file.

    Args:
        name: PEFT's name of the tensor.
        tensor: tensor with contiguous rows of each bmforge layer.
        order: order of the rows in the file, see `interleaved_order`; if None, the tensor is
            returned unchanged.
    """
    if order is None or "lora_A" in name or tensor.shape[0] != order.shape[0]:
        return tensor
    return tensor[order]
