"""Which tokens of which sequences a step computes. It knows pages and numbers, no model, no clock.

First come, first served: whoever came first gets tokens and pages first. Where pages run out, the
last to come gives its own back and waits at the front; what it had is computed again. So the first
is never held up by others, and every sequence becomes the first.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from bmforge.errors import ConfigError
from bmforge.infer.engine.pages import PAGE_TOKENS, Pages, pages_of
from bmforge.infer.engine.prefix import PrefixKeys, find_prefix, register_prefix
from bmforge.infer.engine.speculate import DraftSpeculator, NgramSpeculator

__all__ = ["Cut", "Part", "Scheduler", "Sequence"]


@dataclass(frozen=True)
class Cut:
    """How a sequence may be divided into steps, so that its numbers stay the same bits.

    Args:
        unit: tokens of a prompt go in stretches of so many, each begun at a multiple; what was
            written goes one by one. None divides anywhere.
        shares: prefixes are shared, in whole units.
    """

    unit: int | None = None
    shares: bool = True

    def most(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence may come next, at most."""
        left = len(sequence.tokens) - sequence.stored
        if self.unit is None:
            return left
        if sequence.stored >= sequence.prompt_length:
            return 1
        in_prompt = sequence.prompt_length - sequence.stored
        return min(in_prompt, self.unit - sequence.stored % self.unit)

    def keeps(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens others may share, at most."""
        if not self.shares:
            return 0
        if self.unit is None:
            return sequence.stored
        known = min(sequence.stored, sequence.prompt_length)
        return known // self.unit * self.unit


@dataclass(eq=False)
class Sequence:
    """A row of tokens that is written.

    Args:
        order: when it came; lower is earlier.
        tokens: all so far, the prompt first.
        keys: of its pages.
        longest: tokens it will have at the end, at most.
        lookup: guesses what comes next; None guesses nothing.

    Attributes:
        prompt_length: how many of the tokens are the prompt's.
        stored: how many have keys and values in `pages`.
        cached: how many of the prompt were found instead of computed, when it first began.
    """

    order: tuple[int, int]
    tokens: list[int]
    keys: PrefixKeys
    longest: int
    lookup: NgramSpeculator | DraftSpeculator | None = None
    prompt_length: int = 0
    stored: int = 0
    cached: int | None = None
    pages: list[int] = field(default_factory=list)
    registered: int = 0

    def __post_init__(self) -> None:
        """Note where the prompt ends."""
        self.prompt_length = len(self.tokens)

    def __lt__(self, other: Sequence) -> bool:
        """Who came first is less."""
        return self.order < other.order


@dataclass(frozen=True)
class Part:
    """Tokens of a sequence that a step computes.

    Args:
        sequence: whose.
        start: number of the first, and
        end: the number behind the last.
        guessed: how many of them, at the end, are guesses that are not among its tokens.
    """

    sequence: Sequence
    start: int
    end: int
    guessed: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the token behind it is to be chosen."""
        return self.end - len(self.guessed) == len(self.sequence.tokens)

    @property
    def tokens(self) -> list[int]:
        """The tokens, guesses included."""
        known = self.sequence.tokens[self.start : self.end - len(self.guessed)]
        return [*known, *self.guessed]


class Scheduler:
    """Divides steps and pages.

    Args:
        pages: all there are.
        max_num_seqs: sequences that have pages at once.
        max_num_batched_tokens: maximum number of tokens in a step; a single part may be larger
            where `cut` says so.
        cut: how sequences are divided.

    Attributes:
        running: those that have pages, the earliest first.
        waiting: the others, likewise.
    """

    def __init__(
        self, pages: Pages, max_num_seqs: int, max_num_batched_tokens: int, cut: Cut | None = None
    ) -> None:
        self.pages, self.max_num_seqs, self.max_num_batched_tokens = (
            pages,
            max_num_seqs,
            max_num_batched_tokens,
        )
        self.cut = cut or Cut()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._copies: dict[Sequence, tuple[int, int]] = {}

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence.

        Raises:
            ConfigError: all pages together are too few for it.
        """
        self.check(sequence.longest)
        insort(self.waiting, sequence)

    def check(self, tokens: int) -> None:
        """Raise `ConfigError` where a sequence of so many tokens could never run."""
        if pages_of(tokens) > self.pages.count:
            raise ConfigError(
                f"{tokens} tokens, prompt and new ones, are more than the "
                f"{self.pages.count * PAGE_TOKENS} that the engine has room for. Ask for fewer, or "
                "open it with a larger RequestsConfig(total_tokens=)."
            )

    def fork(self, sequence: Sequence, order: tuple[int, int]) -> Sequence:
        """Return a sequence that goes on as another does, sharing its pages while it can run."""
        twin = Sequence(order, list(sequence.tokens), sequence.keys.copy(), sequence.longest)
        twin.lookup = None if sequence.lookup is None else sequence.lookup.fresh()
        twin.prompt_length, twin.cached = sequence.prompt_length, sequence.cached
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
        """End a sequence, wherever it is; its pages are free, or keep its prefix."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def begin_anew(self) -> None:
        """Take all pages away: what they hold is computed again when it is needed."""
        for sequence in list(self.running):
            self._preempt(sequence)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Pages to be copied, in this order, before the step that was planned last: (from, to)."""
        return list(self._copies.values())

    def plan(self) -> list[Part]:
        """Return what the next step computes, the earliest first; nothing where nothing is left.

        Tokens behind what was written come before prompts, so that a long prompt holds nobody up.
        """
        self._copies = {}
        parts: list[Part] = []
        room = self.max_num_batched_tokens
        for is_prompt in (False, True):
            for sequence in list(self.running):
                left = len(sequence.tokens) - sequence.stored
                if sequence not in self.running or room < 1 or (left > 1) != is_prompt:
                    continue
                room -= self._plan_one(sequence, room, parts)
        for sequence in list(self.waiting):
            if room < 1 or len(self.running) >= self.max_num_seqs or not self._begin(sequence):
                break
            room -= self._plan_one(sequence, room, parts)
        return parts

    def finish(self, part: Part) -> None:
        """Note that a part was computed, and what was chosen behind it added to the tokens."""
        sequence = part.sequence
        sequence.stored = min(part.end, len(sequence.tokens) - 1)
        full = self.cut.keeps(sequence) // PAGE_TOKENS
        known = range(sequence.registered, full)
        register_prefix(self.pages, sequence.keys, sequence.tokens, sequence.pages, known)
        sequence.registered = max(sequence.registered, full)

    def _plan_one(self, sequence: Sequence, room: int, parts: list[Part]) -> int:
        """Add a part of a sequence, if it gets pages; return how many tokens it has."""
        most = self.cut.most(sequence)
        if self.cut.unit is None:
            most = min(most, room)
        end = sequence.stored + most
        if not self._give_pages(sequence, end, parts):
            return 0
        guessed = self._guess(sequence, end, room - most)
        parts.append(Part(sequence, sequence.stored, end + len(guessed), guessed))
        return most + len(guessed)

    def _guess(self, sequence: Sequence, end: int, room: int) -> tuple[int, ...]:
        """Return guesses of what comes behind token `end`, as far as there is room for them."""
        is_written = sequence.stored >= sequence.prompt_length and end == len(sequence.tokens)
        if sequence.lookup is None or self.cut.unit is not None or not is_written:
            return ()
        guessed = sequence.lookup.guess(sequence.tokens)[: max(0, room)]
        guessed = guessed[: sequence.longest - end - 1]
        while pages_of(end + len(guessed)) - len(sequence.pages) > self.pages.available:
            guessed.pop()
        while len(sequence.pages) < pages_of(end + len(guessed)):
            page = self.pages.take()
            assert page is not None
            sequence.pages.append(page)
        return tuple(guessed)

    def _begin(self, sequence: Sequence) -> bool:
        """Let a sequence that waits have pages, if there are enough for all it has now."""
        unit = self.cut.unit or PAGE_TOKENS
        found = []
        if self.cut.shares:
            found = find_prefix(self.pages, sequence.keys, sequence.tokens, unit)
        needed = pages_of(len(sequence.tokens) + 1) - len(found)
        needed = min(needed, pages_of(sequence.longest) - len(found))
        if needed > self.pages.available:
            for page in reversed(found):
                self.pages.give_back(page)
            return False
        sequence.stored, sequence.registered = len(found) * PAGE_TOKENS, len(found)
        taken = [self.pages.take() for _ in range(needed)]
        sequence.pages = [*found, *(page for page in taken if page is not None)]
        if sequence.cached is None:
            sequence.cached = min(sequence.stored, sequence.prompt_length)
        self.waiting.remove(sequence)
        insort(self.running, sequence)
        return True

    def _give_pages(self, sequence: Sequence, end: int, parts: list[Part]) -> bool:
        """Let a sequence have room up to token `end`, and its last page for itself."""
        number = sequence.stored // PAGE_TOKENS
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

    def _take(self, sequence: Sequence, parts: list[Part]) -> int | None:
        """Return a page; who came last gives up, which may be the sequence itself: then None.

        A part of it that was planned already is taken back.
        """
        while (page := self.pages.take()) is None:
            last = self.running[-1]
            parts[:] = [part for part in parts if part.sequence is not last]
            self._preempt(last)
            if last is sequence:
                return None
        return page

    def _preempt(self, sequence: Sequence) -> None:
        self._copies.pop(sequence, None)
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence)

    def _release(self, sequence: Sequence) -> None:
        for page in reversed(sequence.pages):  # the first ones of a prefix go last
            self.pages.give_back(page)
        sequence.pages = []
        sequence.stored = sequence.registered = 0
