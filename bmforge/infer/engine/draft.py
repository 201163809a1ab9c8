"""Speculative decoding: a draft model proposes tokens, the target model verifies them in one step.

The draft model's KV cache uses the same page indices as the target's, so that pages are shared,
copied and freed together. Draft tokens affect only the speed: a page without valid draft keys
lowers the acceptance rate but never changes an answer.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bmforge.errors import ConfigError, DataError
from bmforge.infer.engine.budget import EngineConfig
from bmforge.infer.engine.packed_step import PackedStep, can_pack
from bmforge.infer.engine.paged_cache import StepRow
from bmforge.infer.engine.scheduler import Sequence, SequenceChunk
from bmforge.infer.engine.speculate import DRAFT_PLACEHOLDER
from bmforge.memory.packed import packed_bytes
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.tokenizers import AutoTokenizer

__all__ = ["Draft", "check_draft", "open_draft"]


def open_draft(
    config: EngineConfig, budget_bytes: int | None, device: torch.device
) -> tuple[Any, Any, int]:
    """Load the draft model of an engine.

    Args:
        config: limits of the engine, including the draft model.
        budget_bytes: budget of the whole engine; None for no limit.
        device: compute device.

    Returns:
        draft model (None if there is none), its vocabulary (token to id; None without a tokenizer),
        and its size in bytes (0 without a budget)

    Raises:
        ConfigError: the draft model leaves no memory for the target model.
    """
    draft, tokens = config.requests.draft, None
    if draft is None:
        return None, None, 0
    if not isinstance(draft, nn.Module):
        directory = find_model(draft)
        draft = AutoModel.from_pretrained(directory, device=device).requires_grad_(False)
        with suppress(DataError):
            tokens = AutoTokenizer.from_pretrained(directory).get_vocab()
    draft = draft.eval()
    if budget_bytes is None:
        return draft, tokens, 0
    tensors = {id(tensor): tensor for tensor in (*draft.parameters(), *draft.buffers())}
    work = config.workspace_of(draft)
    size = sum(map(packed_bytes, tensors.values())) + work.cache_bytes + work.step_bytes
    if size >= budget_bytes:
        raise ConfigError(
            f"draft: the draft model needs {size} bytes, but device_budget_bytes={budget_bytes} "
            "must be enough for the draft model and the model together. Raise the budget, or "
            "leave draft out."
        )
    return draft, tokens, size


def check_draft(model: Any, draft: Any, vocabulary: Any = None, drafts: Any = None) -> None:
    """Raise `ConfigError` if the draft model does not fit the target model.

    Args:
        vocabulary: vocabulary of the target (token to id); None if unknown.
        drafts: vocabulary of the draft; None if unknown.
    """
    sizes = model.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1] or (
        vocabulary is not None and drafts is not None and vocabulary != drafts
    ):
        raise ConfigError(
            f"draft: the vocabularies of the draft model (vocab_size={sizes[1]}) and of the model "
            f"(vocab_size={sizes[0]}) differ. Use a draft model with the same tokenizer, or leave "
            "draft out."
        )
    for checked, what in ((model, "model"), (draft, "draft model")):
        if not can_pack(checked):
            raise ConfigError(
                "draft: speculative decoding needs batched requests, which the "
                f"{what} ({type(checked).__name__}) does not support. Leave draft out."
            )


class Draft:
    """Generates draft tokens, one per step for all sequences.

    Args:
        model: draft model.
        total_pages: number of pages of the target's KV cache.
    """

    def __init__(self, model: Any, total_pages: int) -> None:
        self._step = PackedStep(model, total_pages)
        self._known: dict[Sequence, int] = {}

    def check_for_changes(self) -> None:
        """Request that the next step checks whether the draft model has changed."""
        self._step.check_for_changes()

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of the draft's KV cache."""
        self._step.cache.copy_page(source, target)

    def fill(self, parts: Several[SequenceChunk]) -> list[SequenceChunk]:
        """Return the chunks with their placeholders replaced by draft tokens."""
        self._step.cut()
        alive = {part.sequence for part in parts}
        self._known = {s: n for s, n in self._known.items() if s in alive or s.pages}
        guessed: dict[int, list[int]] = {}
        rows, tokens, last_counts = [], [], []
        for number, part in enumerate(parts):
            later, sequence = DRAFT_PLACEHOLDER in part.guessed, part.sequence
            start = min(self._known.setdefault(sequence, part.start), part.start)
            end = part.end - len(part.guessed)
            if not later and part.is_last:
                self._known[sequence] = start
                continue  # its draft keys are computed with its next draft tokens
            rows.append(StepRow(sequence.pages, start, end))
            tokens.append(sequence.tokens[start:end])
            last_counts.append(int(later))
            self._known[sequence] = end + max(0, len(part.guessed) - 1 if later else 0)
            if later:
                guessed[number] = []
        if not rows:
            return list(parts)
        scores = [s for s in self._step.run(rows, tokens, last_counts) if len(s)]
        while True:
            for index, logits in zip(self._open(parts, guessed), scores, strict=True):
                guessed[index].append(int(logits[-1].argmax()))
            left = self._open(parts, guessed)
            if not left:
                break
            scores = self._write(parts, guessed, left)
        return [
            replace(part, guessed=tuple(guessed[number])) if number in guessed else part
            for number, part in enumerate(parts)
        ]

    def _open(self, parts: Several[SequenceChunk], guessed: dict[int, list[int]]) -> list[int]:
        """Return the indices of the chunks whose draft tokens are not complete yet."""
        return [n for n, tokens in guessed.items() if len(tokens) < len(parts[n].guessed)]

    def _write(
        self, parts: Several[SequenceChunk], guessed: dict[int, list[int]], left: Several[int]
    ) -> list[torch.Tensor]:
        """Run the draft model one step for the chunks with indices `left`; return their logits."""
        rows = []
        for number in left:
            part = parts[number]
            position = part.end - len(part.guessed) + len(guessed[number]) - 1
            rows.append(StepRow(part.sequence.pages, position, position + 1))
        tokens = [[guessed[number][-1]] for number in left]
        return self._step.run(rows, tokens, [1] * len(left))
