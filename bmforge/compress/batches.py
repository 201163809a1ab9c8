"""Prepares calibration batches: model arguments on the model's device, without padding.

Padding tokens would distort the statistics that calibrated methods use. A padded batch is therefore
split into batches of equally long sequences without padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError

__all__ = ["check_batches", "prepare_batch", "prepare_batches"]

_IGNORED_LABEL = -100


def check_batches(batches: Sequence[Any] | None) -> Sequence[Any]:
    """Return the batches; raise an error if there are none or one is empty.

    Raises:
        ConfigError: the sequence is missing or empty, or a batch is empty.
    """
    if not batches:
        raise ConfigError(
            "the calibration data has no batches. Pass batches=[...], a few dozen model inputs "
            "that are typical of the model's use."
        )
    for number, batch in enumerate(batches):
        tensors = [batch] if isinstance(batch, Tensor) else list(batch.values())
        if not tensors or any(t.numel() == 0 for t in tensors if isinstance(t, Tensor)):
            raise ConfigError(f"calibration batch {number} is empty. Remove the batch.")
    return batches


def prepare_batch(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return a batch as keyword arguments of the model, on its device, with the KV cache off."""
    arguments = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    device = next(model.parameters()).device
    arguments = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in arguments.items()}
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        arguments["use_cache"] = False
    return arguments


def prepare_batches(model: nn.Module, batches: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return calibration batches as keyword arguments of the model, without padding.

    Args:
        model: model that consumes the batches.
        batches: keyword arguments of the model's forward, or only token ids. `attention_mask` marks
            the padding of the inputs; `decoder_attention_mask`, or trailing labels of -100, mark
            the padding of an encoder-decoder's targets.

    Raises:
        ConfigError: there are no batches, a batch is empty, or a mask has padding between tokens.
    """
    prepared = []
    for number, batch in enumerate(check_batches(batches)):
        prepared += _split_by_length(prepare_batch(model, batch), _has_decoder(model), number)
    if not prepared:
        raise ConfigError(
            "all calibration batches contain only padding. Pass batches of real texts."
        )
    return prepared


def _has_decoder(model: nn.Module) -> bool:
    """Return True for an encoder-decoder, whose labels and inputs differ in length."""
    traits, config = getattr(model, "traits", None), getattr(model, "config", None)
    return getattr(traits, "is_encoder_decoder", False) or bool(
        getattr(config, "is_encoder_decoder", False)
    )


def _split_by_length(batch: dict[str, Any], has_decoder: bool, number: int) -> list[dict[str, Any]]:
    """Split a batch into batches whose sequences have equal lengths and no padding."""
    keys = [key for key, value in batch.items() if isinstance(value, Tensor) and value.dim() > 1]
    target_keys = {key for key in keys if key.startswith("decoder_")}
    target_keys |= {"labels"} & set(keys) if has_decoder else set()
    source_mask, target_mask = _source_mask(batch), _target_mask(batch, has_decoder)
    masks = [mask for mask in (source_mask, target_mask) if mask is not None]
    if all(bool(mask.all()) for mask in masks):
        return [batch]
    groups: dict[tuple[int, ...], list[int]] = {}
    spans = [_find_spans(mask, number) for mask in masks]
    for row, of_row in enumerate(zip(*spans, strict=True)):
        if all(stop > start for start, stop in of_row):
            bounds = tuple(bound for span in of_row for bound in span)
            groups.setdefault(bounds, []).append(row)
    parts = []
    for bounds, rows in groups.items():
        pairs = [slice(*bounds[i : i + 2]) for i in range(0, len(bounds), 2)]
        source = pairs.pop(0) if source_mask is not None else None
        target = pairs.pop(0) if target_mask is not None else None
        widths = (None if m is None else m.shape for m in (source_mask, target_mask))
        source_shape, target_shape = widths
        part = dict(batch)
        for key in keys:
            is_target = key in target_keys
            span, shape = (target, target_shape) if is_target else (source, source_shape)
            value = batch[key][rows] if batch[key].shape[0] == masks[0].shape[0] else batch[key]
            if span is not None and batch[key].shape[:2] == shape:
                # transformers' losses call view(), which needs contiguous labels.
                value = value[:, span].contiguous()
            part[key] = value
        parts.append(part)
    return parts


def _source_mask(batch: Mapping[str, Any]) -> Tensor | None:
    """Return a bool mask of the input tokens, (B, T); None without a 2-D attention mask."""
    mask = batch.get("attention_mask")
    return mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _target_mask(batch: Mapping[str, Any], has_decoder: bool) -> Tensor | None:
    """Return a bool mask of an encoder-decoder's target tokens, (B, T); None if unknown."""
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask != 0
    if not has_decoder or not isinstance(labels, Tensor) or labels.dim() != 2:
        return None
    # Labels of -100 inside a sequence are real tokens without a loss, not padding.
    is_counted = labels != _IGNORED_LABEL
    return is_counted.flip(1).cumsum(1).flip(1) > 0


def _find_spans(mask: Tensor, number: int) -> list[tuple[int, int]]:
    """Return the range (start, stop) of each sequence's tokens; (0, 0) if it is all padding.

    Raises:
        ConfigError: a sequence has padding between tokens.
    """
    spans = []
    for row, is_real in enumerate(mask.cpu()):
        positions = torch.nonzero(is_real)[:, 0].tolist()
        start, stop = (positions[0], positions[-1] + 1) if positions else (0, 0)
        if stop - start != len(positions):
            raise ConfigError(
                f"calibration batch {number} has padding between the real tokens of sequence {row} "
                "(allowed: at the start or the end). Remove these tokens from input_ids and "
                "attention_mask."
            )
        spans.append((start, stop))
    return spans
