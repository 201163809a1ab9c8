"""Estimates the memory of a model's KV cache and largest step before it is allocated.

The model runs on the meta device, which computes nothing, while the lifetime of every storage is
tracked. Attention is replaced by the fused kernel's allocations, without score matrices.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bmforge.balance import leave_out_balance
from bmforge.infer.decoder_factory import start_decoder
from bmforge.models.base import Model
from bmforge.records import units_of
from bmforge.surgery import copy_to_meta, eval_mode

__all__ = ["Workspace", "find_workspace", "largest_call", "largest_runs"]

# Memory of sampling per logit: sorted values (fp32), indices (int64) and masks.
_BYTES_PER_SCORE = 40
# Memory of the log-probabilities of prompt tokens per logit: logits and log-probabilities in fp32.
_BYTES_PER_PROMPT_SCORE = 8
# Factor for activations of a module that does not run on the meta device: see `_guess`.
_COPIES = 2


@dataclass(frozen=True)
class Workspace:
    """Memory that a model needs in addition to its weights.

    Args:
        cache_bytes: KV cache of the given number of sequences of maximum length.
        step_bytes: peak of all other tensors in the largest step.
    """

    cache_bytes: int
    step_bytes: int


def find_workspace(
    model: nn.Module, rows: int, tokens: int, chunk_tokens: int | None = None
) -> Workspace:
    """Return the memory in bytes that a model needs in addition to its weights.

    Args:
        model: model on any device; a copy on the meta device is run.
        rows: maximum number of sequences.
        tokens: maximum sequence length in tokens, including new tokens.
        chunk_tokens: maximum number of tokens in a step of batched requests, if prompts are
            computed in chunks; None if all sequences are computed in one call.
    """
    described = copy_to_meta(model)
    call_rows = largest_call(rows, tokens, chunk_tokens)
    if not isinstance(described, Model) or not described.traces_memory:
        work = _guess(described, call_rows, tokens)
        return Workspace(work.cache_bytes * rows // call_rows, work.step_bytes)
    with eval_mode(described), torch.no_grad():
        runs = [_follow(described, run, call_rows, tokens) for run in largest_runs(described)]
    cache = max(need.cache_bytes for need in runs)
    step = max(need.cache_bytes + need.step_bytes for need in runs) - cache
    score_bytes = max(rows * _BYTES_PER_SCORE, (chunk_tokens or 0) * _BYTES_PER_PROMPT_SCORE)
    scores = described.config.vocab_size * score_bytes * described.traits.can_generate
    return Workspace(cache * rows // call_rows, max(step, scores))


def largest_call(rows: int, tokens: int, chunk_tokens: int | None) -> int:
    """Return the maximum batch size of a call; the arguments are those of `find_workspace`."""
    return rows if chunk_tokens is None else min(rows, -(-chunk_tokens // tokens))


_Run = Callable[[Any, Tensor], int]


def largest_runs(model: Model) -> list[_Run]:
    """Return the functions that run the largest calls of a model, depending on its head.

    Each function returns the size of the KV cache in bytes.

    Args:
        model: model on the meta device or with fake tensors.

    Returns:
        functions that take the model and token ids (B, T); only the shape of the ids matters
    """
    if model.traits.has_images:
        return [_look]
    runs: list[_Run] = [_generate, _score] if model.traits.can_generate else [_read]
    return runs


def _generate(model: Any, ids: Tensor) -> int:
    """Run a prompt and one new token or, with an encoder, a source and target of equal length."""
    new_tokens = ids.shape[1] - 1 if model.traits.is_encoder_decoder else 1
    decoder, start = start_decoder(model, ids[:, :-1], None, new_tokens)
    decoder.run(start)
    decoder.run(start[:, -1:])
    return decoder.cache.size_bytes


def _score(model: Any, ids: Tensor) -> int:
    with leave_out_balance(model):
        model(input_ids=ids, labels=ids)
    return 0


def _read(model: Any, ids: Tensor) -> int:
    """Run an encoder with a padding mask."""
    mask = torch.ones_like(ids)
    if hasattr(model, "encode"):
        model.encode(ids, mask)
    model(input_ids=ids, attention_mask=mask)
    return 0


def _look(model: Any, ids: Tensor) -> int:
    config = model.config
    size = config.image_size
    height, width = size if isinstance(size, tuple) else (size, size)
    pixels = torch.empty(
        ids.shape[0], config.num_channels, height, width,
        device=ids.device, dtype=next(model.parameters()).dtype,
    )  # fmt: skip
    model(pixel_values=pixels)
    return 0


def _follow(model: Model, run: _Run, rows: int, tokens: int) -> Workspace:
    follower = _PeakTracker(model.state_dict(keep_vars=True).values())
    ids = torch.zeros(rows, max(2, tokens), dtype=torch.int64, device="meta")
    with _FusedAttention(), follower:
        cache = run(model, ids)
    return Workspace(cache, follower.peak_bytes - cache)


class _PeakTracker(TorchDispatchMode):
    """Dispatch mode that tracks the total size of live storages.

    Args:
        tensors: tensors whose storages are not counted.

    Attributes:
        peak_bytes: peak size of live storages.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._held = [tensor.untyped_storage() for tensor in tensors]
        self._alive: dict[int, tuple[Any, int]] = {s._cdata: (s, 0) for s in self._held}
        self._now = self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and record the storages of its outputs."""
        out = func(*args, **(kwargs or {}))
        self._note(out)
        return out

    def _note(self, out: Any) -> None:
        if isinstance(out, (list, tuple)):
            for item in out:
                self._note(item)
        elif isinstance(out, Tensor):
            storage = out.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._alive:
                ended = weakref.ref(storage, lambda _: self._forget(key))
                self._alive[key] = ended, size
                self._now += size
                self.peak_bytes = max(self.peak_bytes, self._now)

    def _forget(self, key: int) -> None:
        _, size = self._alive.pop(key)
        self._now -= size


class _FusedAttention(TorchFunctionMode):
    """Replaces attention with the allocations of the fused kernel, which stores no scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; for attention, only allocate the buffers of the fused kernel."""
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        mask = kwargs.get("attn_mask")
        widened = [] if mask is None else [torch.empty_like(mask, dtype=query.dtype)]
        if key.shape[1] != query.shape[1]:  # grouped-query attention expands keys and values
            shape = (*query.shape[:2], key.shape[2])
            widened += [key.new_empty(*shape, t.shape[-1]) for t in (key, value)]
        return out


def _guess(model: nn.Module, rows: int, tokens: int) -> Workspace:
    """Return an upper estimate for a module that cannot run on the meta device.

    The activations are estimated as `_COPIES` times the outputs of all matrices in the largest
    block, plus the output of the largest matrix outside of blocks. The KV cache is estimated as two
    tensors of the hidden size per block.
    """
    blocks = [unit.module for unit in units_of(model) if unit.is_block]
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside and p.dim() > 1]
    width = max((max(p.element_size(), 4) for p in model.parameters()), default=4)
    products = [sum(max(p.shape) for p in b.parameters() if p.dim() > 1) for b in blocks]
    rows_out = max((max(p.shape) for p in outside), default=0)
    hidden = max((min(p.shape) for p in outside), default=0)
    step = rows * tokens * width * (_COPIES * max(products, default=0) + rows_out)
    return Workspace(2 * len(blocks) * rows * tokens * hidden * width, step)
