"""Steps with degenerate batches have the same finite loss and gradient on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from test_twenty_steps import ITEMS, LIMIT_S, NAMES, WIDTH, make_items, train_all
from torch import Tensor

from bmforge.parallel import Layout
from bmforge.testing import run_distributed

Rows = dict[str, Tensor]


def drop(rows: Rows, first: int, stop: int | None = None, step: int = 1) -> None:
    """Remove the labels of some rows."""
    rows["labels"][first:stop:step] = -100


def keep_items(rows: Rows, count: int) -> None:
    """Keep the labels of the first items: a short last batch that padding fills up."""
    drop(rows, count * len(rows["labels"]) // ITEMS)


def equal(rows: Rows) -> None:
    """Give all answers of a pair the same tokens, reference and, as answers, no advantage."""
    for name in ("input_ids", "labels", "attention_mask", "reference_logps"):
        if name in rows and len(rows["labels"]) > ITEMS:
            rows[name][1::2] = rows[name][::2]
    if "advantages" in rows:
        rows["advantages"].zero_()


def first_token_only(rows: Rows) -> None:
    """Half of the rows have one label, of the first token, which has no score."""
    rows["labels"][::4] = -100
    rows["labels"][::4, 0] = rows["input_ids"][::4, 0]


def one_kind(rows: Rows) -> None:
    """All answers are good, and margins are 0."""
    for name, value in (("is_good", 1), ("margin", 0)):
        if name in rows:
            rows[name].fill_(value)


KINDS: list[Callable[[Rows], None]] = [
    equal,
    lambda rows: drop(rows, 1, None, 4),  # answers without labels: rejected ones
    lambda rows: drop(rows, 0, None, 4),  # and chosen ones
    lambda rows: keep_items(rows, 1),
    lambda rows: keep_items(rows, 0),  # every answer was truncated
    lambda rows: keep_items(rows, 5),
    first_token_only,
    one_kind,
    lambda rows: drop(rows, 0, len(rows["labels"]) // 2),  # the first rank has no items
    lambda rows: rows["labels"][:, WIDTH // 2 :].fill_(-100),  # answers of one or two tokens
]


def make_degenerate(name: str, step: int) -> Rows:
    rows = make_items(name, step)
    KINDS[step - 1](rows)
    return rows


def compare(names: list[str], world: int, layout: Layout, micro: int) -> None:
    steps = len(KINDS)
    shared = "llama", Layout(), ITEMS, make_degenerate, steps
    (wanted,) = run_distributed(train_all, 1, names, *shared, timeout_s=LIMIT_S)
    shared = "llama", layout, micro, make_degenerate, steps
    for found in run_distributed(train_all, world, names, *shared, timeout_s=LIMIT_S):
        for name in names:
            assert len(found[name]) == steps
            assert wanted[name][4] == (0, 0)
            for row, other in zip(found[name], wanted[name], strict=True):
                assert all(math.isfinite(number) for number in row), name
                assert row == pytest.approx(other, rel=1e-12, abs=1e-12), name


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world", "layout", "micro"),
    [
        pytest.param(1, Layout(), 1, id="micro-batches"),
        pytest.param(2, Layout(zero=3), 2, id="zero3"),
        pytest.param(2, Layout(tp=2), 4, id="tp"),
        pytest.param(2, Layout(pp=2), 2, id="pp"),
        pytest.param(2, Layout(cp=2), 4, id="cp"),
    ],
)
def test_layouts(world: int, layout: Layout, micro: int) -> None:
    compare(NAMES, world, layout, micro)


def test_the_kinds_are_degenerate() -> None:
    """Each kind changes the rows of a pair method, or those of KTO."""
    for step in range(1, len(KINDS) + 1):
        pairs = [(make_items(n, step), make_degenerate(n, step)) for n in ("dpo", "kto")]
        assert not all(torch.equal(a[key], b[key]) for a, b in pairs for key in a)
