"""Wording of docstrings, names and pages: the number of places per rule may only go down."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import wording

# The most places that each rule may find.
LIMITS: list[tuple[Callable[[], Iterator[str]], int]] = [
    (wording.pronoun_objects, 0),
    (wording.bare_module_clauses, 0),
    (wording.argument_fragments, 24),
    (wording.house_words, 10),
    (wording.empty_names, 36),
    (wording.unfinished_messages, 0),
    (wording.message_house_words, 0),
    (wording.shared_class_names, 0),
    (wording.page_house_words, 8),
    (wording.page_pictures, 3),
]


@pytest.mark.parametrize(
    ("rule", "limit"), LIMITS, ids=lambda value: getattr(value, "__name__", "")
)
def test_wording(rule: Callable[[], Iterator[str]], limit: int) -> None:
    places = list(rule())
    assert len(places) <= limit, "\n".join(places[: len(places) - limit + 20])


def test_the_rules_find_what_they_describe() -> None:
    assert wording.PRONOUN_OBJECT.match("Return what an operator is told.")
    assert not wording.PRONOUN_OBJECT.match("Return the sharded parameters.")
    assert wording.BARE_CLAUSE.match("What a layout may put into a block.")
    assert not wording.BARE_CLAUSE.match("Reads PEFT adapter directories.")
    assert wording.FRAGMENT.match("    seed: of the drawing.")
    assert not wording.FRAGMENT.match("    seed: random seed.")
