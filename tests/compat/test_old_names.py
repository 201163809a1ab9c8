"""Every public name of the old packages is in one table, and is what the table says."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bmforge.compat.names import PAGES, Row, load_table, read_names, removed_message
from bmforge.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# Names that only the objects have; the tests of those look at them.
ON_OBJECTS = {
    "bmtrain": {"DistributedParameter", "init.topology", "Block"},
    "model_center": {"dataset.distributed_dataset.DatasetWriter", "dataset.MMapIndexedDataset"},
}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("old_names", ROOT / "dev" / "old_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()


def look_up(package: str, name: str) -> Any:
    """Return what a dotted name stands for: modules down to what is in the last of them."""
    path = f"bmforge.compat.{package}"
    found: Any = importlib.import_module(path)
    *owners, last = name.split(".")
    for part in owners:
        path += f".{part}"
        if hasattr(found, "__path__") and importlib.util.find_spec(path):
            found = importlib.import_module(path)  # a function may have its module's name
        else:
            found = getattr(found, part)
    return getattr(found, last)


def rows_of(package: str) -> list[Row]:
    return [row for rows in load_table(package).values() for row in rows]


@pytest.mark.parametrize("package", PAGES)
def test_names_are_what_the_table_says(package: str) -> None:
    elsewhere = tuple(f"{name}." for name in ON_OBJECTS.get(package, ()))
    for row in rows_of(package):
        for name in (name for name in row.names if not name.startswith(elsewhere)):
            if row.state != "gone":
                assert look_up(package, name) is not None, name
                continue
            with pytest.raises((ImportError, AttributeError)) as said:
                look_up(package, name)
            # A method, or what is in something that is gone, is only not there.
            if is_told(package, name):
                assert said.match(re.escape(removed_message(name, row.note)))


def is_told(package: str, name: str) -> bool:
    """Tell whether what a name is in is a module of ours."""
    owner = name.rpartition(".")[0]
    try:
        return not owner or isinstance(look_up(package, owner), ModuleType)
    except (ImportError, AttributeError):
        return False


@pytest.mark.parametrize("package", PAGES)
def test_the_page_has_the_table(package: str) -> None:
    """Run dev/old_names.py after changing a table."""
    text = (ROOT / "docs" / PAGES[package]).read_text(encoding="utf-8")
    assert SCRIPT.page(package, text) == text


def test_a_table_is_read() -> None:
    read = read_names("# One\na b.c | same\nd | gone | `e`\n# Two\nf | changed | new")
    assert read == {
        "One": [Row(("a", "b.c"), "same", ""), Row(("d",), "gone", "`e`")],
        "Two": [Row(("f",), "changed", "new")],
    }
    for wrong in ("a | same", "# One\na | gone", "# One\na | lost | b", "# One\na a | same"):
        with pytest.raises(ConfigError):
            read_names(wrong)


def test_names_that_a_source_has_and_a_table_lacks(tmp_path: Path) -> None:
    source = "class Block:\n def train(self): pass\n def other(self): pass\n\ndef save(): pass\n"
    (tmp_path / "x.py").write_text(source + "def _own(): pass\ndef new(): pass\n")
    assert SCRIPT.lacking("bmtrain", tmp_path) == ["Block.other", "new"]


def test_importing_a_name_that_is_gone_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"Use bmt\.Block"):
        from bmforge.compat.bmtrain import zero_context  # noqa: F401
    with pytest.raises(ImportError, match="new_group"):
        from bmforge.compat.bmtrain.nccl import getUniqueId  # noqa: F401
    with pytest.raises(AttributeError, match="Did you mean 'Block'"):
        importlib.import_module("bmforge.compat.bmtrain").Blok  # noqa: B018
