"""Decoders: run a model on prompts and then token by token, with cache, mask and positions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bmforge.infer.cache import KVCache
from bmforge.models.causal_lm import CausalLM
from bmforge.models.stack import span_of
from bmforge.nn.adapter_selection import Selection
from bmforge.nn.position import invalidates_keys
from bmforge.records import Stack, find_parallel_record
from bmforge.tune.delta import select_adapters
from bmforge.tune.delta.selection import per_sample_selection

if TYPE_CHECKING:
    from bmforge.models.seq2seq import Seq2Seq

__all__ = ["Decoder", "Seq2SeqDecoder", "make_cache"]


def make_cache(layers: Stack, max_length: int) -> KVCache:
    """Create a KV cache for the layers of this process (all, or those of its pipeline stages)."""
    total = span_of(layers).total
    from bmforge.infer.engine.native_step import NativeStep  # circular import

    places = [layer.attn.layer_index for layer in layers.values() if layer.attn is not None]
    cache = KVCache(total, max_length, max(places, default=None))
    cache.step = NativeStep()
    return cache


class Decoder:
    """Decodes a batch of sequences with a model, token by token.

    Args:
        model: model that computes the logits.
        mask: 1 for tokens, 0 for padding on the left; None if there is no padding.
        max_length: maximum length of a sequence in tokens, including the prompt.
        adapter_names: list with the adapter name of each sequence, or None for the base model;
            without a list, all sequences use the adapters that are enabled on the model.

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
        self.cache, self._max_length = make_cache(model.layers, max_length), max_length
        self._mask: Tensor | None = None
        if mask is not None:
            self._mask = mask.new_ones(mask.shape[0], max_length)
            self._mask[:, : mask.shape[1]] = mask

    def run(self, tokens: Tensor) -> Tensor:
        """Run the model on the prompt or the last tokens; return the next token's logits.

        Shape:
            tokens: (B, T) -> (B, V) in fp32
        """
        mask, positions = None, None
        start, end = self.cache.length, self.cache.length + tokens.shape[1]
        self._tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens), 1)
        if self._is_outdated(start, end):
            self.cache = make_cache(self.model.layers, self._max_length)  # type: ignore[union-attr]
            start, tokens = 0, self._tokens
        if self._mask is not None:
            mask = self._mask[:, :end]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        own_positions = self.model.row_positions(self._tokens, mask)  # type: ignore[union-attr]
        positions = positions if own_positions is None else own_positions[..., start:]
        out = self.model(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            logits_to_keep=1,
            **self._chosen(),
        )
        return out.logits[:, -1].float()

    def _is_outdated(self, start: int, end: int) -> bool:
        """Return True if the rotary angles of any cached keys change with the new length."""
        rope = getattr(self.model.spec, "rope", None)
        if rope is None or rope.kind not in ("dynamic", "longrope") or not start:
            return False
        lengths = [(start, end)]
        if self._mask is not None:
            before, after = (self._mask[:, :n].sum(1).tolist() for n in (start, end))
            lengths = list(zip(before, after, strict=True))
        zero = torch.zeros(1, 1, dtype=torch.long)
        shift = int(self.model.positions_behind_prefix(zero)[0, 0])  # type: ignore[union-attr]
        return any(invalidates_keys(rope, n + shift, m + shift) for n, m in lengths)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context manager for runs between which the model must not change.

        The C++ decoding step then checks for changes only once; see `NativeStep.undisturbed`.
        """
        step = self.cache.step
        return nullcontext() if step is None else step.undisturbed()

    def _chosen(self) -> dict[str, Any]:
        """Return the `adapter_names` argument of the model call; {} if none are selected."""
        if self.adapter_names is None:
            return {}
        if self._selection is None:  # the same for every token, until rows are reordered
            self._selection = per_sample_selection(self.model, self.adapter_names)
        return {"adapter_names": self._selection}

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i of the batch with a copy of the old sequence ``rows[i]``.

        The batch size may change.

        Shape:
            rows: (B',), integers
        """
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
        """Repeat every sequence `times` times, with adjacent copies; return the repeated logits."""
        if times == 1:
            return scores
        rows = torch.arange(scores.shape[0], device=scores.device).repeat_interleave(times)
        self.reorder(rows)
        return scores.index_select(0, rows)


class Seq2SeqDecoder(Decoder):
    """Decoder of an encoder-decoder; the source is encoded once, at the start.

    Args:
        model: model that computes the logits.
        source: token ids of the encoder's input.
        mask: 1 for tokens of the source, 0 for padding; None if there is no padding.
        max_length: maximum length of a target in tokens, including the start token.
        adapter_names: adapter name of each sequence; see `Decoder`.

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
        # Only some pipeline stages have the encoder's output, so the source is encoded every time.
        record = find_parallel_record(model)
        self._is_pipelined = record is not None and record.pipeline is not None
        if not self._is_pipelined:
            assert model.decoder is not None
            self.cache = make_cache(model.decoder.layers, max_length)
            with nullcontext() if adapter_names is None else select_adapters(model, adapter_names):
                self._source = model.encode(source, mask)

    def run(self, tokens: Tensor) -> Tensor:
        """Run the decoder on the start token or the last chosen tokens; return the next logits."""
        if self._is_pipelined:
            return self._run_whole(tokens)
        # After the first call the cache holds the cross-attention keys and values of every row.
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
        """Same as `Decoder.undisturbed`; no effect on a pipelined model, which has no KV cache."""
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
        """Same as `Decoder.reorder`; copies of a sequence share the encoded source."""
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
