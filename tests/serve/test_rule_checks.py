"""Rules for answers compile in a process of their own first, within its limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.infer.engine.constraint import Constraint
from bmforge.serve.errors import RequestError
from bmforge.serve.rules import RuleChecker
from bmforge.serve.settings import SchemaLimits

GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Patterns that must all hold take time and memory that grow with each.
HEAVY = {
    "allOf": [{"type": "string", "pattern": f"^.*[a-f]{{{n + 3}}}.*(x|y){{{n % 5 + 1}}}.*$"}
              for n in range(32)],
}  # fmt: skip


def check(rule: Constraint, **limits: Any) -> None:
    asyncio.run(RuleChecker(SchemaLimits(**limits)).check(rule, "client"))


@pytest.mark.parametrize(
    "rule",
    [Constraint.json_schema(GOOD), Constraint.json_schema({}), Constraint.regex("[ab]+天"),
     Constraint.choices(["a", "天"]), Constraint.lark('start: "a" | "b"')],
    ids=lambda rule: rule.source[:20],
)  # fmt: skip
def test_rules_that_can_be_kept(rule: Constraint) -> None:
    check(rule)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (Constraint.json_schema({"type": "nothing"}), "is not supported"),
        (Constraint.json_schema({"type": "array", "uniqueItems": True}), "is not supported"),
        (Constraint.regex("(a"), "is not supported"),
        (Constraint.lark("start: nothing"), "is not supported"),
        (Constraint.json_schema({"$ref": "https://example.org/a"}), "another document"),
        (Constraint.json_schema({"a": [{"$ref": "file:///etc/passwd"}]}), "another document"),
        (Constraint.regex("a" * 70_000), "at most 65536"),
        (Constraint.json_schema(json.dumps({"a": 1})[:-1] + ', "b": ' + "[" * 40 + "]" * 40 + "}"),
         "at most 24"),
    ],
    ids=lambda value: value.source[:30] if isinstance(value, Constraint) else "",
)  # fmt: skip
def test_rules_that_cannot(rule: Constraint, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        check(rule)
    assert caught.value.status_code == 400


@pytest.mark.long
def test_a_rule_that_takes_too_much_is_stopped() -> None:
    rule = Constraint.json_schema(HEAVY)
    with pytest.raises(RequestError, match="its compilation takes longer than"):
        check(rule, schema_cpu_s=1, schema_s=20)


def test_verdicts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule is compiled once, a good one and a bad one."""
    compiled = []
    run = RuleChecker._run

    async def count(self: RuleChecker, rule: Constraint) -> str | None:
        compiled.append(rule)
        return await run(self, rule)

    monkeypatch.setattr(RuleChecker, "_run", count)

    async def ask() -> None:
        checker = RuleChecker(SchemaLimits())
        for _ in range(3):
            await checker.check(Constraint.regex("a+"), "client")
            with pytest.raises(RequestError):
                await checker.check(Constraint.regex("(a"), "client")

    asyncio.run(ask())
    assert len(compiled) == 2


@given(st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=10, deadline=None)
def test_slow_rules_of_one_client_leave_a_process_to_others(slow: int, quick: int) -> None:
    """All rules of another client are compiled while every rule of the first one still runs."""
    never = asyncio.Event()

    class Stalled(RuleChecker):
        async def _run(self, rule: Constraint) -> str | None:
            if rule.source.startswith("slow"):
                await never.wait()
            return None

    async def ask() -> int:
        checker = Stalled(SchemaLimits(schema_s=60.0))
        attack = [
            asyncio.create_task(checker.check(Constraint.regex(f"slow{number}"), "attacker"))
            for number in range(slow)
        ]
        await asyncio.sleep(0)  # let the attacker's rules take their turns first
        for number in range(quick):
            await asyncio.wait_for(checker.check(Constraint.regex(f"a{number}"), "victim"), 30)
        running = sum(not task.done() for task in attack)
        for task in attack:
            task.cancel()
        await asyncio.gather(*attack, return_exceptions=True)
        return running

    assert asyncio.run(ask()) == slow
