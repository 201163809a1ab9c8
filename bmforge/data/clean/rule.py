"""Filter rules as table entries: a measured value, its limits, and their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.statistics import TextStatistics

__all__ = ["Bounds", "Explained", "Rule", "RuleSet", "check_text", "explain_text"]

Measure = Callable[[TextStatistics], float]


@dataclass(frozen=True)
class Bounds:
    """Allowed range of a value, from `low` to `high` inclusive; a None means no limit."""

    low: float | None = None
    high: float | None = None

    def broken_by(self, value: float) -> float | None:
        """Return the limit that `value` violates, or None; NaN violates every limit."""
        if self.low is not None and not value >= self.low:
            return self.low
        if self.high is not None and not value <= self.high:
            return self.high
        return None


@dataclass(frozen=True)
class Rule:
    """One filter rule: a text whose value is out of bounds is dropped.

    Attributes:
        name: name within the rule set.
        measure: function from text statistics to the value.
        bounds: allowed range of the value.
        meaning: description of the value.
        source: publication or code from which the bounds are taken.
        example: text that violates the rule, or a description of one.
        forms: dict from a form of text, such as ``"poem"``, to its bounds, if they differ.
        is_within: function that returns True if the value is certainly at most the given one, in
            less time than `measure`; None if there is none. For rules without a lower bound.
    """

    name: str
    measure: Measure
    bounds: Bounds
    meaning: str = ""
    source: str = ""
    example: str = ""
    forms: Mapping[str, Bounds] = field(default_factory=dict, hash=False)
    is_within: Callable[[TextStatistics, float], bool] | None = None


@dataclass(frozen=True)
class RuleSet:
    """A named, versioned list of rules, in the order of evaluation.

    Attributes:
        version: number that increases whenever the results for a text may change.
        form: function that returns the form of a text (``"prose"``, ``"poem"``, ``"list"``), for
            rules with `forms`.
        rewrite: function that returns the part to keep of a text that passes all rules, for example
            without boilerplate lines; if None, the whole text is kept.
    """

    name: str
    version: int
    rules: tuple[Rule, ...]
    source: str = ""
    form: Callable[[TextStatistics], str] | None = None
    rewrite: Callable[[TextStatistics], str] | None = None

    def bounds_of(self, rule: Rule, statistics: TextStatistics) -> Bounds:
        """Return a rule's bounds for this text; they may depend on its form (prose, poem, list)."""
        if self.form is None or not rule.forms:
            return rule.bounds
        return rule.forms.get(statistics.once(self.form), rule.bounds)


@dataclass(frozen=True)
class Explained:
    """Measured value of one rule for a text, with the rule's bounds."""

    rule: str
    value: float
    bounds: Bounds
    passed: bool


def check_text(statistics: TextStatistics, rules: RuleSet) -> Drop | None:
    """Return the `Drop` of the first violated rule, or None."""
    for rule in rules.rules:
        bounds = rule.bounds if rules.form is None else rules.bounds_of(rule, statistics)
        if rule.is_within and bounds.high is not None and rule.is_within(statistics, bounds.high):
            continue
        value = rule.measure(statistics)
        if (bound := bounds.broken_by(value)) is not None:
            return Drop(f"{rules.name}.{rule.name}", value, bound, cut_excerpt(statistics.text))
    return None


def explain_text(statistics: TextStatistics, rules: RuleSet) -> list[Explained]:
    """Return the value and bounds of every rule of a set, violated or not."""
    explained = []
    for rule in rules.rules:
        value, bounds = rule.measure(statistics), rules.bounds_of(rule, statistics)
        passed = bounds.broken_by(value) is None
        explained.append(Explained(f"{rules.name}.{rule.name}", value, bounds, passed))
    return explained
