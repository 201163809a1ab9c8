"""Rules are table entries: what is measured, within which bounds, and who says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.statistics import TextStatistics

__all__ = ["Bounds", "Explained", "Rule", "RuleSet", "check_text", "explain_text"]

Measure = Callable[[TextStatistics], float]


@dataclass(frozen=True)
class Bounds:
    """What a value may be: from `low` to `high`, both included; None is no bound."""

    low: float | None = None
    high: float | None = None

    def broken_by(self, value: float) -> float | None:
        """Return the bound that `value` breaks, or None; what is no number breaks every bound."""
        if self.low is not None and not value >= self.low:
            return self.low
        if self.high is not None and not value <= self.high:
            return self.high
        return None


@dataclass(frozen=True)
class Rule:
    """One rule: a text whose value is out of bounds is dropped.

    Attributes:
        name: within its set.
        measure: finds the value; any function of a text's statistics.
        bounds: of the value.
        meaning: what the value is, in words.
        source: who gives the bounds.
        example: a text that breaks the rule, or how one looks.
        forms: other bounds for texts of another form, such as ``"poem"``.
    """

    name: str
    measure: Measure
    bounds: Bounds
    meaning: str = ""
    source: str = ""
    example: str = ""
    forms: Mapping[str, Bounds] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class RuleSet:
    """A named, versioned list of rules, in the order of evaluation.

    Attributes:
        version: goes up whenever a text may be judged or changed differently.
        form: tells the form of a text, for rules with bounds by form.
        rewrite: what is left of a text that passes; None leaves it as it is.
    """

    name: str
    version: int
    rules: tuple[Rule, ...]
    source: str = ""
    form: Callable[[TextStatistics], str] | None = None
    rewrite: Callable[[TextStatistics], str] | None = None

    def bounds_of(self, rule: Rule, statistics: TextStatistics) -> Bounds:
        """Return the bounds of a rule for this text."""
        if self.form is None or not rule.forms:
            return rule.bounds
        return rule.forms.get(statistics.once(self.form), rule.bounds)


@dataclass(frozen=True)
class Explained:
    """The value of one rule for a text, and the rule's bounds."""

    rule: str
    value: float
    bounds: Bounds
    passed: bool


def check_text(statistics: TextStatistics, rules: RuleSet) -> Drop | None:
    """Return why the first rule that is broken drops the text, or None."""
    for rule in rules.rules:
        value = rule.measure(statistics)
        bound = rules.bounds_of(rule, statistics).broken_by(value)
        if bound is not None:
            return Drop(f"{rules.name}.{rule.name}", value, bound, cut_excerpt(statistics.text))
    return None


def explain_text(statistics: TextStatistics, rules: RuleSet) -> list[Explained]:
    """Return the value and bounds of every rule of a set, violated or not."""
    found = []
    for rule in rules.rules:
        value, bounds = rule.measure(statistics), rules.bounds_of(rule, statistics)
        passed = bounds.broken_by(value) is None
        found.append(Explained(f"{rules.name}.{rule.name}", value, bounds, passed))
    return found
