"""The site's navigation has every page, and its generated reference agrees with the parsers."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT

from bmforge.cli import parse
from bmforge.cli.commands import COMMANDS
from bmforge.cli.train_options import FIELDS

sys.path.extend([str(ROOT / "dev"), str(ROOT / "dev" / "pictures")])

import reference_pages
from charts import CHARTS
from diagrams import DIAGRAMS

PICTURES = DIAGRAMS | CHARTS
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
OPTIONS = [name for name, command in COMMANDS.items() if command.options is not None]
ROW = re.compile(r"^\| `(--)?([\w.-]+)` \|", re.M)


def test_every_page_is_in_the_navigation() -> None:
    """Dated results are linked from their index."""
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    named = set(re.findall(r"[\w./-]+\.md", navigation))
    dated = {page for page in pages if re.match(r"results/\d", page)}
    assert pages - named == dated
    index = (ROOT / "docs" / "results" / "index.md").read_text("utf-8")
    assert not {page for page in dated if page.removeprefix("results/") not in index}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_command_page_has_the_options_of_the_help(name: str) -> None:
    """Both directions: the help of the real parser against the rows of the page."""
    section = reference_pages.command_section(name, COMMANDS[name])
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        parse.parse_options(COMMANDS[name].options, ["--help"], name)
    helped = {option.rstrip(".") for option in re.findall(r"--([a-z][\w.-]*)", shown.getvalue())}
    rows = {path for dashes, path in ROW.findall(section) if dashes}
    assert rows or set(ROW.findall(section)) <= {("", "RUN"), ("", "SHELL")}
    assert rows <= helped


def test_the_config_page_has_only_options_of_train() -> None:
    rows = {path.replace("_", "-") for _, path in ROW.findall(reference_pages.render_config())}
    assert len(rows) > 100
    assert rows <= FIELDS


def test_the_other_pages_are_rendered() -> None:
    pages = reference_pages.render_pages()
    assert "ConfigError" in pages["reference/errors.md"]
    assert "bmforge_requests" in pages["reference/server_metrics.md"]
    assert "::: bmforge.models" in pages["reference/api/models.md"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date(name: str, tmp_path: Path) -> None:
    """Run dev/pictures/draw.py after changing a picture or a figure."""
    PICTURES[name]().save(tmp_path / "new.svg")
    saved = ROOT / "docs" / "pictures" / f"{name}.svg"
    assert saved.read_text("utf-8") == (tmp_path / "new.svg").read_text("utf-8")


def test_pictures_are_shown_and_have_alternative_texts() -> None:
    shown = set()
    for page in PAGES:
        for text, target in IMAGE.findall(page.read_text("utf-8")):
            assert len(text) >= 10, f"{page.name}: {target} has no alternative text"
            shown.add((page.parent / target).resolve())
    assert shown == set((ROOT / "docs" / "pictures").glob("*.*"))
