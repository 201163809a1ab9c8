"""Licenses: names that sources give, and pairs whose answer the publishers of licenses state."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bmforge.errors import ConfigError
from bmforge.licenses import (
    LICENSES,
    POLICIES,
    TERMS,
    check_license,
    find_license,
    is_license_allowed,
    license_name,
    merge_licenses,
)

NAMES = [
    ("CC-BY-4.0", "CC-BY-4.0"),
    ("cc-by-sa-3.0", "CC-BY-SA-3.0"),
    ("CC BY-NC-SA 4.0", "CC-BY-NC-SA-4.0"),
    ("CC BY 4.0 International", "CC-BY-4.0"),
    ("https://creativecommons.org/licenses/by-sa/4.0/", "CC-BY-SA-4.0"),
    ("http://creativecommons.org/licenses/by-nc-nd/2.5/deed.de", "CC-BY-NC-ND-2.5"),
    ("https://creativecommons.org/publicdomain/zero/1.0/", "CC0-1.0"),
    ("//nowhere", None),
    ("mit", "MIT"),
    ("https://opensource.org/licenses/MIT", "MIT"),
    ("http://www.apache.org/licenses/LICENSE-2.0", "Apache-2.0"),
    ("https://www.apache.org/licenses/LICENSE-2.0.txt", "Apache-2.0"),
    ("Apache License 2.0", "Apache-2.0"),
    ("GPLv3", "GPL-3.0-only"),
    ("gpl-2.0+", "GPL-2.0-or-later"),
    ("LGPL-2.1-or-later", "LGPL-2.1-or-later"),
    ("https://www.gnu.org/licenses/gpl-3.0.html", "GPL-3.0-only"),
    ("Public Domain", "CC-PDDC"),
    ("all rights reserved", None),
    ("", None),
    ("cc-by-9.9", None),
]


@pytest.mark.parametrize(("said", "id"), NAMES)
def test_what_sources_say_is_recognised(said: str, id: str | None) -> None:
    found = find_license(said)
    assert (found.id if found else None) == id
    assert license_name(said) == (id or said or "unknown")


def test_the_table_is_sound() -> None:
    for id, one in LICENSES.items():
        assert one.id == id
        assert one.url.startswith("https://")
        assert set(one.terms) <= set(TERMS)
        assert all(one.terms.values())
        assert set(one.compatible) <= set(LICENSES) - {id}
    assert LICENSES["CC-BY-NC-SA-3.0"].terms == {
        "share-alike": "section 4(b)",
        "non-commercial": "section 4(c)",
        "attribution": "section 4(d)",
    }
    assert set(LICENSES["CC0-1.0"].terms) == set()


# What Creative Commons (wiki.creativecommons.org/wiki/Wiki/cc_license_compatibility), the Free
# Software Foundation (gnu.org/licenses/license-list.html and gpl-faq.html#AllCompatibility) and
# the texts say: can both be in one thing that is handed on?
PAIRS = [
    ("CC0-1.0", "CC-BY-NC-ND-4.0", True),
    ("CC-BY-4.0", "CC-BY-SA-4.0", True),
    ("CC-BY-4.0", "CC-BY-NC-SA-4.0", True),
    ("CC-BY-NC-4.0", "CC-BY-NC-SA-4.0", True),
    ("CC-BY-NC-4.0", "CC-BY-SA-4.0", False),
    ("CC-BY-NC-SA-4.0", "CC-BY-SA-4.0", False),
    ("CC-BY-ND-4.0", "CC-BY-SA-4.0", False),
    ("CC-BY-SA-3.0", "CC-BY-SA-4.0", True),
    ("CC-BY-SA-4.0", "GPL-3.0-only", True),
    ("CC-BY-SA-4.0", "GPL-2.0-only", False),
    ("CC-BY-SA-3.0", "GPL-3.0-only", False),
    ("Apache-2.0", "GPL-3.0-only", True),
    ("Apache-2.0", "GPL-2.0-only", False),
    ("GPL-2.0-only", "GPL-3.0-only", False),
    ("GPL-2.0-or-later", "GPL-3.0-only", True),
    ("GPL-3.0-only", "AGPL-3.0-only", True),
    ("GPL-2.0-only", "AGPL-3.0-only", False),
    ("LGPL-2.1-only", "GPL-3.0-only", True),
    ("LGPL-3.0-only", "GPL-2.0-only", False),
    ("MPL-2.0", "GPL-3.0-or-later", True),
    ("ODbL-1.0", "CC-BY-SA-4.0", False),
    ("MIT", "CC-BY-NC-ND-3.0", True),
    ("openrail", "GPL-3.0-only", False),
    ("openrail", "Apache-2.0", True),
]


@pytest.mark.parametrize(("first", "second", "together"), PAIRS)
def test_pairs_are_as_their_publishers_say(first: str, second: str, together: bool) -> None:
    for pair in ((first, second), (second, first)):
        found = merge_licenses(pair)
        assert (not found) == together
        for one in found:  # both clauses are said
            assert {one.first, one.second} == {first, second}
            assert all(one.clauses)
            assert all(clause in str(one) for clause in one.clauses)


def test_the_term_that_does_not_fit_is_named() -> None:
    (one,) = merge_licenses(["CC-BY-SA-4.0", "CC-BY-NC-4.0", "unknown", "MIT"])
    assert str(one) == (
        "CC-BY-SA-4.0 (share-alike, section 3(b)) and CC-BY-NC-4.0 (non-commercial, "
        "section 2(a)(1))"
    )


@pytest.mark.parametrize(
    ("part", "whole", "fits"),
    [
        ("CC-BY-4.0", "MIT", True),
        ("CC-BY-NC-4.0", "Apache-2.0", False),
        ("CC-BY-NC-4.0", "CC-BY-NC-SA-4.0", True),
        ("CC-BY-SA-4.0", "CC-BY-SA-4.0", True),
        ("CC-BY-SA-4.0", "GPL-3.0-only", True),
        ("GPL-3.0-only", "CC-BY-SA-4.0", False),
        ("openrail", "MIT", False),
    ],
)
def test_what_is_handed_on_must_ask_for_what_its_parts_ask(
    part: str, whole: str, fits: bool
) -> None:
    assert (not merge_licenses([part], whole)) == fits


def test_policies() -> None:
    assert set(POLICIES) == {"known", "commercial", "permissive"}
    for said, allowed in {
        "CC0-1.0": {"known", "commercial", "permissive"},
        "mit": {"known", "commercial", "permissive"},
        "CC-BY-SA-4.0": {"known", "commercial"},
        "CC-BY-NC-4.0": {"known"},
        "CC-BY-ND-4.0": {"known"},
        "nobody knows": set(),
        "": set(),
    }.items():
        assert {policy for policy in POLICIES if is_license_allowed(said, policy)} == allowed


def test_an_unknown_id_names_the_nearest() -> None:
    assert check_license("cc-by-4.0", "license") == "CC-BY-4.0"
    with pytest.raises(ConfigError, match=r"license='CC-BY-4'.*Did you mean 'CC-BY-4\.0'"):
        check_license("CC-BY-4", "license")


IDS = (
    "MIT",
    "Apache-2.0",
    "CC-BY-4.0",
    "CC-BY-SA-4.0",
    "CC-BY-NC-4.0",
    "CC-BY-NC-ND-4.0",
    "GPL-2.0+",
)
UNKNOWN_IDS = ("LicenseRef-mine", "Foo-1.0")


def make_expression(draw: random.Random, depth: int) -> tuple[str, Callable[[str], bool]]:
    """Return an expression, and whether a policy allows it, told without the parser."""
    if depth == 0 or draw.random() < 0.3:
        id = draw.choice((*IDS, *UNKNOWN_IDS))
        return id, lambda policy: is_license_allowed(id, policy)
    parts = [make_expression(draw, depth - 1) for _ in range(draw.randrange(2, 4))]
    word, judge = draw.choice((("AND", all), ("OR", any)))
    text = f" {word} ".join(f"({one})" if " " in one else one for one, _ in parts)
    return text, lambda policy: judge(allowed(policy) for _, allowed in parts)


@pytest.mark.parametrize("seed", range(40))
def test_an_expression_allows_what_its_parts_allow(seed):
    draw = random.Random(seed)
    for _ in range(10):
        text, allowed = make_expression(draw, 3)
        for policy in ("commercial", "known"):
            if policy == "known" and any(id in text for id in UNKNOWN_IDS):
                continue
            assert is_license_allowed(text, policy) == allowed(policy), (text, policy)


def test_and_binds_before_or_and_an_exception_takes_nothing():
    assert is_license_allowed("MIT OR CC-BY-4.0 AND CC-BY-NC-4.0", "commercial")
    assert not is_license_allowed("(MIT OR CC-BY-4.0) AND CC-BY-NC-4.0", "commercial")
    assert is_license_allowed("GPL-2.0-only WITH Classpath-exception-2.0", "commercial")
    assert license_name("mit and  cc by 4.0") == "MIT AND CC-BY-4.0"


FREE = ("CC-BY-4.0", "CC BY 4.0", "CC BY-SA 3.0", "MIT", "CC0-1.0", "Apache 2.0", "cc-by-sa-4.0")
LIMITS = (
    *("{} AND CC-BY-NC-4.0", "{} and CC-BY-NC-SA-3.0", "CC-BY-NC-4.0 AND {}", "{} NC", "{}-NC"),
    *("{} (non-commercial use only)", "{} (text), CC BY-NC 4.0 (images)", "{} NonCommercial"),
    *("{} except figures, no commercial use", "{}, images: all rights reserved", "{} ND"),
    *("{} AND LicenseRef-non-commercial", "{} for research only", "{}; not for profit"),
    *(
        "{} WITH restrictions",
        "{} / CC BY-NC 4.0",
        "{} unless stated otherwise",
        "{}, academic use",
    ),
    *("not {}", "({}", "{})", "{} AND", "AND {}", "{} AND (CC-BY-NC-4.0 OR CC-BY-NC-SA-4.0)"),
    *("{} with a clause against commercial use", "{} (except Germany)", "{} OR", "{} NC Germany"),
)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_license_with_an_addition_is_never_allowed_for_commerce(limit):
    for free in FREE:
        assert not is_license_allowed(limit.format(free), "commercial"), limit.format(free)
    assert len(LIMITS) * len(FREE) >= 190


@pytest.mark.parametrize(
    "address",
    [
        "https://creativecommons.org/licenses/by/4.0/",
        "http://creativecommons.org/licenses/by/4.0/deed.de",
        "https://creativecommons.org/licenses/by/4.0/legalcode",
        "https://www.creativecommons.org/licenses/by/3.0/us/",
        "CC BY 4.0 International",
        "CC-BY-SA-3.0-DE",
        "CC BY-SA 3.0 Unported",
    ],
)
def test_ports_and_deeds_are_the_license_itself(address):
    assert is_license_allowed(address, "commercial")
