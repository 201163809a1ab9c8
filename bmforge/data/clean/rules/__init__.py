"""Published filter rules with their bounds and sources, one family per file.

Start reading at `gopher.py`; in `chinese.py`, bounds depend on the form of the text (prose, verse
or list).
"""

from __future__ import annotations

from collections.abc import Mapping

from bmforge.data.clean.rule import RuleSet
from bmforge.data.clean.rules.c4 import C4, C4_ANY_END
from bmforge.data.clean.rules.chinese import CHINESE
from bmforge.data.clean.rules.fineweb import FINEWEB
from bmforge.data.clean.rules.gopher import GOPHER_QUALITY, GOPHER_REPETITION

__all__ = ["RULES", "RULE_SETS", "rules_version"]

RULE_SETS: Mapping[str, RuleSet] = {
    rules.name: rules
    for rules in (GOPHER_REPETITION, GOPHER_QUALITY, C4, C4_ANY_END, FINEWEB, CHINESE)
}
_ENGLISH = ("gopher_repetition", "gopher_quality", "c4_any_end", "fineweb")
# Value of the setting `rules` -> language -> rule sets, in order; "*" is any other language.
RULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "none": {},
    "english": {"*": _ENGLISH},
    "chinese": {"*": ("chinese",)},
    "mixed": {"en": _ENGLISH, "zh": ("chinese",), "*": ("gopher_repetition",)},
}


def rules_version(name: str) -> str:
    """Return the names and versions of a language's rule sets, for the cleaning step's version."""
    sets = sorted({rule_set for chosen in RULES[name].values() for rule_set in chosen})
    return " ".join(f"{rule_set}={RULE_SETS[rule_set].version}" for rule_set in sets)
