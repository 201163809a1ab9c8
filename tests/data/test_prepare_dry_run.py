"""`bmforge prepare --dry-run` refuses what `bmforge prepare` refuses, and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bmforge.cli import main

# Options in addition to those of the corpus in OUT, and words of the refusal.
CASES = [
    ("nothing.txt --out NEW", "nothing.txt"),
    ("TEXTS --out FILE", "out_dir="),
    ("TEXTS --out FILE/inside", "FILE"),
    ("TEXTS --out OTHER", "contains notes.txt but no prepared.toml"),
    ("TEXTS --out OUT --validation-fraction 0.3", "prepared with other options"),
    ("TEXTS --out OUT --validation-fraction 3 --overwrite", "validation_fraction=3"),
    ("TEXTS --out NEW --workers -1", "workers=-1"),
    ("TEXTS --out NEW --vocab-size 3", "vocab_size=3"),
    ("TEXTS --out NEW --tokenizer nothing", "nothing"),
    ("TEXTS --out NEW --encoding klingon", "klingon"),
    ("EMPTY --out NEW", "EMPTY"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepare")
    for folder in ("TEXTS", "EMPTY", "OTHER"):
        (place / folder).mkdir()
    words = [f"sentence {number} of a text about numbers.\n" * 3 for number in range(40)]
    for number, text in enumerate(words):
        (place / "TEXTS" / f"{number}.txt").write_text(text)
    (place / "OTHER" / "notes.txt").write_text("x")
    (place / "FILE").write_text("x")
    assert main(["prepare", str(place / "TEXTS"), "--out", str(place / "OUT"), *SIZES]) == 0
    return place


SIZES = ["--vocab-size", "300", "--validation-fraction", "0.2"]


@pytest.mark.parametrize(("options", "words"), CASES, ids=[options for options, _ in CASES])
def test_a_dry_run_refuses_what_the_run_refuses(
    options: str,
    words: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    before = sorted(str(path) for path in place.rglob("*"))
    command = ["prepare", *SIZES, *options.split()]
    errors = []
    for switches in (["--dry-run"], []):
        assert main([*command, *switches]) == 2
        shown = capsys.readouterr().err
        errors.append([line for line in shown.splitlines() if line.startswith("error:")])
    assert errors[0] == errors[1]
    assert words in errors[0][0]
    assert sorted(str(path) for path in place.rglob("*")) == before
