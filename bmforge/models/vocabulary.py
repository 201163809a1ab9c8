"""Resizes the vocabulary: token embedding, output layer and all other tensors of that size.

The tensors are found by building the model twice on the meta device, with the old and with the new
`vocab_size`: tensors whose shapes differ are resized. Families therefore need no code for resizing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.models.init import SkipInit, init_tensor_
from bmforge.nn.part import adapters_of
from bmforge.records import find_parallel_record
from bmforge.shards import is_distributed, is_streamed
from bmforge.surgery import persistent_tensors

__all__ = ["resize_vocabulary_"]

_SIZES = ("num_embeddings", "out_features", "vocab_size")


def resize_vocabulary_(
    model: Any, new_num_tokens: int | None, pad_to_multiple_of: int | None, mean_resizing: bool
) -> None:
    """Resize a model's vocabulary in place; see `Model.resize_token_embeddings`.

    Raises:
        ConfigError: the model cannot be resized. The model is then unchanged.
    """
    config, kind = model.config, type(model).__name__
    old_size = config.vocab_size
    new_size = _padded(new_num_tokens, old_size, pad_to_multiple_of)
    if new_size == old_size:
        return
    _check_table(model, new_size)
    new_config = config.with_vocab_size(new_size)
    dtype = model.embed.weight.dtype
    with torch.device("meta"), SkipInit():
        old, new = (type(model).describe(c, dtype) for c in (config, new_config))
    axes = _resized_axes(old, new)
    tensors = persistent_tensors(model)
    for name, axis in axes.items():
        _check_tensor(model, name, tensors.get(name), axis, old_size, kind)
    resized = {
        id(tensors[name]): _resize(model, name, tensors[name], axis, new_size, mean_resizing)
        for name, axis in axes.items()
    }
    for module in list(model.modules()):
        for store in (module._parameters, module._buffers):
            for key, tensor in list(store.items()):
                if tensor is not None and id(tensor) in resized:
                    store[key] = resized[id(tensor)]
    _copy_sizes_(model, new)
    model.config = new_config


def _padded(size: int | None, old_size: int, multiple: int | None) -> int:
    """Return `size` (default: `old_size`), rounded up to a multiple of `multiple`."""
    size = old_size if size is None else size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"new_num_tokens={size!r} must be a positive integer.")
    if multiple is None:
        return size
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ConfigError(f"pad_to_multiple_of={multiple!r} must be a positive integer.")
    return -(-size // multiple) * multiple


def _check_table(model: Any, new_size: int) -> None:
    """Raise `ConfigError` if the model's token embedding cannot be resized."""
    table: Any = getattr(model, "embed", None)
    kind = type(model).__name__
    record = find_parallel_record(model)
    if record is not None and (record.layout is not None or record.streamers):
        raise ConfigError(
            f"{kind} is already parallelized or streamed. Call resize_token_embeddings before "
            "parallelize() and before streaming."
        )
    if not model.config.vocab_size or getattr(table, "weight", None) is None:
        raise ConfigError(
            f"{kind} has no unmodified token embedding, so its vocabulary cannot be resized. "
            "Resize it before other changes."
        )
    rows = table.num_embeddings
    if rows != model.config.vocab_size:
        raise ConfigError(
            f"{kind} has {rows} embedding rows, but vocab_size={model.config.vocab_size}. Resizing "
            "would change the ids of the additional rows, which come after the vocabulary. Train "
            "a soft prompt instead of new tokens."
        )
    if getattr(table, "prompt", None) is not None:
        raise ConfigError(
            "the token embedding has a soft prompt, whose ids come after the vocabulary. Detach "
            "the prompt, resize the vocabulary, and attach the prompt again."
        )
    padding = getattr(table, "padding_idx", None)
    if padding is not None and padding >= new_size:
        raise ConfigError(
            f"new_num_tokens={new_size} would remove the padding token {padding}. Keep at least "
            f"{padding + 1} tokens."
        )


def _resized_axes(old: nn.Module, new: nn.Module) -> dict[str, int]:
    """Return a dict from tensor name to the axis whose size differs between the models."""
    sizes = {name: tensor.shape for name, tensor in persistent_tensors(new).items()}
    axes: dict[str, int] = {}
    for name, tensor in persistent_tensors(old).items():
        pairs = list(zip(tensor.shape, sizes[name], strict=True))
        differing = [axis for axis, (before, after) in enumerate(pairs) if before != after]
        if len(differing) > 1:
            raise ConfigError(
                f"{name} depends on vocab_size in {len(differing)} dims, so the vocabulary of "
                "this model cannot be resized. Use a tokenizer without new tokens."
            )
        axes |= {name: differing[0]} if differing else {}
    return axes


def _check_tensor(
    model: Any, name: str, tensor: Tensor | None, axis: int, old_size: int, kind: str
) -> None:
    """Raise `ConfigError` if a tensor of vocabulary size cannot be resized."""
    owner = name.rpartition(".")[0]
    if tensor is None:
        raise ConfigError(
            f"{owner} of this {kind} is quantized or replaced. Call resize_token_embeddings before "
            "other changes."
        )
    if is_distributed(tensor) or is_streamed(tensor):
        raise ConfigError(
            f"{name} is already sharded or streamed. Call resize_token_embeddings before "
            "`parallelize`."
        )
    if tensor.shape[axis] != old_size:
        raise ConfigError(
            f"{name} has {tensor.shape[axis]} rows instead of vocab_size={old_size}, so its new "
            "rows would not match the ids of new tokens. The vocabulary of this model cannot be "
            "resized."
        )
    parts = [slot for slot, _ in adapters_of(model.get_submodule(owner))]
    merged = [n for n in model.__dict__.get("_base_weights", {}) if n.startswith(f"{owner}.")]
    if parts or merged:
        raise ConfigError(
            f"{owner} has an adapter ({', '.join(parts) or 'merged'}) with the old vocabulary "
            "size. Call resize_token_embeddings before attaching the adapter."
        )


@torch.no_grad()
def _resize(model: Any, name: str, tensor: Tensor, axis: int, size: int, mean: bool) -> Tensor:
    """Return a tensor with `size` entries along an axis; common entries are copied.

    New entries are the mean of the old ones or, if `mean` is False, initialized at random.
    """
    shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
    data = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    count = min(size, tensor.shape[axis])
    if not data.is_meta:
        if not mean:
            init_tensor_(model, data, name, 0)
        elif tensor.is_floating_point():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            data.copy_(tensor.to(wide).mean(axis, keepdim=True).expand(shape))
        else:
            data.zero_()
        data.narrow(axis, 0, count).copy_(tensor.narrow(axis, 0, count))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def _copy_sizes_(model: Any, new: nn.Module) -> None:
    """Copy vocabulary sizes that modules have as attributes from the new model to `model`."""
    for name, module in new.named_modules():
        target = model if not name else model.get_submodule(name)
        for key in _SIZES:
            if isinstance(size := getattr(module, key, None), int) and hasattr(target, key):
                setattr(target, key, size)
    foreign = getattr(model, "foreign", None)
    if foreign is None:
        return
    for part in {id(c): c for c in (foreign.config, foreign.config.get_text_config())}.values():
        if hasattr(part, "vocab_size"):
            part.vocab_size = new.embed.num_embeddings  # type: ignore[union-attr]
    if hasattr(foreign, "vocab_size"):
        foreign.vocab_size = new.embed.num_embeddings  # type: ignore[union-attr]
