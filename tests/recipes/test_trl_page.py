"""The page on TRL names options that exist, and every argument of TRL's configs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from bmforge.cli.train_help import SHORT_NAMES
from bmforge.cli.train_options import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "migrating" / "trl.md"
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| TRL ")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_options_exist(row: tuple[str, str]) -> None:
    """Every option of a row is one of `train`; a row without an option says why."""
    options = re.findall(r"--[a-z0-9.-]+", row[1])
    known = {f"--{name}" for name in FIELDS} | set(SHORT_NAMES)
    known |= {"--model", "--data", "--data.grad-accum-steps", "--ds-config"}
    assert set(options) <= known
    words = ("missing", "not needed", "always", "field `", "bmforge train")
    assert options or any(word in row[1] for word in words)


@pytest.mark.long
def test_every_argument_is_named() -> None:
    trl = pytest.importorskip("trl", reason="reads the arguments of TRL (pip install trl)")
    transformers = pytest.importorskip("transformers")
    names = {name for row in ROWS for name in re.findall(r"`([a-z0-9_]+)", row[0])}
    common = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    for config in (trl.GRPOConfig, trl.DPOConfig, trl.RewardConfig, trl.RLOOConfig):
        own = {field.name for field in dataclasses.fields(config)} - common
        assert {name for name in own - names if not name.startswith("vllm_")} == set()
