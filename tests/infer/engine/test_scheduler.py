"""Whose turn it is, and which pages: any order of coming, ending and forking, without a model.

What a page holds is written down token by token, so that a page that was shared, copied, evicted or
taken too early shows at once.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bmforge.errors import ConfigError
from bmforge.infer.engine.pages import PAGE_TOKENS, Pages, pages_of
from bmforge.infer.engine.prefix import PrefixKeys, find_prefix
from bmforge.infer.engine.scheduler import ChunkRules, Scheduler, Sequence, SequenceChunk
from bmforge.infer.engine.speculate import NgramSpeculator

UNIT = 2 * PAGE_TOKENS


class Serving(RuleBasedStateMachine):
    """A scheduler, and a memory that says which token of which salt every place holds."""

    @initialize(
        count=st.integers(3, 9),
        running=st.integers(1, 4),
        step=st.integers(4, 40),
        unit=st.sampled_from([None, None, UNIT, 1 << 40]),
        shares=st.booleans(),
    )
    def begin(self, count: int, running: int, step: int, unit: int | None, shares: bool) -> None:
        self.pages = Pages(count)
        cut = ChunkRules(unit, shares)
        self.scheduler = Scheduler(self.pages, running, step, cut)
        self.memory: dict[tuple[int, int], tuple[int, str]] = {}
        self.salts: dict[Sequence, str] = {}
        self.number = self.cached = 0

    @rule(
        length=st.integers(1, 70),
        first=st.integers(0, 1),
        new=st.integers(1, 40),
        salt=st.sampled_from("ab"),
        guesses=st.booleans(),
    )
    def come(self, length: int, first: int, new: int, salt: str, guesses: bool) -> None:
        """A prompt comes; all begin in one of two ways."""
        tokens = [(first + n // 48) % 2 for n in range(length)]
        self.number += 1
        sequence = Sequence((self.number, 0), tokens, PrefixKeys("m", salt), length + new)
        sequence.lookup = NgramSpeculator() if guesses else None
        if pages_of(length + new) > self.pages.count:
            with pytest.raises(ConfigError, match="but the KV cache has"):
                self.scheduler.add(sequence)
            return
        self.scheduler.add(sequence)
        self.salts[sequence] = salt

    @precondition(lambda self: self.salts)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        """Whoever asked goes."""
        number = data.draw(st.integers(0, len(self.salts) - 1))
        self.end(list(self.salts)[number])

    @rule(forks=st.booleans())
    def step(self, forks: bool) -> None:
        first = min(self.scheduler.running, default=None)
        parts = self.scheduler.plan()
        waits = self.scheduler.waiting or self.scheduler.running
        assert parts or not waits
        if first is not None:
            assert any(part.sequence is first for part in parts), "the first was held up"
        for source, target in self.scheduler.copies:
            for offset in range(PAGE_TOKENS):
                self.memory[target, offset] = self.memory.get((source, offset), (-1, ""))
        self.check_parts(parts)
        for part in parts:
            self.write(part)
        for part in parts:
            self.choose(part, forks)

    def check_parts(self, parts: list[SequenceChunk]) -> None:
        """No sequence twice, no more tokens than fit, and every page of a new token its own."""
        sequences = [part.sequence for part in parts]
        assert len(set(sequences)) == len(sequences)
        if self.scheduler.cut.unit is None:
            assert sum(p.end - p.start for p in parts) <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        written = [
            part.sequence.pages[n // PAGE_TOKENS] * PAGE_TOKENS + n % PAGE_TOKENS
            for part in parts
            for n in range(part.start, part.end)
        ]
        assert len(set(written)) == len(written)
        unit = self.scheduler.cut.unit
        for part in parts:
            if unit is not None and part.start < part.sequence.prompt_length:
                assert part.start % unit == 0
                whole = min(part.start + unit, part.sequence.prompt_length)
                assert part.end == whole, "a stretch was divided"

    def write(self, part: SequenceChunk) -> None:
        sequence, salt = part.sequence, self.salts[part.sequence]
        for n, token in zip(range(part.start, part.end), part.tokens, strict=True):
            self.memory[sequence.pages[n // PAGE_TOKENS], n % PAGE_TOKENS] = token, salt
        held = [
            self.memory[sequence.pages[n // PAGE_TOKENS], n % PAGE_TOKENS] for n in range(part.end)
        ]
        known = [*sequence.tokens, *part.guessed][: part.end]
        assert held == [(token, salt) for token in known]

    def choose(self, part: SequenceChunk, forks: bool) -> None:
        """Choose a token behind a part; behind a prompt perhaps two, in two ways."""
        sequence = part.sequence
        if not part.is_last:
            self.scheduler.finish(part)
            return
        before = len(sequence.tokens)
        for propose in (*part.guessed, None):
            token = 4 if len(sequence.tokens) % 13 == 0 else len(sequence.tokens) % 3
            sequence.tokens.append(token)
            if token != propose:
                break
        assert before < len(sequence.tokens) <= sequence.longest
        self.scheduler.finish(part)
        if forks and len(sequence.tokens) == sequence.prompt_length + 1 and not sequence.order[1]:
            twin = self.scheduler.fork(sequence, (sequence.order[0], 1))
            twin.tokens[-1] = 5
            self.salts[twin] = self.salts[sequence]
            if len(twin.tokens) == twin.longest:
                self.end(twin)
        if len(sequence.tokens) == sequence.longest:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self.salts[sequence]
        assert not sequence.pages

    @invariant()
    def everything_is_counted(self) -> None:
        if not hasattr(self, "pages"):
            return
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert sorted(running) == running
        assert sorted(waiting) == waiting
        assert {*running, *waiting} == set(self.salts)
        assert len(running) + len(waiting) == len(self.salts)
        held = [page for sequence in running for page in sequence.pages]
        assert self.pages.used == len(set(held))
        for page in set(held):
            assert self.pages.is_shared(page) == (held.count(page) > 1)
        assert not any(sequence.pages for sequence in waiting)

    def teardown(self) -> None:
        """Everybody is served in the end, in a number of steps that what is asked decides."""
        if not hasattr(self, "pages"):
            return
        left = sum(sequence.longest for sequence in self.salts)
        for _ in range(4 * left * (1 + len(self.salts))):
            if not self.salts:
                break
            self.step(forks=False)
            self.everything_is_counted()
        assert not self.salts, "somebody starves"
        assert self.pages.used == 0
        assert self.pages.available == self.pages.count


QUICK = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_any_order_of_things() -> None:
    run_state_machine_as_test(Serving, settings=QUICK)


@pytest.mark.long
def test_any_order_of_things_for_long() -> None:
    more = settings(QUICK, max_examples=400, stateful_step_count=60, derandomize=False)
    run_state_machine_as_test(Serving, settings=more)


def test_prefixes_are_found_by_all_tokens_and_the_salt() -> None:
    """A page is found only behind the same tokens, of the same salt; the last token never."""
    pages, tokens = Pages(8), list(range(3 * PAGE_TOKENS))
    keys = PrefixKeys("model", "salt")
    taken = [pages.take() for _ in range(3)]
    for number, page in enumerate(taken):
        assert page is not None
        pages.register(page, keys.of(tokens, number))
        pages.give_back(page)
    assert pages.used == 0
    found = find_prefix(pages, PrefixKeys("model", "salt"), tokens, PAGE_TOKENS)
    assert found == taken[:2]
    longer = [*tokens, 7]
    assert find_prefix(pages, PrefixKeys("model", "salt"), longer, PAGE_TOKENS) == taken
    assert find_prefix(pages, PrefixKeys("model", "salt"), longer, UNIT) == taken[:2]
    other = [tokens[0] + 1, *tokens[1:]]
    for keys, row in (
        (PrefixKeys("model", "other"), tokens),
        (PrefixKeys("mode", "lsalt"), tokens),
        (PrefixKeys("model", "salt"), other),
    ):
        assert find_prefix(pages, keys, row, PAGE_TOKENS) == []


def test_what_was_used_longest_ago_goes_first() -> None:
    """Pages that keep prefixes give way, the oldest first, and only when none is free."""
    pages = Pages(3)
    for number in range(2):
        page = pages.take()
        assert page == number
        pages.register(page, bytes([number]))
    for page in (1, 0):
        pages.give_back(page)
    assert pages.take() == 2
    assert pages.find(b"\x01") == 1
    assert pages.take() == 1
    assert pages.find(b"\x01") is None
    assert pages.find(b"\x00") == 0
    pages.share(0)
    assert pages.take() is None
