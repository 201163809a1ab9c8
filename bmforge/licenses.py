"""Recognizes licenses by SPDX id, name or URL, and finds licenses that conflict.

It only compares the published license texts (`license_table.py`) and gives no legal advice. It does
not decide whether a model or a corpus is a work to which a clause applies. Licenses that are not in
the table are reported as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from bmforge.errors import ConfigError, suggest
from bmforge.license_names import ALIASES, PORT, shorten_name
from bmforge.license_table import LICENSES, PAIRS, POLICIES, RESTRICTS, TERMS, License

__all__ = [
    "LICENSES",
    "POLICIES",
    "TERMS",
    "UNKNOWN",
    "Conflict",
    "License",
    "check_license",
    "find_license",
    "join_licenses",
    "license_name",
    "merge_licenses",
    "is_license_allowed",
]

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Conflict:
    """Two license clauses that a derived work can hardly satisfy together.

    Attributes:
        first, second: ids of the licenses.
        terms: the key of `TERMS` for each license's clause.
        clauses: section of each license that contains the clause.
    """

    first: str
    second: str
    terms: tuple[str, str]
    clauses: tuple[str, str]

    def __str__(self) -> str:
        """Return a sentence that names both clauses."""
        return (
            f"{self.first} ({self.terms[0]}, {self.clauses[0]}) and {self.second} "
            f"({self.terms[1]}, {self.clauses[1]})"
        )


_BY_ID = {id.lower(): license for id, license in LICENSES.items()}
_GNU = re.compile(r"(?:gnu-)?(a|l)?gpl-?v?(2\.0|2\.1|3\.0|2|3)(\+|-or-later|-only)?")
_COMMONS = re.compile(
    r"(?:https?://)?(?:www\.)?creativecommons\.org/"
    r"(?:licenses/([a-z-]+)/(\d\.\d)(?:/(?:[a-z]{2}|igo|scotland))?|publicdomain/(zero|mark)/1\.0)"
    r"(?:/|/(?:deed|legalcode)(?:[.-][a-z]{2}(?:[-_][a-z]{2,4})?)?)?(?:[?#]\S*)?"
)
_NAMED_COMMONS = re.compile(
    rf"cc[- ](by(?:[- ](?:nc|sa|nd)){{0,2}})[- ](\d\.\d)(?:[- ,(]+(?:{PORT})\)?){{0,2}}"
)
_OPERATOR = re.compile(r"\s*(\(|\)|(?<=[\s)])(?:and|or|with)(?=[\s(]))\s*", re.I)
_EXCEPTION = re.compile(r"[a-z0-9.-]*exception[a-z0-9.-]*", re.I)
_MOST_ALTERNATIVES = 4096


def find_license(name: str) -> License | None:
    """Return the license for an SPDX expression, id, name or URL; None if it is unknown.

    For ``CC-BY-4.0 AND CC-BY-NC-4.0`` the result has the terms of both licenses; for ``MIT OR
    GPL-3.0-only`` it is the less restrictive one. The expression is unknown if a part is unknown,
    unless it is an alternative of OR.

    Args:
        name: SPDX expression or id in any case, common name, or URL of the license text.
    """
    parts = _choose_parts(name)
    if parts is None or (len(parts) == 1 and not _is_expression(name)):
        return parts[0] if parts else None
    terms = {term: clause for part in parts for term, clause in part.terms.items()}
    return License(_normalize(name), parts[0].url, terms)


def _choose_parts(name: str) -> tuple[License, ...] | None:
    """Return the licenses of the least restrictive alternative in a license expression."""
    return min(_alternatives(name), key=_restriction, default=None)


def _alternatives(name: str) -> list[tuple[License, ...]]:
    """Return the known alternatives in a license expression; each is a list of licenses."""
    license = _find_one(name)
    if license is not None:
        return [(license,)]
    return _parse_expression(name) if _is_expression(name) else []


def _restriction(parts: tuple[License, ...]) -> tuple[int, int]:
    terms = {term for part in parts for term in part.terms}
    return len(terms & set(RESTRICTS)), len(terms)


def _is_expression(name: str) -> bool:
    return _find_one(name) is None and _OPERATOR.search(name) is not None


def _normalize(expression: str) -> str:
    """Replace the names in a license expression with SPDX ids."""
    parts = []
    for part in _OPERATOR.split(" ".join(expression.split())):
        license = _find_one(part) if part else None
        parts.append(
            license.id if license else part.upper() if _OPERATOR.fullmatch(f" {part} ") else part
        )
    joined = " ".join(part for part in parts if part)
    return joined.replace("( ", "(").replace(" )", ")")


def _parse_expression(expression: str) -> list[tuple[License, ...]]:
    """Return the alternatives of an expression; each is a list of licenses that all apply.

    Alternatives with an unknown license are omitted. A text that is not an expression has no
    alternatives.

    Source: SPDX specification 2.3, annex D: WITH binds before AND, AND before OR.
    """
    tokens = [token for token in _OPERATOR.split(" ".join(expression.split())) if token]
    tokens = [
        token.upper() if token.upper() in ("AND", "OR", "WITH") else token for token in tokens
    ]
    try:
        alternatives, unparsed = _parse_or(tokens)
    except (IndexError, ValueError, RecursionError):
        return []
    return alternatives if not unparsed else []


Alternatives = list[tuple[License, ...]]


def _parse_or(tokens: list[str]) -> tuple[Alternatives, list[str]]:
    alternatives, tokens = _parse_and(tokens)
    while tokens and tokens[0] == "OR":
        more, tokens = _parse_and(tokens[1:])
        alternatives = [*alternatives, *more]
    return alternatives, tokens


def _parse_and(tokens: list[str]) -> tuple[Alternatives, list[str]]:
    alternatives, tokens = _parse_operand(tokens)
    while tokens and tokens[0] == "AND":
        more, tokens = _parse_operand(tokens[1:])
        alternatives = [(*licenses, *other) for licenses in alternatives for other in more]
        if len(alternatives) > _MOST_ALTERNATIVES:
            raise ValueError(f"the expression has more than {_MOST_ALTERNATIVES} alternatives")
    return alternatives, tokens


def _parse_operand(tokens: list[str]) -> tuple[Alternatives, list[str]]:
    first, tokens = tokens[0], tokens[1:]
    if first == "(":
        alternatives, tokens = _parse_or(tokens)
        if tokens[0] != ")":
            raise ValueError("a bracket is not closed")
        return alternatives, tokens[1:]
    if first in (")", "AND", "OR", "WITH"):
        raise ValueError("an operand is missing")
    license = _find_one(first)
    if tokens and tokens[0] == "WITH":  # an exception only grants additional rights
        if not _EXCEPTION.fullmatch(tokens[1]):
            raise ValueError("WITH must be followed by an SPDX exception id")
        tokens = tokens[2:]
    return [(license,)] if license else [], tokens


def _find_one(license_text: str) -> License | None:
    """Return the license that an id, name or URL denotes; None if the license is unknown."""
    text = shorten_name(" ".join(license_text.strip().lower().split()))
    if text in _BY_ID:
        return _BY_ID[text]
    if text in ALIASES:
        return LICENSES[ALIASES[text]]
    if address := _COMMONS.fullmatch(text):
        if address[3]:
            return LICENSES["CC0-1.0" if address[3] == "zero" else "CC-PDDC"]
        return LICENSES.get(f"CC-{address[1].upper()}-{address[2]}")
    if name := _NAMED_COMMONS.fullmatch(text):
        return LICENSES.get(f"CC-{name[1].replace(' ', '-').upper()}-{name[2]}")
    if gnu := _GNU.fullmatch(text.replace(" ", "-")):
        version = gnu[2] if "." in gnu[2] else f"{gnu[2]}.0"
        ending = "or-later" if gnu[3] in ("+", "-or-later") else "only"
        return LICENSES.get(f"{(gnu[1] or '').upper()}GPL-{version}-{ending}")
    return _find_by_address(text)


def _find_by_address(text: str) -> License | None:
    def bare(url: str) -> str:
        return re.sub(r"^https?://(www\.)?|(/legalcode)?/?$|\.(html|txt)$", "", url.lower())

    if "/" not in text:
        return None
    address = bare(text).replace("opensource.org/licenses/", "opensource.org/license/")
    return next((license for license in LICENSES.values() if bare(license.url) == address), None)


def license_name(name: str) -> str:
    """Return the id of a license, or the given text if the license is unknown."""
    license = find_license(name)
    return license.id if license else " ".join(name.split()) or UNKNOWN


def join_licenses(names: Iterable[str]) -> str:
    """Return the SPDX expression of licenses that all apply; "" if there are none.

    An unknown license that contains an operator, such as "A or B", becomes `UNKNOWN`.
    """
    names = list(names)
    if len(names) < 2:
        return "".join(names)
    parts = []
    for name in names:
        license = find_license(name)
        part = license.id if license else name
        if _is_expression(name):
            part = f"({part})" if license else UNKNOWN
        parts.append(part)
    return " AND ".join(dict.fromkeys(parts))


def check_license(value: str, name: str) -> str:
    """Return the id of the license that an option names.

    Args:
        value: the option's value.
        name: name of the option, for the error message.

    Raises:
        ConfigError: the license is unknown; the message suggests a similar one.
    """
    license = find_license(value)
    if license is None:
        raise ConfigError(
            f"unknown license: {name}={value!r} (allowed: an SPDX id such as CC-BY-4.0; "
            f"docs/reference/licenses.md lists all known ids).{suggest(value, LICENSES)}"
        )
    return license.id


def is_license_allowed(name: str, policy: str) -> bool:
    """Return True if a policy of `POLICIES` allows a license.

    A license expression with alternatives is allowed if one of its alternatives is allowed.
    """
    refused = POLICIES[policy]
    return any(
        all(not refused & set(part.terms) for part in parts) for parts in _alternatives(name)
    )


def merge_licenses(licenses: Iterable[str], work_license: str = "") -> list[Conflict]:
    """Return the conflicts between the licenses of the parts of a work.

    A share-alike license conflicts with a license that has additional restrictions, and with a
    different share-alike license. Unknown licenses are ignored.

    Args:
        licenses: licenses of the parts, as their sources state them.
        work_license: license under which the whole work is distributed; it must contain the
            restrictions of all parts.
    """
    by_id = {part.id: part for reported in licenses for part in _choose_parts(reported) or ()}
    conflicts = []
    for first, second in combinations(sorted(by_id), 2):
        conflict = _compare(by_id[first], by_id[second])
        if conflict is not None:
            conflicts.append(conflict)
    target = find_license(work_license) if work_license else None
    if target is None:
        return conflicts
    reported = [{part.first, part.second} for part in conflicts]
    covers = (_cover(by_id[id], target) for id in sorted(by_id) if {id, target.id} not in reported)
    return [*conflicts, *(part for part in covers if part is not None)]


def _compare(first: License, second: License) -> Conflict | None:
    """Return the conflict between two licenses, or None if a derived work can satisfy both."""
    both = ((first, second), (second, first))
    for this, other in both:
        if (this.id, other.id) in PAIRS:
            what, clauses = PAIRS[this.id, other.id]
            return Conflict(this.id, other.id, (what, what), clauses)
    if _joinable(first, second):
        return None
    # Report an additional restriction first: it explains more than two share-alike clauses do.
    for added in (_added, lambda other_terms, own_terms: ["share-alike"]):
        for this, other in both:
            if "share-alike" not in this.terms:
                continue
            for term in added(other.terms, this.terms):
                if term in other.terms:
                    clauses = (this.terms["share-alike"], other.terms[term])
                    return Conflict(this.id, other.id, ("share-alike", term), clauses)
    return None


def _joinable(first: License, second: License) -> bool:
    """Return True if a work with parts under both licenses may be distributed under one license."""
    ways = [{this.id, *this.compatible} for this in (first, second) if "share-alike" in this.terms]
    if len(ways) == 2:
        return bool(ways[0] & ways[1])
    if not ways:
        return True
    this, other = (first, second) if "share-alike" in first.terms else (second, first)
    return not _added(other.terms, this.terms)


def _added(other_terms: Mapping[str, str], own_terms: Mapping[str, str]) -> Sequence[str]:
    """Return the restrictive terms in `other_terms` that `own_terms` lacks."""
    return [term for term in RESTRICTS if term in other_terms and term not in own_terms]


def _cover(part: License, target: License) -> Conflict | None:
    """Return the conflict if the target license lacks a restriction of a part's license.

    Returns None if the target license has all restrictions.
    """
    if target.id in (part.id, *part.compatible):
        return None
    for term in RESTRICTS:
        if term in part.terms and (term not in target.terms or term == "share-alike"):
            clause = target.terms.get(term, "which does not require it")
            return Conflict(part.id, target.id, (term, term), (part.terms[term], clause))
    return None
