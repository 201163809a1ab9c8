"""Licenses as sources write them: none that forbids commercial use is taken for a free one.

The strings in licenses_as_written.tsv were written down from knowledge of how licenses are stated
in package metadata (PyPI classifiers, npm, CRAN, Cargo), data set and model cards, GitHub
repositories, web pages, publishers' metadata and pages of Creative Commons, in English, Chinese,
Japanese, German, French, Spanish and Russian; they were not sampled by a program. The strings
in licenses_collected.tsv were copied on 2026-11-28, with their sources: the identifiers that
Hugging Face lists (hub-docs, repositories-licenses.md), frequent ones in Debian 12's copyright
files and in metadata of Python packages, and those that searches for license fields found on
GitHub.

"yes" means that the text allows commercial use of the whole work without a further condition on
who uses it or a request, by reading the license, not by running bmforge.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bmforge.licenses import find_license, is_license_allowed

FOLDER = Path(__file__).parent


def read_answers(name: str) -> dict[str, str]:
    """Return "yes" or "no" for each string of a list."""
    lines = (FOLDER / name).read_text("utf-8").splitlines()
    answers = {line.split("\t")[-1]: line.split("\t")[0] for line in lines}
    assert len(answers) == len(lines)
    assert set(answers.values()) == {"yes", "no"}
    return answers


WRITTEN, COLLECTED = map(read_answers, ("licenses_as_written.tsv", "licenses_collected.tsv"))
FREE, LIMITED = (
    [text for text, answer in WRITTEN.items() if answer == wanted] for wanted in ("yes", "no")
)


def test_the_list_is_large() -> None:
    assert len(FREE) >= 170
    assert len(LIMITED) >= 200
    assert len(COLLECTED) >= 240


def test_no_limited_license_is_allowed_for_commerce() -> None:
    assert [text for text in LIMITED if is_license_allowed(text, "commercial")] == []
    for case in (str.upper, str.lower, str.title, lambda text: f"  {text}\n"):
        assert [text for text in LIMITED if is_license_allowed(case(text), "commercial")] == []


def test_no_collected_license_is_allowed_wrongly() -> None:
    """Of those that allow commercial use, more than half are in the table of licenses."""
    allowed = {text for text in COLLECTED if is_license_allowed(text, "commercial")}
    assert {text for text in allowed if COLLECTED[text] == "no"} == set()
    assert len(allowed) > 0.5 * sum(answer == "yes" for answer in COLLECTED.values())


def test_most_free_licenses_are_allowed_for_commerce() -> None:
    """The others have no version, are not in the table, or are not in English."""
    allowed = [text for text in FREE if is_license_allowed(text, "commercial")]
    assert len(allowed) >= 0.75 * len(FREE)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("License :: OSI Approved :: MIT License", "MIT"),
        ("Attribution-ShareAlike 4.0 International", "CC-BY-SA-4.0"),
        ("Attribution-NonCommercial 4.0 International (CC BY-NC 4.0)", "CC-BY-NC-4.0"),
        ("Creative Commons Attribution-NonCommercial-NoDerivs 3.0 Unported", "CC-BY-NC-ND-3.0"),
        ("GNU General Public License v2 or later (GPLv2+)", "GPL-2.0-or-later"),
        ("GNU Affero General Public License v3", "AGPL-3.0-only"),
        ("Attribution 4.0 International (CC BY-NC 4.0)", None),
        ("Attribution-NonCommercial 4.0 International (CC BY 4.0)", None),
        ("Creative Commons Attribution 4.0 International, images excluded", None),
        ("Creative Commons Attribution 4.0 International NC", None),
        ("GNU General Public License v3 for academic use", None),
    ],
)
def test_titles_and_classifiers(text: str, id: str | None) -> None:
    license = find_license(text)
    assert (license.id if license else None) == id
