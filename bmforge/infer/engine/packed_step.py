"""One model step for tokens of many sequences, concatenated along the token dimension.

Results must not depend on the other sequences in the step. The C++ decoding step guarantees this
for every token; operations outside of the blocks use matrix products with a fixed summation order
or process one token at a time (norms). Torch's products change in the last bits with the batch
size, so if torch runs the blocks, each sequence is computed alone, in chunks of fixed size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmforge.device import is_host
from bmforge.infer.engine.native_step import NativeStep
from bmforge.infer.engine.paged_cache import PagedCache
from bmforge.infer.engine.pages import PAGE_TOKENS
from bmforge.infer.engine.scheduler import ChunkRules
from bmforge.infer.engine.step_graphs import StepGraphs, can_record
from bmforge.infer.engine.step_tables import FixedTables, StepRow, StepTables
from bmforge.models.stack import rope_tables, run_layers
from bmforge.nn import LMHead, RopeSpec
from bmforge.nn.adapter_selection import Selection, run_with_selection
from bmforge.nn.host_rows import FEWEST_VALUES
from bmforge.nn.norm import RMSNorm
from bmforge.nn.part import adapters_of
from bmforge.nn.position import invalidates_keys
from bmforge.nn.product_kernels import PLAIN_KINDS
from bmforge.nn.products import load_kernels
from bmforge.nn.quantized import QuantizedHead
from bmforge.nn.softcap import apply_softcap
from bmforge.records import find_parallel_record
from bmforge.surgery import wrappers_of
from bmforge.tune.delta.attached import deltas_of
from bmforge.tune.delta.selection import (
    DeltaNames,
    choosing_deltas,
    enabled_parts,
    per_token_selection,
)

__all__ = ["PackedStep", "can_pack", "can_batch_sequences"]

# Chunk size in tokens of one sequence that runs through torch.
_STRETCH = 4 * PAGE_TOKENS
_WHOLE = 1 << 40
# Rotary variants whose frequencies depend on the longest position in the call.
_BY_LONGEST = ("dynamic", "longrope")
# Products of at most this many tokens have the same bits as with one token, if activations are not
# quantized.
_FEW_TOKENS = 16


def can_pack(model: Any) -> bool:
    """Return True if the model supports sequences concatenated along the token dimension.

    Causal decoders that use bmforge's KV cache support it.
    """
    traits = model.traits
    is_causal_lm = (traits.attention, traits.objective) == ("causal", "next token")
    is_native = not model.keeps_foreign_cache
    return (
        is_causal_lm
        and traits.can_generate
        and is_native
        and traits.positions in ("learned", "rotary")
    )


def can_batch_sequences(model: Any) -> bool:
    """Return True if requests share torch's forward passes, with results equal up to rounding.

    Passes are shared if weights are streamed in every pass, and on accelerators, which need large
    batches.
    """
    streamers = getattr(find_parallel_record(model), "streamers", ())
    return bool(streamers) or not next(model.parameters()).is_cpu


class PackedStep:
    """Runs the model for the sequences of a step.

    If weights are streamed or the device is an accelerator, sequences share torch's forward passes,
    so their results may differ by rounding from those of separate passes.

    Args:
        model: model supported by `can_pack`; call `check_for_changes` after changing it.
        total_pages: number of pages of the KV cache.
        dtype: dtype of the KV cache; None means the model's.
    """

    def __init__(self, model: Any, total_pages: int, dtype: torch.dtype | None = None) -> None:
        self.model = model
        self._native = NativeStep(rests=True)
        weight = next(model.parameters())
        floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
        dtype = dtype or next(iter(floats), torch.float32)
        self.cache = PagedCache(total_pages, dtype, weight.device)
        self._shares_passes = can_batch_sequences(model)
        self._is_together = False
        self._graphs = StepGraphs(self._run_torch, weight.device)
        self._can_record: bool | None = None
        # Building these takes 3 ms per step for 8 adapters of 8 layers, and they rarely change
        # from one step to the next.
        self._adapters: list[tuple[Any, float]] = []
        self._shares: dict[DeltaNames, bool] = {}
        self._selection: tuple[Any, Selection] | None = None

    def check_for_changes(self) -> None:
        """Request that the next step checks for changed blocks, for example attached adapters."""
        self._native.check_for_changes()
        self._can_record = None
        self._forget_selection()

    def cut(self) -> ChunkRules:
        """Return the `ChunkRules`, which limit how sequences are divided into steps."""
        rope, has_local = self.model.spec.rope, self.model.spec.local_rope is not None
        by_longest = rope is not None and rope.kind in _BY_LONGEST
        is_native = not has_local and self._native.knows(self.model.layers)
        can_share = is_native or self._shares_passes
        self._is_together = can_share and not by_longest
        if by_longest:
            return ChunkRules(_WHOLE, shares=False, outdates=partial(self._outdates, rope))
        return ChunkRules() if self._is_together else ChunkRules(_STRETCH)

    def _outdates(self, rope: RopeSpec, before: int, after: int) -> bool:
        """Return True if keys are invalid when a sequence grows from `before` to `after` tokens."""
        shift = int(self.model.positions_behind_prefix(torch.zeros(1, dtype=torch.long))[0])
        return bool(before) and invalidates_keys(rope, before + shift, after + shift)

    @torch.no_grad()
    def run(
        self,
        rows: Sequence[StepRow],
        tokens: Sequence[Sequence[int]],
        num_scored: Sequence[int],
        deltas: Sequence[DeltaNames] | None = None,
    ) -> list[Tensor]:
        """Run the model on tokens of several sequences; return the logits of their last tokens.

        Args:
            rows: sequence and positions of the tokens.
            tokens: token ids of each sequence.
            num_scored: number of trailing tokens of each sequence whose logits are returned.
            deltas: adapter names of each sequence; None means the model's active adapters.

        Shape:
            returns a list with (num_scored, V) per sequence, in fp32
        """
        adapters = [(delta, float(delta.weight)) for delta in deltas_of(self.model).values()]
        if adapters != self._adapters:
            self._forget_selection()
            self._adapters = adapters
        row_inputs = list(zip(rows, tokens, num_scored, strict=True))
        names = [None] * len(row_inputs) if deltas is None else list(deltas)
        scores: dict[int, Tensor] = {}
        groups = self._divide(names)
        while groups:
            numbers = groups.pop()
            own = [names[number] for number in numbers]
            some = zip(*(row_inputs[number] for number in numbers), strict=True)
            with self._choosing(own, [len(tokens[number]) for number in numbers]):
                outputs = self._run_together(*some, native_only=len(set(own)) > 1)
            if outputs is None:
                groups += _group(numbers, own)
            else:
                scores.update(zip(numbers, outputs, strict=True))
        return [scores[number] for number in range(len(row_inputs))]

    def _divide(self, names: Sequence[DeltaNames]) -> list[list[int]]:
        """Group the step's sequences into forward passes.

        All sequences without adapters, or with LoRAs that the C++ decoding step supports, share one
        pass. Sequences with other adapters share a pass only if their adapters are the same.
        """
        if not self._is_together:
            return [[number] for number in range(len(names))]
        for name in set(names) - self._shares.keys():
            parts = enabled_parts(self.model, name)
            self._shares[name] = self._native.adapts(self.model.layers, parts)
        keys = [None if self._shares[name] else (name,) for name in names]
        return _group(range(len(names)), keys)

    def _choosing(
        self, names: Sequence[DeltaNames], counts: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Context manager: enable the adapters of the sequences of one forward pass."""
        if len(set(names)) == 1:
            return choosing_deltas(self.model, names[0])
        key = list(names), list(counts)
        if self._selection is None or self._selection[0] != key:
            self._selection = key, per_token_selection(self.model, names, counts)
        return run_with_selection(self._selection[1])

    def _forget_selection(self) -> None:
        """Discard the adapter selection that `run` cached in the previous step."""
        self._adapters, self._shares, self._selection = [], {}, None

    def _run_together(
        self,
        rows: Sequence[StepRow],
        tokens: Sequence[Sequence[int]],
        num_scored: Sequence[int],
        *,
        native_only: bool = False,
    ) -> list[Tensor] | None:
        """Run one forward pass over all rows.

        With ``native_only=True``, return None if the C++ decoding step does not support a block.
        """
        if self._can_record is None:
            self._can_record = can_record(self.model, self.cache.device)
        if self._can_record and set(num_scored) == {1}:
            logits = self._graphs.run(rows, tokens)
            if logits is not None:
                return list(logits.split(1))
        tables = StepTables(rows, tokens, num_scored)
        x, rope = self._embed(tables)
        out = None
        if "local_rope" not in rope:
            out = self._native.run_packed(self.model.layers, x, self.cache, rows, rope["rope"])
        if out is None and native_only:
            return None
        logits = self._run_torch(tables, x, rope) if out is None else self._score_of(out, tables)
        return list(logits.split(list(num_scored)))

    def _embed(self, tables: StepTables | FixedTables) -> tuple[Tensor, dict[str, Any]]:
        """Return the input of the first block, (1, T, D), and the rotary tables."""
        on_device = tables.at(self.cache.device)
        positions = self.model.positions_behind_prefix(on_device.positions[None])
        x = self._embed_tokens(on_device.ids[None], positions)
        return x, rope_tables(self.model.spec, positions, x.dtype)

    def _run_torch(
        self,
        tables: StepTables | FixedTables,
        x: Tensor | None = None,
        rope: dict[str, Any] | None = None,
    ) -> Tensor:
        """Run the blocks in torch; return the logits of the requested tokens, (M, V)."""
        if x is None or rope is None:
            x, rope = self._embed(tables)
        self.cache.rows, self.cache.tables = tables.rows, tables
        masks: dict[int | None, Tensor | None] = dict.fromkeys(self._windows())
        out = run_layers(self.model.layers, x, masks, False, cache=self.cache, **rope)[0]
        return self._score_of(out, tables)

    def _score_of(self, out: Tensor, tables: StepTables | FixedTables) -> Tensor:
        """Return the logits of the requested tokens: (1, T, D) -> (M, V) in fp32."""
        scored = tables.at(self.cache.device).scored.to(out.device)
        return self._score(out[0].index_select(0, scored))

    def _windows(self) -> set[int | None]:
        attentions = (layer.attn for layer in self.model.layers.values())
        return {attn.window for attn in attentions if attn is not None}

    def _embed_tokens(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first block; embedding projections run token by token."""
        if not self.model.spec.embed_size:
            return self.model.embed_tokens(ids, positions)
        pairs = zip(ids.split(1, 1), positions.split(1, 1), strict=True)
        return torch.cat([self.model.embed_tokens(*pair) for pair in pairs], 1)

    def _score(self, x: Tensor) -> Tensor:
        """Return the logits of the last block's output: (M, D) -> (M, V) in fp32."""
        if not len(x):
            return x.new_empty(0, self.model.lm_head.out_features, dtype=torch.float32)
        if not is_host(x.device):  # one read of the head's weight for all rows
            return self.model.lm_head(self.model.project_last(x[None])[0]).float()
        left = [self.model.project_last(some[None])[0] for some in x.split(_norm_rows(self.model))]
        return _score_rows(self.model.lm_head, torch.cat(left)).float()


def _group(numbers: Sequence[int], keys: Sequence[Hashable]) -> list[list[int]]:
    """Group the numbers by key; ``keys[i]`` is the key of ``numbers[i]``."""
    groups: dict[Hashable, list[int]] = {}
    for number, key in zip(numbers, keys, strict=True):
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _norm_rows(model: Any) -> int:
    """Return the number of hidden states whose final norm may be computed in one call.

    The result must be bit-identical to that of one state at a time. Norms process each row
    independently, but RMSNorm uses a kernel that rounds differently for large inputs. Projected or
    adapted states are normalized one by one, because products of several rows round differently.
    """
    norm = model.norm
    if model.spec.embed_size or type(norm) not in (RMSNorm, torch.nn.LayerNorm):
        return 1
    has_hooks = norm._forward_hooks or norm._forward_pre_hooks or wrappers_of(norm)
    if has_hooks or any(True for _ in adapters_of(norm)):
        return 1
    return max(1, (FEWEST_VALUES - 1) // model.config.hidden_size)


def _score_rows(head: LMHead, x: Tensor) -> Tensor:
    """Apply the head to hidden states; bit-identical to applying it to one state at a time.

    Shape:
        x: (M, D) -> (M, V)
    """
    if any(True for _ in adapters_of(head)) or head.vocab is not None or head._forward_hooks:
        return torch.cat([head(state[None]) for state in x])
    if type(head) is QuantizedHead:
        return torch.cat([head(some) for some in x.split(_FEW_TOKENS)])
    weight, kernels = head.weight, load_kernels()
    plain = type(head) is LMHead and type(weight) is torch.nn.Parameter and x.is_cpu
    if kernels is None or not plain or weight.dtype not in PLAIN_KINDS or not x.is_cpu:
        return torch.cat([head(state[None]) for state in x])
    out = kernels.multiply_rows(x.float().contiguous(), weight.contiguous())
    out = out if head.bias is None else out + head.bias.float()
    return apply_softcap(out, head.softcap).to(x.dtype)
