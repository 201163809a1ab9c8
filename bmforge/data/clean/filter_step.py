"""Filter step that keeps, rewrites or drops a document by published filter rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bmforge.data.clean.drop import Drop
from bmforge.data.clean.rule import Explained, RuleSet, check_text, explain_text
from bmforge.data.clean.rules import RULE_SETS, RULES, rules_version
from bmforge.data.clean.statistics import TextStatistics
from bmforge.data.clean.words import is_chinese, split_chinese_words, split_words
from bmforge.data.sources.document import Document, primary_subtag
from bmforge.errors import ConfigError, suggest

__all__ = ["RuleFilter", "DocumentStep", "clean_documents", "explain"]

DocumentStep = Callable[[Document], Document | Drop]


@dataclass(frozen=True)
class RuleFilter:
    """A step that filters documents with the rule sets for their language.

    Attributes:
        rules: ``"english"``, ``"chinese"``, ``"mixed"`` or ``"none"``.
        more: additional rule sets of the user, applied last.

    Raises:
        ConfigError: `rules` is unknown.
    """

    rules: str = "mixed"
    more: tuple[RuleSet, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` if `rules` is not a known name."""
        if self.rules not in RULES:
            raise ConfigError(
                f"unknown rules: rules={self.rules!r} (supported: "
                f"{', '.join(RULES)}).{suggest(self.rules, RULES)}"
            )

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        own = "".join(f" {extra.name}={extra.version}" for extra in self.more)
        return f"{self.rules}: {rules_version(self.rules)}{own}"

    def sets_for(self, document: Document) -> list[RuleSet]:
        """Return the rule sets that apply to a document, in the order of evaluation."""
        table = RULES[self.rules]
        names = table.get(_language_of(document), table.get("*", ()))
        return [*(RULE_SETS[name] for name in names), *self.more]

    def __call__(self, document: Document) -> Document | Drop:
        """Apply the rules; return the document, possibly with lines removed, or a `Drop`."""
        figures = _read(document, document.text)
        for rules in self.sets_for(document):
            if (drop := check_text(figures, rules)) is not None:
                return drop
            if rules.rewrite is not None:
                left = rules.rewrite(figures)
                figures = figures if left == figures.text else _read(document, left)
        return document if figures.text == document.text else replace(document, text=figures.text)


def _language_of(document: Document) -> str:
    """Return the recorded language, or guess ``"zh"`` or ``"en"`` from the characters.

    The guess needs no model.
    """
    subtag = primary_subtag(document.language)
    return subtag or ("zh" if is_chinese(document.text) else "en")


def _read(document: Document, text: str) -> TextStatistics:
    is_chinese_text = _language_of(document) == "zh"
    return TextStatistics(text, split_chinese_words if is_chinese_text else split_words)


def explain(document: Document, rules: str = "mixed") -> list[Explained]:
    """Return the measured value and limits of every rule, including rules that are not violated.

    If a rule set removes lines, the next rule set is evaluated on the remaining lines.
    """
    judge = RuleFilter(rules)
    figures, explained = _read(document, document.text), []
    for rule_set in judge.sets_for(document):
        explained += explain_text(figures, rule_set)
        if rule_set.rewrite is not None:
            figures = _read(document, rule_set.rewrite(figures))
    return explained


def clean_documents(
    documents: Iterable[Document], steps: Sequence[DocumentStep]
) -> Iterator[Document | Drop]:
    """Apply the steps to each document; yield the result, or the first `Drop`."""
    for document in documents:
        result: Document | Drop = document
        for step in steps:
            result = step(result)  # type: ignore[arg-type]
            if isinstance(result, Drop):
                break
        yield result
