"""The headline figures of the READMEs are on the pages of results that they link."""

from __future__ import annotations

import re

import pytest
from pages import ROOT

ROW = re.compile(
    r"^\|(?P<what>[^|]*)\|(?P<ours>[^|]*)\|(?P<peer>[^|]*results/\w+\.md\)[^|]*)\|$", re.M
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")


def numbers(text: str) -> set[float]:
    """Return the numbers of a text; those inside names such as `Q4_0` do not count."""
    return {float(number) for number in NUMBER.findall(text)}


def unknown_figures(readme: str) -> dict[str, set[float]]:
    """Return the figures that the linked page does not have, by the name of their row."""
    unknown = {}
    for row in ROW.finditer(readme):
        figures = re.sub(r"\[[^]]*\]\([^)]*\)", "", row["ours"] + row["peer"])
        page = re.search(r"docs/results/\w+\.md", row["peer"])
        assert page is not None
        if missing := numbers(figures) - numbers((ROOT / page[0]).read_text("utf-8")):
            unknown[row["what"].strip()] = missing
    return unknown


@pytest.mark.parametrize("name", ["README.md", "README-ZH.md"])
def test_every_figure_is_on_its_page(name: str) -> None:
    readme = (ROOT / name).read_text("utf-8")
    assert len(ROW.findall(readme)) >= 4
    assert unknown_figures(readme) == {}


def test_a_changed_figure_would_be_seen() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(unknown_figures(readme.replace("38.0 and 23.1", "39.0 and 23.1"))) == 1


@pytest.mark.parametrize("name", ["README.md", "README-ZH.md"])
def test_a_readme_is_one_screen(name: str) -> None:
    """At most 150 lines; the rest is on the site."""
    assert len((ROOT / name).read_text("utf-8").splitlines()) <= 150
