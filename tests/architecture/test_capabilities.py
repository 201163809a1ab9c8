"""The generated pages are up to date, and docs/reference/capabilities.md has no empty cell."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from bmforge.models.hub import FAMILIES
from bmforge.recipes.registry import TASKS
from bmforge.testing.capability import CAPABILITIES, ROOMS, capability

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    """A script of dev/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "dev" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """dev/capabilities.py as a module."""
    return load("capabilities")


def test_the_page_is_up_to_date(writer: ModuleType) -> None:
    """Run dev/capabilities.py after adding a family or a capability."""
    assert writer.PAGE.read_text("utf-8") == writer.render()


def test_the_presets_are_up_to_date() -> None:
    """Run dev/presets.py after adding a preset."""
    writer = load("presets")
    assert writer.PAGE.read_text("utf-8") == writer.render()


def test_every_capability_has_one_room() -> None:
    """A column stands in one table: of a room, or of what rooms do together with something."""
    assert len(set(CAPABILITIES)) == len(CAPABILITIES) == sum(map(len, ROOMS.values()))
    rooms = [name for name in ROOMS if name != "changed models"]
    assert all((ROOT / "bmforge" / room / "__init__.py").is_file() for room in rooms)
    with pytest.raises(AssertionError, match="flying"):
        capability("flying")


def test_the_page_has_a_table_per_room(writer: ModuleType) -> None:
    """Each with a row for every family and the room's own columns."""
    parts = writer.PAGE.read_text("utf-8").split("\n## ")[1:]
    assert [part.partition("\n")[0] for part in parts] == list(ROOMS)
    for part, names in zip(parts, ROOMS.values(), strict=True):
        head, _, *rows = [line for line in part.splitlines() if line.startswith("|")]
        assert [cell.strip() for cell in head.split("|")[2:-1]] == list(names)
        assert [row.split("|")[1].strip() for row in rows] == sorted(FAMILIES)


def test_the_list_of_benchmarks_is_up_to_date() -> None:
    """Run dev/benchmark_table.py after changing a benchmark or a page of docs/results."""
    writer = load("benchmark_table")
    assert writer.PAGE.read_text("utf-8") == writer.render()


def test_the_package_tables_are_up_to_date() -> None:
    """Run dev/package_table.py after changing an import rule or a module's first docstring line."""
    writer = load("package_table")
    assert writer.PAGE.read_text("utf-8") == writer.page()


def test_no_empty_cell(writer: ModuleType) -> None:
    """Every family has every capability, or says why it cannot."""
    found = writer.collect()
    assert set(found) == set(FAMILIES)
    empty = {
        family: missing
        for family, (_, cells) in found.items()
        if (missing := set(CAPABILITIES) - set(cells))
    }
    assert not empty


def test_the_memory_page_has_the_rows_of_its_writer() -> None:
    """Run dev/memory_table.py after changing its models, methods or words."""
    writer = load("memory_table")
    page = writer.PAGE.read_text("utf-8")
    assert page.startswith(writer.INTRO + writer.render_head())
    assert page.endswith(writer.OUTRO)
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][1:]
    expected = [f" {size} (`{preset}`) " for size, preset in writer.MODELS.items()]
    assert [row[0] for row in rows] == expected
    columns = list(zip(*(map(float, row[1:]) for row in rows), strict=True))
    assert len(columns) == len(writer.METHODS)
    assert all(list(column) == sorted(column) for column in columns)  # larger models need more


@pytest.mark.long
def test_the_memory_page_has_the_planner_s_figures() -> None:
    """Compare the smallest model's row."""
    writer = load("memory_table")
    assert writer.render_row("0.6B", "qwen3-0.6b") in writer.PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", ["README.md", "README-ZH.md"])
def test_the_readme_repeats_the_memory_page(name: str) -> None:
    rows = re.findall(r"^\| \d+B \(`.*", (ROOT / name).read_text("utf-8"), re.M)
    assert len(rows) >= 4
    assert not set(rows) - set(load("memory_table").PAGE.read_text("utf-8").splitlines())


# Columns of the README's table of models -> tasks of `bmforge train`.
README_TASKS = ("pretrain", "conversations", "classify", "preferences", "prompt-classify")
# First words of its rows after the decoders -> families.
README_ROWS = {
    "T5": ("T5", "CPM2", "EVA"),
    "BERT": ("Bert", "Roberta", "XLMRoberta", "Longformer"),
    "CPM-Ant": ("CPMAnt", "CPMBee", "GLM"),
    "ViT": (),  # its task, images, is named in the row
}


@pytest.mark.parametrize("name", ["README.md", "README-ZH.md"])
def test_the_readme_has_the_tasks_of_the_families(name: str) -> None:
    """A tick means that every family of the row supports the task, and a dash that none does."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if re.search(r"DPO\W+GRPO \|", line))
    first, *others = lines[start + 2 : start + 2 + 1 + len(README_ROWS)]
    decoders = families_of("preferences")
    assert first.startswith(f"| {len(decoders)} ")
    for line, families in [(first, decoders), *zip(others, README_ROWS.values(), strict=True)]:
        ticks = [cell.strip() for cell in line.split("|")[2:-1]]
        for tick, task in zip(ticks, README_TASKS, strict=False):
            able = set(families) & families_of(task)
            assert able == (set(families) if tick == "✓" else set()), (line, task)


def families_of(task: str) -> set[str]:
    """Return the names of the families that `bmforge train` supports for a task."""
    return {n for n, family in FAMILIES.items() if TASKS[task].form(family.family_traits)}
