"""How many places an addition touches: the figures of CONTRIBUTING.md, counted on the source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bmforge.data.tasks import TASKS, TaskExample
from bmforge.data.tasks.metrics import score_task
from bmforge.data.tasks.task import BenchmarkTask
from bmforge.data.tasks.wording import word_task
from bmforge.models.families import FAMILIES, MODULES
from bmforge.train import OptimConfig
from bmforge.train.optim import build

PACKAGE = Path(__file__).resolve().parents[2] / "bmforge"
FILES = sorted(PACKAGE.rglob("*.py"))
AXES = {"tp", "pp", "cp", "ep", "dp_shard", "dp_replicate"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def strings(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_families_stand_in_one_table() -> None:
    """Only `bmforge.models`, whose imports type checkers read, and compat import most families."""
    own = {family.__module__ for family in FAMILIES.values()}
    lists = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if len(own & {*imported_modules(path)}) > len(own) // 3 and room_of(path) != "compat"
    }
    assert lists == {"models/__init__.py"}
    assert list(FAMILIES) == sorted(FAMILIES)


def test_type_checkers_see_the_table_of_families() -> None:
    """The imports for type checkers are the table's modules and names."""
    tree = ast.parse((PACKAGE / "models" / "__init__.py").read_text("utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        str(node.module): {alias.name for alias in node.names}
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
    }
    assert imported == {
        f"bmforge.models.{module}": {name for n in names for name in (n, f"{n}Config")}
        for module, names in MODULES.items()
    }


def test_one_family_opens_a_config_file() -> None:
    """The order in which `AutoModel` asks the families does not matter."""
    types = {t for f in FAMILIES.values() for t in f.config_class.model_types}
    for raw in [*({"model_type": t} for t in types), {"position_bias_num_segment_buckets": 1}]:
        opening = [name for name, f in FAMILIES.items() if f.config_class.opens(raw)]
        assert len(opening) == 1, (raw, opening)


def test_few_files_name_an_axis_of_the_mesh() -> None:
    """Those that a new axis would be entered into; its own file is one more."""
    found = {str(p.relative_to(PACKAGE)) for p in FILES if strings(p) & AXES}
    assert "parallel/layout.py" in found
    assert len({path for path in found if not path.startswith("compat/")}) + 1 <= 8, found


def test_an_optimizer_has_one_table() -> None:
    """Every name there makes a config, and what it does not use is refused by that name."""
    for name, unused in build._UNUSED.items():
        assert OptimConfig(name=name).name == name
        for field in unused:
            value = (0.5, 0.5) if field == "betas" else 1 if field == "ns_steps" else 0.5
            with pytest.raises(build.ConfigError, match=rf"optim\.{field}"):
                OptimConfig(name=name, **{field: value})
    named = {str(p.relative_to(PACKAGE)) for p in FILES if {"adamw", "sgd"} <= strings(p)}
    assert named == {"train/optim/build.py"}


def test_a_task_is_one_entry() -> None:
    """One of which nothing else knows has a prompt, options and a figure."""
    task = BenchmarkTask("Fresh", ("bad", "good"), {"dev": ("dev.txt",)}, lambda path: iter(()))
    assert task.name not in TASKS
    example = TaskExample({"text": "a film", "by": "somebody"}, 1, 0)
    wording = word_task(task, example)
    assert wording.write_prompt(example) == "text: a film\nby: somebody\nanswer:"
    assert wording.options(example) == ("bad", "good")
    assert score_task(task.name, [1, 0], [example, example]) == {"accuracy": 0.5}


def test_test_files_have_unique_names() -> None:
    """The folders of tests are no packages, so pytest imports each file by its base name."""
    names = Counter(path.name for path in (PACKAGE.parent / "tests").rglob("*.py"))
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated - {"conftest.py", "__init__.py"} == set()


def test_nothing_imports_a_conftest() -> None:
    """Many folders have one, and the order of the tests decides which one an import gets."""
    files = (PACKAGE.parent / "tests").rglob("*.py")
    importing = [
        p.name for p in files if re.search(r"^\s*(from|import) conftest\b", p.read_text(), re.M)
    ]
    assert importing == []
