"""Licences by SPDX id: what a source names, and which do not go together.

It compares what published texts say (`licence_table.py`) and is no legal judgement: whether a
model, or a corpus, is a work that a clause speaks of, is not decided here. What is not in the table
is unknown, and is said to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from bmforge.errors import ConfigError, suggest
from bmforge.licence_table import LICENCES, PAIRS, POLICIES, RESTRICTS, TERMS, Licence

__all__ = [
    "LICENCES",
    "POLICIES",
    "TERMS",
    "UNKNOWN",
    "Conflict",
    "Licence",
    "check_licence",
    "find_licence",
    "licence_name",
    "merge_licences",
    "obeys",
]

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Conflict:
    """Two clauses that one thing made of both can hardly obey at once.

    Attributes:
        first, second: ids of licences.
        terms: the word of `TERMS` for each one's clause.
        clauses: where each stands.
    """

    first: str
    second: str
    terms: tuple[str, str]
    clauses: tuple[str, str]

    def __str__(self) -> str:
        """Say both clauses."""
        return (
            f"{self.first} ({self.terms[0]}, {self.clauses[0]}) and {self.second} "
            f"({self.terms[1]}, {self.clauses[1]})"
        )


_BY_ID = {id.lower(): one for id, one in LICENCES.items()}
_ALIASES = {
    "public domain": "CC-PDDC",
    "publicdomain": "CC-PDDC",
    "pd": "CC-PDDC",
    "cc0": "CC0-1.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "odbl": "ODbL-1.0",
    "odc-by": "ODC-By-1.0",
    "pddl": "PDDL-1.0",
    "python-2.0": "PSF-2.0",
    "minicpm": "MiniCPM-1.0",
}
_GNU = re.compile(r"(a|l)?gpl-?v?(2\.0|2\.1|3\.0|2|3)(\+|-or-later|-only)?")
_COMMONS = re.compile(
    r"(?:https?://)?(?:www\.)?creativecommons\.org/"
    r"(?:licenses/([a-z-]+)/(\d\.\d)|publicdomain/(zero|mark)/1\.0)(?:/|$)"
)
_NAMED_COMMONS = re.compile(r"cc[- ](by(?:[- ](?:nc|sa|nd)){0,2})[- ](\d\.\d)(?: .*|-.*)?")


def find_licence(said: str) -> Licence | None:
    """Return the licence that a source names, or None for what is not known.

    Args:
        said: an SPDX id in any case, a common name, or the address of the licence's text.
    """
    text = " ".join(said.strip().lower().split())
    if text in _BY_ID:
        return _BY_ID[text]
    if text in _ALIASES:
        return LICENCES[_ALIASES[text]]
    if found := _COMMONS.match(text):
        if found[3]:
            return LICENCES["CC0-1.0" if found[3] == "zero" else "CC-PDDC"]
        return LICENCES.get(f"CC-{found[1].upper()}-{found[2]}")
    if found := _NAMED_COMMONS.fullmatch(text):
        return LICENCES.get(f"CC-{found[1].replace(' ', '-').upper()}-{found[2]}")
    if found := _GNU.fullmatch(text.replace(" ", "-")):
        version = found[2] if "." in found[2] else f"{found[2]}.0"
        ending = "or-later" if found[3] in ("+", "-or-later") else "only"
        return LICENCES.get(f"{(found[1] or '').upper()}GPL-{version}-{ending}")
    return _find_by_address(text)


def _find_by_address(text: str) -> Licence | None:
    def bare(url: str) -> str:
        return re.sub(r"^https?://(www\.)?|(/legalcode)?/?$|\.(html|txt)$", "", url.lower())

    if "/" not in text:
        return None
    wanted = bare(text).replace("opensource.org/licenses/", "opensource.org/license/")
    return next((one for one in LICENCES.values() if bare(one.url) == wanted), None)


def licence_name(said: str) -> str:
    """Return the id of the licence that a source names; what it says where that is not known."""
    found = find_licence(said)
    return found.id if found else " ".join(said.split()) or UNKNOWN


def check_licence(said: str, name: str) -> str:
    """Return the id of a licence that a setting names.

    Args:
        name: of the setting.

    Raises:
        ConfigError: it is not known; the nearest is named.
    """
    found = find_licence(said)
    if found is None:
        raise ConfigError(
            f"{name}={said!r} is no licence that is known.{suggest(said, LICENCES)} Needed is an "
            "id of SPDX, such as CC-BY-4.0; docs/licences.md lists those that are known."
        )
    return found.id


def obeys(said: str, policy: str) -> bool:
    """Tell whether a policy of `POLICIES` allows what a source says of its licence."""
    found = find_licence(said)
    return found is not None and not POLICIES[policy] & set(found.terms)


def merge_licences(licences: Iterable[str], handed_on: str = "") -> list[Conflict]:
    """Return which licences of the parts of one thing do not go together.

    A licence that wants what is made of it under its own terms does not go with one that asks for
    more, or for the like. Unknown ones are left out: of these nothing can be said.

    Args:
        licences: as sources name them.
        handed_on: the licence under which what is made of all is to be handed on: it must ask for
            what restricts the parts.
    """
    known = {one.id: one for one in map(find_licence, licences) if one is not None}
    found = []
    for first, second in combinations(sorted(known), 2):
        conflict = _compare(known[first], known[second])
        if conflict is not None:
            found.append(conflict)
    whole = find_licence(handed_on) if handed_on else None
    if whole is None:
        return found
    said = [{one.first, one.second} for one in found]
    covers = (_cover(known[id], whole) for id in sorted(known) if {id, whole.id} not in said)
    return [*found, *(one for one in covers if one is not None)]


def _compare(first: Licence, second: Licence) -> Conflict | None:
    """Return why what is made of both has no licence that both allow."""
    both = ((first, second), (second, first))
    for one, other in both:
        if (one.id, other.id) in PAIRS:
            what, clauses = PAIRS[one.id, other.id]
            return Conflict(one.id, other.id, (what, what), clauses)
    if _joinable(first, second):
        return None
    # What one asks for in addition says more than that both want their own terms.
    for added in (_added, lambda theirs, ours: ["share-alike"]):
        for one, other in both:
            if "share-alike" not in one.terms:
                continue
            for term in added(other.terms, one.terms):
                if term in other.terms:
                    clauses = (one.terms["share-alike"], other.terms[term])
                    return Conflict(one.id, other.id, ("share-alike", term), clauses)
    return None


def _joinable(first: Licence, second: Licence) -> bool:
    """Tell whether there is a licence under which what is made of both may be handed on."""
    ways = [{one.id, *one.compatible} for one in (first, second) if "share-alike" in one.terms]
    if len(ways) == 2:
        return bool(ways[0] & ways[1])
    if not ways:
        return True
    one, other = (first, second) if "share-alike" in first.terms else (second, first)
    return not _added(other.terms, one.terms)


def _added(theirs: Mapping[str, str], ours: Mapping[str, str]) -> Sequence[str]:
    """Return the terms that restrict, and would come in addition to ours."""
    return [term for term in RESTRICTS if term in theirs and term not in ours]


def _cover(part: Licence, whole: Licence) -> Conflict | None:
    """Return a term of a part that the licence of the whole does not ask for."""
    if whole.id in (part.id, *part.compatible):
        return None
    for term in RESTRICTS:
        if term in part.terms and (term not in whole.terms or term == "share-alike"):
            clause = whole.terms.get(term, "which does not ask for it")
            return Conflict(part.id, whole.id, (term, term), (part.terms[term], clause))
    return None
