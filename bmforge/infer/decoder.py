"""Runs a model over prompts once, then token by token: cache, mask and positions in step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bmforge.infer.cache import KVCache
from bmforge.models.causal_lm import CausalLM
from bmforge.models.seq2seq import Seq2Seq
from bmforge.models.stack import span_of
from bmforge.nn.adapter_selection import Selection
from bmforge.parallel import pipeline_of
from bmforge.records import Stack
from bmforge.tune.delta import select_adapters
from bmforge.tune.delta.selection import per_sample_selection

__all__ = ["Decoder", "Seq2SeqDecoder", "make_cache", "start_decoder"]


def make_cache(layers: Stack, max_length: int) -> KVCache:
    """Return a cache for the layers that are here: all, or those of a pipeline's stages."""
    total = span_of(layers).total
    from bmforge.infer.engine.native_step import NativeStep  # the engine's room needs this one

    places = [layer.attn.layer_index for layer in layers.values() if layer.attn is not None]
    cache = KVCache(total, max_length, max(places, default=None))
    cache.step = NativeStep()
    return cache


def start_decoder(
    model: CausalLM | Seq2Seq,
    input_ids: Tensor,
    mask: Tensor | None,
    max_new_tokens: int,
    adapter_names: Sequence[str | None] | None = None,
) -> tuple[Decoder, Tensor]:
    """Return a fresh decoder and the tokens to begin with.

    A decoder-only model goes on with the prompt; an encoder-decoder reads it and begins with its
    start token.

    Shape:
        input_ids, mask: (B, S); returns a decoder and (B, T)
    """
    if model.keeps_foreign_cache and model.traits.reads != "apart":
        from bmforge.infer.foreign_decoder import start_foreign  # its classes derive from these

        length = input_ids.shape[1] + max_new_tokens
        return start_foreign(model, mask, length, adapter_names), input_ids
    if model.traits.reads != "apart":
        length = input_ids.shape[1] + max_new_tokens
        return Decoder(model, mask, length, adapter_names), input_ids
    start = torch.full_like(input_ids[:, :1], model.config.decoder_start_token_id)
    return Seq2SeqDecoder(model, input_ids, mask, 1 + max_new_tokens, adapter_names), start


class Decoder:
    """A batch of rows in the middle of being continued.

    Args:
        model: gives the scores.
        mask: 1 for tokens, 0 for padding on the left; None when there is no padding.
        max_length: tokens in the longest row at the end.
        adapter_names: per row the name of an adapter, or None for the base model; None uses the
            adapters that are enabled on the model.

    Shape:
        mask: (B, prompt length)
    """

    model: CausalLM | Seq2Seq
    _tokens: Tensor | None = None
    _selection: Selection | None = None

    def __init__(
        self,
        model: CausalLM,
        mask: Tensor | None,
        max_length: int,
        adapter_names: Sequence[str | None] | None = None,
    ) -> None:
        self.model, self.adapter_names = model, adapter_names
        self.cache = make_cache(model.layers, max_length)
        self._mask: Tensor | None = None
        if mask is not None:
            self._mask = mask.new_ones(mask.shape[0], max_length)
            self._mask[:, : mask.shape[1]] = mask

    def run(self, tokens: Tensor) -> Tensor:
        """Feed the prompt, or the tokens chosen last, and return scores of the next token.

        Shape:
            tokens: (B, T) -> (B, V) in fp32
        """
        mask, positions = None, None
        start, end = self.cache.length, self.cache.length + tokens.shape[1]
        if self._mask is not None:
            mask = self._mask[:, :end]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        self._tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens), 1)
        found = self.model.row_positions(self._tokens, mask)  # type: ignore[union-attr]
        positions = positions if found is None else found[..., start:]
        out = self.model(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            logits_to_keep=1,
            **self._chosen(),
        )
        return out.logits[:, -1].float()

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return what nobody changes the model in, from one `run` to the next."""
        step = self.cache.step
        return nullcontext() if step is None else step.undisturbed()

    def _chosen(self) -> dict[str, Any]:
        """Return the model's argument `adapter_names`, if each sample has its own adapter."""
        if self.adapter_names is None:
            return {}
        if self._selection is None:  # the same for every token, until rows are reordered
            self._selection = per_sample_selection(self.model, self.adapter_names)
        return {"adapter_names": self._selection}

    def reorder(self, rows: Tensor) -> None:
        """Go on with the old rows `rows` (B' of them) as the new rows."""
        self.cache.reorder(rows)
        self._reorder_choice(rows)
        if self._tokens is not None:
            self._tokens = self._tokens.index_select(0, rows)
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)

    def _reorder_choice(self, rows: Tensor) -> None:
        if self.adapter_names is not None:
            self.adapter_names = [self.adapter_names[row] for row in rows.tolist()]
            self._selection = None

    def repeat(self, times: int, scores: Tensor) -> Tensor:
        """Go on with every row `times` times, as neighbours; `scores` are repeated likewise."""
        if times == 1:
            return scores
        rows = torch.arange(scores.shape[0], device=scores.device).repeat_interleave(times)
        self.reorder(rows)
        return scores.index_select(0, rows)


class Seq2SeqDecoder(Decoder):
    """The same for an encoder-decoder: the source is read once, at the start.

    Args:
        model: gives the scores.
        source: what the encoder reads.
        mask: 1 for tokens of the source, 0 for padding; None when there is no padding.
        max_length: tokens in the longest target at the end, the start token included.
        adapter_names: as of a `Decoder`.

    Shape:
        source, mask: (B, S)
    """

    model: Seq2Seq

    def __init__(
        self,
        model: Seq2Seq,
        source: Tensor,
        mask: Tensor | None,
        max_length: int,
        adapter_names: Sequence[str | None] | None = None,
    ) -> None:
        self.model, self.adapter_names = model, adapter_names
        self._mask = mask
        self._ids = source
        # The encoder's result is with some of a pipeline's stages only: they read it every time.
        self._is_pipelined = pipeline_of(model) is not None
        if not self._is_pipelined:
            assert model.decoder is not None
            self.cache = make_cache(model.decoder.layers, max_length)
            with nullcontext() if adapter_names is None else select_adapters(model, adapter_names):
                self._source = model.encode(source, mask)

    def run(self, tokens: Tensor) -> Tensor:
        """Feed the start token, or the tokens chosen last, and return scores of the next token."""
        if self._is_pipelined:
            return self._run_whole(tokens)
        # After the first call the cache has what the decoder needs of the source, in its rows.
        out = self.model(
            decoder_input_ids=tokens,
            encoder_outputs=self._source,
            attention_mask=self._mask,
            cache=self.cache,
            logits_to_keep=1,
            **self._chosen(),
        )
        return out.logits[:, -1].float()

    def undisturbed(self) -> AbstractContextManager[None]:
        """As `Decoder`; of a pipeline nothing is kept from one `run` to the next."""
        return nullcontext() if self._is_pipelined else super().undisturbed()

    def _run_whole(self, tokens: Tensor) -> Tensor:
        self._tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens), 1)
        out = self.model(
            input_ids=self._ids,
            attention_mask=self._mask,
            decoder_input_ids=self._tokens,
            logits_to_keep=1,
            **self._chosen(),
        )
        return out.logits[:, -1].float()

    def reorder(self, rows: Tensor) -> None:
        """As `Decoder`; rows stay with their source, which is the same for copies of a row."""
        if not self._is_pipelined:
            super().reorder(rows)
            return
        assert self._tokens is not None
        self._reorder_choice(rows)
        self._tokens, self._ids = (
            self._tokens.index_select(0, rows),
            self._ids.index_select(0, rows),
        )
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)
