"""A rerun that is refused changes no file of the run, and its error names the cause."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_preferences_run import SmallPreferences, make_config, run, start  # noqa: F401

from bmforge.errors import BmforgeError, ConfigError
from bmforge.recipes.inputs.file_digests import describe_change, digest_files


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def edit_data(folder: Path) -> None:
    file = folder / "pairs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[3]["chosen"][0]["content"] = "yes but"
    file.write_text("\n".join(map(json.dumps, rows)))


def edit_template(folder: Path) -> None:
    file = folder / "base" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = "a" + settings["chat_template"]
    file.write_text(json.dumps(settings))


def damage_checkpoints(folder: Path) -> None:
    for file in folder.glob("run/checkpoints/step-*/manifest.json"):
        file.write_bytes(file.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("edit", "changes", "message"),
    [
        (edit_data, {}, "^pairs.jsonl changed since the run began .*--override data"),
        (edit_template, {}, "files did not .the tokenizer, its chat template"),
        (damage_checkpoints, {}, "checkpoints in .* are damaged"),
        (id, {"seed": 5}, "contains another run .seed: "),
    ],
    ids=["data", "template", "checkpoints", "seed"],
)
def test_a_refused_rerun_changes_no_file(
    start: Path,  # noqa: F811
    edit: Any,
    changes: dict[str, Any],
    message: str,
) -> None:
    run(make_config(start, "run", 2, reference="precomputed"))
    edit(start)
    before = contents(start / "run")
    with pytest.raises(BmforgeError, match=message):
        run(make_config(start, "run", 3, reference="precomputed", **changes))
    assert contents(start / "run") == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": -5}, r"^data\.seq_len=-5 must be at least 1\.$"),
        ({"paths": ("nowhere.jsonl",)}, "^data.paths: the file 'nowhere.jsonl' does not exist"),
    ],
)
def test_a_mistake_is_reported_before_the_earlier_run(
    change: dict[str, Any],
    message: str,
    start: Path,  # noqa: F811
) -> None:
    """Not as a difference from the run whose directory it is."""
    run(make_config(start, "run", 2))
    config = make_config(start, "run", 3)
    config.data = dataclasses.replace(config.data, **change)
    with pytest.raises(BmforgeError, match=message):
        run(config)


def test_a_rerun_with_the_same_config_keeps_its_log(start: Path) -> None:  # noqa: F811
    """run.toml then stays as it is, which does not mean that the run was refused."""
    file = start / "run" / "log.txt"
    run(make_config(start, "run", 2))
    first = file.read_text()
    run(make_config(start, "run", 2))
    assert file.read_text().startswith(first)
    assert "resumed at step 2 of 2" in file.read_text()[len(first) :]


def test_a_changed_file_is_accepted_on_purpose(start: Path) -> None:  # noqa: F811
    run(make_config(start, "run", 2))
    edit_data(start)
    with pytest.raises(ConfigError, match=r"^pairs\.jsonl changed"):
        run(make_config(start, "run", 3))
    assert [row["step"] for row in run(make_config(start, "run", 3, override=("data",)))] == [
        1, 2, 3,
    ]  # fmt: skip
    assert "steps = 3" in (start / "run" / "run.toml").read_text()


def test_the_changed_files_are_named(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for file in files:
        file.write_text(file.name)
    before = digest_files(files)
    assert "files did not" in describe_change(before, digest_files(files[::-1]))
    files[1].write_text("new")
    assert describe_change(before, digest_files(files)).startswith("b.jsonl changed")
    assert describe_change(before, digest_files(files[:1])).startswith(
        "data.paths no longer contains b.jsonl, c.jsonl"
    )
    assert describe_change(None, before).startswith("the training examples changed")
    assert digest_files([tmp_path, tmp_path / "none"]) == []
