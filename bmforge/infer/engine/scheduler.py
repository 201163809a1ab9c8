"""Scheduler for continuous batching: selects the tokens of each step.

Scheduling is first come, first served: earlier requests get tokens and pages first. If there are no
free pages, the newest sequence is preempted, waits at the front of the queue and is recomputed
later. The oldest sequence is never delayed by others, so every sequence completes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from bmforge.errors import ConfigError
from bmforge.infer.engine.pages import PAGE_TOKENS, Pages, pages_of
from bmforge.infer.engine.prefix import PrefixKeys, find_prefix, register_prefix
from bmforge.infer.engine.speculate import DraftSpeculator, NgramSpeculator

__all__ = ["ChunkRules", "SequenceChunk", "Scheduler", "Sequence"]


@dataclass(frozen=True)
class ChunkRules:
    """Rules for dividing a sequence into steps with bitwise equal results.

    Args:
        unit: chunk size of prompts in tokens; if it is set, generated tokens are computed one by
            one. None allows any division.
        shares: whether sequences share prefixes, whose lengths are multiples of `unit`.
        outdates: function (old length, new length) -> True if the keys that were computed at the
            old length are invalid; with it, sequences are never divided. None if keys stay valid.
    """

    unit: int | None = None
    shares: bool = True
    outdates: Callable[[int, int], bool] | None = None

    def most(self, sequence: Sequence) -> int:
        """Return the maximum number of a sequence's tokens that the next step may process."""
        left = len(sequence.tokens) - sequence.stored
        if self.unit is None or self.outdates is not None:
            return left
        if sequence.stored >= sequence.prompt_length:
            return 1
        in_prompt = sequence.prompt_length - sequence.stored
        return min(in_prompt, self.unit - sequence.stored % self.unit)

    def keeps(self, sequence: Sequence) -> int:
        """Return the number of leading tokens of a sequence that other sequences may share."""
        if not self.shares:
            return 0
        if self.unit is None:
            return sequence.stored
        reusable = min(sequence.stored, sequence.prompt_length)
        return reusable // self.unit * self.unit


@dataclass(eq=False)
class Sequence:
    """Prompt and generated tokens of one answer.

    Args:
        order: arrival order; lower is earlier.
        tokens: prompt tokens, followed by the generated tokens.
        keys: prefix cache keys of the pages.
        longest: maximum length in tokens, including the answer.
        lookup: speculator that proposes draft tokens; None without speculative decoding.
        scores_prompt: compute the logits of all prompt tokens, without using the prefix cache.

    Attributes:
        prompt_length: number of prompt tokens.
        stored: number of tokens with keys and values in `pages`.
        cached: number of prompt tokens found in the prefix cache at the first start.
    """

    order: tuple[int, int]
    tokens: list[int]
    keys: PrefixKeys
    longest: int
    lookup: NgramSpeculator | DraftSpeculator | None = None
    scores_prompt: bool = False
    prompt_length: int = 0
    stored: int = 0
    cached: int | None = None
    pages: list[int] = field(default_factory=list)
    registered: int = 0

    def __post_init__(self) -> None:
        """Record the prompt length."""
        self.prompt_length = len(self.tokens)

    def __lt__(self, other: Sequence) -> bool:
        """Compare by order of arrival."""
        return self.order < other.order


@dataclass(frozen=True)
class SequenceChunk:
    """Consecutive tokens of a sequence that one step computes.

    Args:
        sequence: sequence that the tokens belong to.
        start: position of the first token.
        end: position after the last token.
        guessed: draft tokens at the end, which are not yet in the sequence.
    """

    sequence: Sequence
    start: int
    end: int
    guessed: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the sequence's next token is chosen after this chunk."""
        return self.end - len(self.guessed) == len(self.sequence.tokens)

    @property
    def tokens(self) -> list[int]:
        """Token ids, including draft tokens."""
        tokens = self.sequence.tokens[self.start : self.end - len(self.guessed)]
        return [*tokens, *self.guessed]


class Scheduler:
    """Divides the tokens of each step, and the pages of the KV cache, among sequences.

    Args:
        pages: page allocator.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens in a step; a single chunk may be larger if
            `cut` requires it.
        cut: rules for dividing sequences.

    Attributes:
        running: sequences with allocated pages, oldest first.
        waiting: other sequences, oldest first.
    """

    def __init__(
        self,
        pages: Pages,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        cut: ChunkRules | None = None,
    ) -> None:
        self.pages, self.max_num_seqs, self.max_num_batched_tokens = (
            pages,
            max_num_seqs,
            max_num_batched_tokens,
        )
        self.cut = cut or ChunkRules()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._copies: dict[Sequence, tuple[int, int]] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ConfigError: the sequence does not fit into the KV cache.
        """
        self.check(sequence.longest)
        insort(self.waiting, sequence)

    def check(self, tokens: int) -> None:
        """Raise `ConfigError` if a sequence of this length does not fit into the KV cache."""
        if pages_of(tokens) > self.pages.count:
            raise ConfigError(
                f"the request needs {tokens} tokens (prompt and answer), but the KV cache has "
                f"{self.pages.count * PAGE_TOKENS}. Request fewer tokens, or create the engine "
                "with a larger RequestsConfig(total_tokens=)."
            )

    def fork(self, sequence: Sequence, order: tuple[int, int]) -> Sequence:
        """Return a copy of a sequence that shares its pages; the copy is queued if it must wait."""
        twin = Sequence(order, list(sequence.tokens), sequence.keys.copy(), sequence.longest)
        twin.lookup = None if sequence.lookup is None else sequence.lookup.fork()
        twin.prompt_length, twin.cached = sequence.prompt_length, sequence.cached
        # A sequence that was preempted has no pages to share; its copy is recomputed too.
        if sequence not in self.running or len(self.running) >= self.max_num_seqs:
            insort(self.waiting, twin)
            return twin
        twin.stored, twin.registered = sequence.stored, sequence.registered
        twin.pages = list(sequence.pages)
        for page in twin.pages:
            self.pages.share(page)
        insort(self.running, twin)
        return twin

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; its pages become free or remain in the prefix cache."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def preempt_all(self) -> None:
        """Preempt all sequences, so that their keys and values are recomputed."""
        for sequence in list(self.running):
            self._preempt(sequence)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Page copies (from, to) to perform, in this order, before the planned step."""
        return list(self._copies.values())

    def plan(self) -> list[SequenceChunk]:
        """Plan the next step: return its chunks, oldest first, or [] if there is no work.

        Generated tokens are planned before prompts, so that a long prompt does not delay other
        answers.
        """
        self._copies = {}
        if self.cut.outdates is not None:
            for sequence in list(self.running):
                if self.cut.outdates(sequence.stored, len(sequence.tokens)):
                    self._preempt(sequence)
        parts: list[SequenceChunk] = []
        room = self.max_num_batched_tokens
        for is_prompt in (False, True):
            for sequence in list(self.running):
                left = len(sequence.tokens) - sequence.stored
                # Planning an older sequence may have preempted this one.
                if sequence not in self.running or room < 1 or (left > 1) != is_prompt:
                    continue
                room -= self._plan_one(sequence, room, parts)
        for sequence in list(self.waiting):
            # Stop at the first sequence that cannot start: shorter ones behind it would take the
            # pages that it waits for.
            if room < 1 or len(self.running) >= self.max_num_seqs or not self._begin(sequence):
                break
            room -= self._plan_one(sequence, room, parts)
        return parts

    def finish(self, part: SequenceChunk) -> None:
        """Record that a chunk has been computed and its next token appended."""
        sequence = part.sequence
        # The newest token has no keys and values yet. Those of rejected draft tokens lie beyond it
        # and are overwritten by the next step.
        sequence.stored = min(part.end, len(sequence.tokens) - 1)
        full = self.cut.keeps(sequence) // PAGE_TOKENS
        new_pages = range(sequence.registered, full)
        register_prefix(self.pages, sequence.keys, sequence.tokens, sequence.pages, new_pages)
        sequence.registered = max(sequence.registered, full)

    def _plan_one(self, sequence: Sequence, room: int, parts: list[SequenceChunk]) -> int:
        """Add a chunk of a sequence if there are pages for it; return its number of tokens or 0."""
        most = self.cut.most(sequence)
        if self.cut.unit is None:
            most = min(most, room)
        end = sequence.stored + most
        if not self._give_pages(sequence, end, parts):
            return 0
        guessed = self._guess(sequence, end, room - most)
        parts.append(SequenceChunk(sequence, sequence.stored, end + len(guessed), guessed))
        return most + len(guessed)

    def _guess(self, sequence: Sequence, end: int, room: int) -> tuple[int, ...]:
        """Return draft tokens after position `end`, limited by the remaining tokens of the step."""
        is_written = sequence.stored >= sequence.prompt_length and end == len(sequence.tokens)
        if sequence.lookup is None or self.cut.unit is not None or not is_written:
            return ()
        guessed = sequence.lookup.propose(sequence.tokens)[: max(0, room)]
        # Verification always yields one token more than it accepts, hence the - 1.
        guessed = guessed[: sequence.longest - end - 1]
        # Draft tokens are optional, so they use only available pages and preempt no sequence.
        while pages_of(end + len(guessed)) - len(sequence.pages) > self.pages.available:
            guessed.pop()
        while len(sequence.pages) < pages_of(end + len(guessed)):
            page = self.pages.take()
            assert page is not None
            sequence.pages.append(page)
        return tuple(guessed)

    def _begin(self, sequence: Sequence) -> bool:
        """Start a waiting sequence if there are enough pages for all its tokens."""
        unit = self.cut.unit or PAGE_TOKENS
        cached = []
        if self.cut.shares and not sequence.scores_prompt:
            cached = find_prefix(self.pages, sequence.keys, sequence.tokens, unit)
        # `find_prefix` has added references to these pages, so `available` does not count them and
        # `take` cannot evict them.
        needed = pages_of(len(sequence.tokens) + 1) - len(cached)
        needed = min(needed, pages_of(sequence.longest) - len(cached))
        if needed > self.pages.available:
            for page in reversed(cached):
                self.pages.give_back(page)
            return False
        sequence.stored, sequence.registered = len(cached) * PAGE_TOKENS, len(cached)
        taken = [self.pages.take() for _ in range(needed)]
        sequence.pages = [*cached, *(page for page in taken if page is not None)]
        if sequence.cached is None:
            sequence.cached = min(sequence.stored, sequence.prompt_length)
        self.waiting.remove(sequence)
        insort(self.running, sequence)
        return True

    def _give_pages(self, sequence: Sequence, end: int, parts: list[SequenceChunk]) -> bool:
        """Allocate pages for a sequence up to token `end`; copy a shared last page."""
        number = sequence.stored // PAGE_TOKENS
        # Copy on write: forked sequences share the partly filled last page.
        if number < len(sequence.pages) and self.pages.is_shared(sequence.pages[number]):
            page = self._take(sequence, parts)
            if page is None:
                return False
            self._copies[sequence] = sequence.pages[number], page
            self.pages.give_back(sequence.pages[number])
            sequence.pages[number] = page
        while len(sequence.pages) < pages_of(end):
            page = self._take(sequence, parts)
            if page is None:
                return False
            sequence.pages.append(page)
        return True

    def _take(self, sequence: Sequence, parts: list[SequenceChunk]) -> int | None:
        """Allocate a page, preempting the newest sequences; None if this sequence is preempted.

        Planned chunks of a preempted sequence are removed.
        """
        while (page := self.pages.take()) is None:
            last = self.running[-1]
            # The newest sequence is preempted, never an older one, so the oldest always progresses.
            # Its chunks must not run: they would write to pages of another sequence.
            parts[:] = [part for part in parts if part.sequence is not last]
            self._preempt(last)
            if last is sequence:
                return None
        return page

    def _preempt(self, sequence: Sequence) -> None:
        # The target page of a planned copy is freed here and may get another owner in this plan.
        self._copies.pop(sequence, None)
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence)

    def _release(self, sequence: Sequence) -> None:
        for page in reversed(sequence.pages):  # evict the first pages of a prefix last
            self.pages.give_back(page)
        sequence.pages = []
        sequence.stored = sequence.registered = 0
