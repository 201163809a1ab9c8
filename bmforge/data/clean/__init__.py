"""Cleaning steps that work on one document: normalize, detect language, filter, mask, score.

Start reading at `filter_step.py`. `rule.py` defines filter rules, `rules/` has the published ones,
and `statistics.py` computes the text statistics that they use. `text_repairs.py`, `languages.py`,
`private.py`, `lists.py` and `scores.py` contain the other steps.
"""

from __future__ import annotations

from bmforge.data.clean.drop import Drop
from bmforge.data.clean.filter_step import RuleFilter, clean_documents, explain
from bmforge.data.clean.rule import Bounds, Rule, RuleSet
from bmforge.data.clean.rules import RULE_SETS
from bmforge.data.clean.statistics import TextStatistics

__all__ = [
    "Drop",
    "Bounds",
    "Rule",
    "RuleSet",
    "RULE_SETS",
    "RuleFilter",
    "TextStatistics",
    "clean_documents",
    "explain",
]
