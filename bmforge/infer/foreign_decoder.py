"""Decoders for transformers models, with the model's own cache or without a cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from bmforge.infer.decoder import Decoder
from bmforge.models.transformers.calls import ForeignCache, wrap_encoded
from bmforge.models.transformers.model import TransformersModel

__all__ = ["ForeignDecoder", "ForeignSeq2SeqDecoder", "SeparateDecoder", "start_foreign"]


class ForeignDecoder(Decoder):
    """Decodes a batch of sequences with a transformers model.

    Args:
        model: model that computes the logits.
        mask: 1 for tokens, 0 for padding on the left; None if there is no padding.
        max_length: maximum length of a sequence in tokens, including the prompt.
        adapter_names: adapter name of each sequence; see `Decoder`.

    Shape:
        mask: (B, prompt length)
    """

    def __init__(
        self,
        model: TransformersModel,
        mask: Tensor | None,
        max_length: int,
        adapter_names: Sequence[str | None] | None = None,
    ) -> None:
        self.model, self.adapter_names = model, adapter_names  # type: ignore[assignment]
        self.cache = ForeignCache()  # type: ignore[assignment]
        behavior = model.behavior
        self._padding = behavior.padding
        self._caches = behavior.caches and (mask is None or self._padding in ("mask", "prompt"))
        self._caches = self._caches and model._pipeline is None
        # Cached keys keep the rotation of the shorter sequence that they were computed in.
        self._caches = self._caches and not _rotates_anew(model, max_length)
        self._mask: Tensor | None = None
        if mask is not None:
            self._mask = mask.new_ones(mask.shape[0], max_length)
            self._mask[:, : mask.shape[1]] = mask

    def run(self, tokens: Tensor) -> Tensor:
        """Run the model on the prompt or the last tokens; return the next token's logits.

        Shape:
            tokens: (B, T) -> (B, V) in fp32
        """
        if not self._caches:
            tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens), 1)
            self._tokens = tokens
        start = self.cache.length if self._caches else 0
        end, mask, positions = start + tokens.shape[1], None, None
        if self._mask is not None:
            mask = self._mask[:, :end]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        if start and self._padding == "prompt":
            mask = None
        out = self.model(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache if self._caches else None,
            logits_to_keep=1,
            **self._chosen(),
        )
        return out.logits[:, -1].float()

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i of the batch with a copy of the old sequence ``rows[i]``."""
        if self._caches:
            self.cache.reorder(rows)
        self._reorder_choice(rows)
        if self._tokens is not None:
            self._tokens = self._tokens.index_select(0, rows)
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)

    def copy(self) -> ForeignDecoder:
        """Return an independent copy of this decoder with the same sequences."""
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        return twin


def _rotates_anew(model: TransformersModel, length: int) -> bool:
    """Return True if rotary frequencies change before a sequence reaches this length.

    The frequencies of dynamic and longrope scaling change beyond the pretraining length.
    """
    text = model.foreign.config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    groups = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    for group in groups:
        if group.get("rope_type") in ("dynamic", "longrope"):
            limit = group.get("original_max_position_embeddings")
            limit = limit or getattr(text, "original_max_position_embeddings", None)
            limit = limit or getattr(text, "max_position_embeddings", None) or 0
            return length > int(limit)
    return False


class SeparateDecoder(Decoder):
    """Decoder for a model that does not support padding; each sequence runs alone.

    Args:
        model: model that computes the logits.
        mask: 1 for tokens, 0 for padding on the left.
        max_length: maximum length of a sequence in tokens, including the prompt.
        adapter_names: adapter name of each sequence; see `Decoder`.

    Shape:
        mask: (B, prompt length)
    """

    def __init__(
        self,
        model: TransformersModel,
        mask: Tensor,
        max_length: int,
        adapter_names: Sequence[str | None] | None = None,
    ) -> None:
        self.model, self.adapter_names = model, None  # type: ignore[assignment]
        self.cache = ForeignCache()  # type: ignore[assignment]
        names = adapter_names or [None] * mask.shape[0]
        self._rows = [
            ForeignDecoder(model, None, max_length, None if adapter_names is None else [name])
            for name in names
        ]
        self._padding: list[int] | None = (mask == 0).sum(1).tolist()

    def run(self, tokens: Tensor) -> Tensor:
        """Run the model on the prompt or the last tokens; return the next token's logits.

        Shape:
            tokens: (B, T) -> (B, V) in fp32
        """
        skipped = self._padding or [0] * len(self._rows)
        self._padding = None
        pairs = zip(self._rows, tokens, skipped, strict=True)
        return torch.cat([row.run(ids[None, first:]) for row, ids, first in pairs])

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i of the batch with a copy of the old sequence ``rows[i]``."""
        self._rows = [self._rows[row].copy() for row in rows.tolist()]


class ForeignSeq2SeqDecoder(Decoder):
    """Decodes with a transformers encoder-decoder; the first run encodes the source, once."""

    def __init__(
        self,
        model: TransformersModel,
        source: Tensor,
        mask: Tensor | None,
        adapter_names: Sequence[str | None] | None = None,
    ) -> None:
        self.model, self.adapter_names = model, adapter_names  # type: ignore[assignment]
        self.cache = ForeignCache()  # type: ignore[assignment]
        self._caches = model.behavior.caches and model._pipeline is None
        if mask is not None:  # padding on the left would change the positions of the source
            order = (mask == 0).int().argsort(dim=1, stable=True)
            source, mask = source.gather(1, order), mask.gather(1, order)
        self._ids, self._mask, self._source = source, mask, None

    _source: Tensor | None

    def run(self, tokens: Tensor) -> Tensor:
        """Run the decoder on the start token or the last chosen tokens; return the next logits.

        Shape:
            tokens: (B, T) -> (B, V) in fp32
        """
        if not self._caches:
            tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens), 1)
            self._tokens = tokens
        encoded = None if self._source is None else wrap_encoded(self._source)
        out = self.model(
            self._ids if encoded is None else None,
            attention_mask=self._mask,
            decoder_input_ids=tokens,
            encoder_outputs=encoded,
            cache=self.cache if self._caches else None,
            logits_to_keep=1,
            **self._chosen(),
        )
        if self._caches:
            self._source = out.encoder_last_hidden_state
        return out.logits[:, -1].float()

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i of the batch with a copy of the old sequence ``rows[i]``."""
        if self._caches:
            self.cache.reorder(rows)
        self._reorder_choice(rows)
        self._ids = self._ids.index_select(0, rows)
        for name in ("_tokens", "_mask", "_source"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).index_select(0, rows))


def start_foreign(
    model: TransformersModel,
    mask: Tensor | None,
    max_length: int,
    adapter_names: Sequence[str | None] | None = None,
) -> Decoder:
    """Create the decoder of a transformers model; `SeparateDecoder` if padding is unsupported."""
    if mask is not None and not model.behavior.padding:
        return SeparateDecoder(model, mask, max_length, adapter_names)
    return ForeignDecoder(model, mask, max_length, adapter_names)
