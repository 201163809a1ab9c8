"""Schedules against the published formulas, and the rules that every schedule must keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from bmforge.errors import ConfigError
from bmforge.parallel.pipeline.replay import order_messages, replay
from bmforge.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    forward_only,
    schedule_problems,
    write_schedule,
)

SIZES = [
    (name, p, m, v)
    for name in SCHEDULES
    for p in (1, 2, 3, 4, 6, 8)
    for m in (1, 2, 3, 4, 5, 8, 9, 12, 16, 24)
    for v in (1, 2, 3)
    if not schedule_problems(name, p, m, v)
]
PLAIN = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 16)]
ROUNDS = [(p, m, v) for p in (1, 2, 3, 4, 8) for m in (p, 2 * p, 5 * p) for v in (2, 3, 4)]


@pytest.mark.parametrize("backward", [1.0, 2.0, 2.5])
@pytest.mark.parametrize(("p", "m"), PLAIN)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_the_plain_ones(name, p, m, backward):
    """(p - 1) / (m + p - 1), on every rank."""
    found = replay(write_schedule(name, p, m), backward=backward)
    assert found.bubble_ratios == pytest.approx([(p - 1) / (m + p - 1)] * p)
    assert found.total == pytest.approx((m + p - 1) * (1 + backward))


@pytest.mark.parametrize(("p", "m", "v"), ROUNDS)
def test_bubble_of_the_interleaved_one(p, m, v):
    """(p - 1) / (v m + p - 1), on every rank."""
    found = replay(write_schedule("interleaved-1f1b", p, m, v))
    assert found.bubble_ratios == pytest.approx([(p - 1) / (v * m + p - 1)] * p)


@pytest.mark.parametrize(("p", "m"), PLAIN)
def test_memory_peaks(p, m):
    assert replay(write_schedule("gpipe", p, m)).peak_micro_batches == (m,) * p
    assert replay(write_schedule("1f1b", p, m)).peak_micro_batches == tuple(
        min(m, p - rank) for rank in range(p)
    )


@pytest.mark.parametrize(("p", "m", "v"), ROUNDS)
def test_zero_bubble_ones_against_their_papers(p, m, v):
    """With F = I = W, ZB-H1 idles (p - 1)(F + I - W) and ZBV nowhere between start and end."""
    for name, stages in (("interleaved-zero-bubble", v), ("interleaved-zero-bubble", 1)):
        found = replay(write_schedule(name, p, m, stages))
        assert found.bubble_ratios == pytest.approx([(p - 1) / (3 * stages * m + p - 1)] * p)
        assert max(found.peak_micro_batches) <= p * stages
    if m >= 2 * p:
        for name in ("zbv", "dualpipev"):
            found = replay(write_schedule(name, p, m))
            # Rank r starts r late and is done p - 1 - r early, and that is all.
            assert found.total == pytest.approx(6 * m + p - 1)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_ones_idle_less_than_1f1b(p):
    m = 4 * p
    plain = max(replay(write_schedule("1f1b", p, m)).bubble_ratios)
    for name in ("interleaved-zero-bubble", "zbv", "dualpipev"):
        assert max(replay(write_schedule(name, p, m)).bubble_ratios) < 0.5 * plain


def test_every_action_once_and_in_a_possible_order():
    """Replaying raises on a deadlock, so it is the proof that there is none."""
    assert {name for name, *_ in SIZES} == set(SCHEDULES)
    for size in SIZES:
        schedule = write_schedule(*size)
        assert replay(schedule).total > 0
        done = Counter()
        for rank, order in enumerate(schedule.orders):
            for kind, stage, micro_batch in order:
                assert schedule.stage_ranks[stage] == rank
                halves = ("input", "weight") if kind == "backward" else (kind.split("_")[-1],)
                done.update((half, stage, micro_batch) for half in halves)
        _, p, m, v = size
        assert set(done.values()) == {1}
        assert len(done) == 3 * p * m * v


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_only_has_every_forward_once(name):
    schedule = write_schedule(name, 4, 8)
    for m in (1, 3, 4, 9):
        half = forward_only(schedule, m)
        assert half.stage_ranks == schedule.stage_ranks
        assert replay(half).total > 0
        want = {Action("forward", s, i) for s in range(schedule.num_stages) for i in range(m)}
        assert sorted(action for order in half.orders for action in order) == sorted(want)


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_of_a_pair_are_in_an_order_that_both_ranks_can_keep(name):
    """All that cross, once; each rank's own in its own order; none before what its sender needs."""
    for p in (2, 3, 4):
        schedule = write_schedule(name, p, 3 * p)
        ranks, found = schedule.stage_ranks, set()
        for pair, order in order_messages(schedule).items():
            for rank in pair:
                made, used = [], []
                for action in schedule.orders[rank]:
                    kind = action.kind.removesuffix("_input")
                    made.append((kind, *action[1:]))
                    used.append((kind, action.stage + (1 if kind == "backward" else -1), action[2]))
                sent = [made.index(tuple(m)) for m in order if ranks[m.stage] == rank]
                assert sent == sorted(sent)
                for index, message in enumerate(order):
                    if ranks[message.stage] != rank:
                        # All that this rank sends before it needs the message comes before it.
                        before = {m for m in order[:index] if ranks[m.stage] == rank}
                        needed_at = used.index(tuple(message))
                        assert all(made.index(tuple(m)) < needed_at for m in before)
            assert {tuple(sorted((ranks[m.stage], ranks[m.receiver]))) for m in order} == {pair}
            assert len(set(order)) == len(order)
            found |= set(order)
        edges = sum(a != b for a, b in pairwise(ranks))
        assert len(found) == 2 * 3 * p * edges


def test_a_deadlock_is_found_and_named():
    schedule = write_schedule("1f1b", 2, 2)
    first, second = schedule.orders
    wrong = replace(schedule, orders=(first, second[::-1]))
    with pytest.raises(ConfigError, match=r"deadlocks: rank 0 waits .*; rank 1 waits .*backward"):
        replay(wrong)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("1f1bb", 2, 4), ["'1f1bb'", "did you mean '1f1b'?"]),
        (("gpipe", 0, 0), ["num_ranks=0", "num_micro_batches=0"]),
        (("1f1b", 2, 4, 2), ["stages_per_rank=2", "exactly 1"]),
        (("interleaved-1f1b", 2, 4, 1), ["stages_per_rank=1", "at least 2"]),
        (("interleaved-1f1b", 4, 9), ["num_micro_batches=9", "use 12 micro-batches"]),
        (("interleaved-zero-bubble", 4, 13), ["num_micro_batches=13", "3 equal rounds"]),
        (("zbv", 4, 8, 3), ["stages_per_rank=3", "exactly 2"]),
        (("dualpipev", 4, 7), ["num_micro_batches=7", "at least 8"]),
    ],
)
def test_what_does_not_fit_is_said(args, words):
    found = schedule_problems(*args)
    assert found
    with pytest.raises(ConfigError) as caught:
        write_schedule(*args)
    for word in words:
        assert word in "; ".join(found)
        assert word in str(caught.value)


def test_the_numbers_that_errors_recommend_work():
    assert schedule_problems("interleaved-1f1b", 4, 12) == []
    assert schedule_problems("interleaved-zero-bubble", 4, 16) == []
    assert schedule_problems("dualpipev", 4, 8) == []


def test_where_the_stages_live():
    assert write_schedule("interleaved-1f1b", 3, 3).stage_ranks == (0, 1, 2, 0, 1, 2)
    schedule = write_schedule("zbv", 3, 3)
    assert schedule.stage_ranks == (0, 1, 2, 2, 1, 0)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
