"""Guesses by a small model that writes ahead of a large one, which checks them in one step.

The small model's keys and values lie in pages with the numbers of the large one's, so that what is
shared, copied or given back there is so here. What it guesses changes how soon tokens come and
nothing else: a page in which it has nothing sound makes for worse guesses, not for other answers.

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
from bmforge.infer.engine.scheduler import Part, Sequence
from bmforge.infer.engine.speculate import GUESSED_LATER
from bmforge.infer.engine.workspace import find_workspace
from bmforge.memory.packed import packed_bytes
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.tokenizers import AutoTokenizer

__all__ = ["Draft", "check_draft", "open_draft"]


def open_draft(
    config: EngineConfig, budget_bytes: int | None, device: torch.device
) -> tuple[Any, Any, int]:
    """Return a small model, the tokens of its vocabulary, and what it takes of a budget.

    Args:
        config: which model, and for how many tokens.
        budget_bytes: of everything; None is no limit.
        device: where it computes.

    Returns:
        the model, None where there is none; token -> id, None where it has no tokenizer; bytes, 0
        without a budget

    Raises:
        ConfigError: it takes the whole budget.
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
    held = {id(tensor): tensor for tensor in (*draft.parameters(), *draft.buffers())}
    work = find_workspace(draft, config.max_rows, config.tokens_of(draft))
    size = sum(map(packed_bytes, held.values())) + work.cache_bytes + work.step_bytes
    if size >= budget_bytes:
        raise ConfigError(
            f"draft: the small model takes {size} bytes, and device_budget_bytes={budget_bytes} is "
            "the budget of both. Give more, or leave draft out."
        )
    return draft, tokens, size


def check_draft(model: Any, draft: Any, known: Any = None, drafts: Any = None) -> None:
    """Raise `ConfigError` where a small model cannot guess for a large one.

    Args:
        model: that checks.
        draft: that guesses.
        known: token -> id of the one, and
        drafts: of the other; None where that is not known.
    """
    sizes = model.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1] or (known is not None and drafts is not None and known != drafts):
        raise ConfigError(
            f"the draft's vocabulary of {sizes[1]} tokens is not that of the model, of {sizes[0]}: "
            "a draft guesses tokens of the model. Take a small model of the same family, or leave "
            "draft out."
        )
    for one, what in ((model, "model"), (draft, "draft")):
        if not can_pack(one):
            raise ConfigError(
                f"draft: the {what}, a {type(one).__name__}, does not write in steps that several "
                "requests share. Leave draft out."
            )


class Draft:
    """Fills in guesses, a token of all sequences in each of its steps.

    Args:
        model: the small one.
        total_pages: of the large one's keys and values.
    """

    def __init__(self, model: Any, total_pages: int) -> None:
        self._step = PackedStep(model, total_pages)
        self._known: dict[Sequence, int] = {}

    def look_again(self) -> None:
        """As `PackedStep`, of the small model."""
        self._step.look_again()

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page, as the large model's was."""
        self._step.cache.copy_page(source, target)

    def fill(self, parts: Several[Part]) -> list[Part]:
        """Return parts with guesses in the places that were kept for them."""
        self._step.cut()
        alive = {part.sequence for part in parts}
        self._known = {s: n for s, n in self._known.items() if s in alive or s.pages}
        guessed: dict[int, list[int]] = {}
        rows, tokens, wanted = [], [], []
        for number, part in enumerate(parts):
            later, sequence = GUESSED_LATER in part.guessed, part.sequence
            start = min(self._known.setdefault(sequence, part.start), part.start)
            end = part.end - len(part.guessed)
            if not later and part.is_last:
                self._known[sequence] = start
                continue  # it is caught up with when it guesses again
            rows.append(StepRow(sequence.pages, start, end))
            tokens.append(sequence.tokens[start:end])
            wanted.append(int(later))
            self._known[sequence] = end + max(0, len(part.guessed) - 1 if later else 0)
            if later:
                guessed[number] = []
        if not rows:
            return list(parts)
        scores = [s for s in self._step.run(rows, tokens, wanted) if len(s)]
        while True:
            for found, one in zip(self._open(parts, guessed), scores, strict=True):
                guessed[found].append(int(one[-1].argmax()))
            left = self._open(parts, guessed)
            if not left:
                break
            scores = self._write(parts, guessed, left)
        return [
            replace(part, guessed=tuple(guessed[number])) if number in guessed else part
            for number, part in enumerate(parts)
        ]

    def _open(self, parts: Several[Part], guessed: dict[int, list[int]]) -> list[int]:
        """Return the numbers of parts that want more guesses."""
        return [n for n, found in guessed.items() if len(found) < len(parts[n].guessed)]

    def _write(
        self, parts: Several[Part], guessed: dict[int, list[int]], left: Several[int]
    ) -> list[torch.Tensor]:
        """Return scores of what follows the last guess of some parts."""
        rows = []
        for number in left:
            part = parts[number]
            place = part.end - len(part.guessed) + len(guessed[number]) - 1
            rows.append(StepRow(part.sequence.pages, place, place + 1))
        tokens = [[guessed[number][-1]] for number in left]
        return self._step.run(rows, tokens, [1] * len(left))
