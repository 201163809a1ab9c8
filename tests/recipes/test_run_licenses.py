"""Licenses through the house: from prepared text to exports, deltas, quantised and GGUF files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import write_jsonl

from bmforge.cli import main
from bmforge.data import PrepareConfig, parse_conditions, prepare
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.provenance import (
    LICENSE_FILE,
    Provenance,
    ProvenanceSource,
    read_provenance,
    write_provenance,
)
from bmforge.recipes.run_provenance import parts_of_corpus
from bmforge.tune.delta import load_delta

TEXT = "the mill stood at the river and the wheel went round all night long "
MODEL = ["--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2"]
MODEL += ["--model.max-seq-len", "32", "--model.vocab-size", "300"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two licenses and one unknown, and a run on it."""
    root = tmp_path_factory.mktemp("licenses")
    rows: list[dict[str, Any]] = [
        {"text": f"{TEXT} {n}", "license": ("cc-by-sa-4.0", "cc-by-nc-4.0", "")[n % 3]}
        for n in range(24)
    ]
    write_jsonl(root / "texts.jsonl", rows)
    prepare(root / "texts.jsonl", root / "corpus", PrepareConfig(vocab_size=300))
    assert main(command(root, "first", "--model", "gpt2", *MODEL, "--license", "mit")) == 0
    return root


def command(root: Path, name: str, *more: str) -> list[str]:
    return [
        *("train", "pretrain", "--run-dir", str(root / name)),
        *("--data.paths", str(root / "corpus"), "--data.seq-len", "16", "--train.steps", "1"),
        *("--data.global-batch-size", "2", "--data.micro-batch-size", "2", *more),
    ]


def licenses(known: Provenance) -> dict[str, int]:
    return {part.license: part.documents for part in known.parts if part.kind == "data"}


def test_an_export_says_what_it_was_made_of(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = read_provenance(place / "first" / "export")
    assert known.license == "MIT"
    assert licenses(known) == {"CC-BY-SA-4.0": 8, "CC-BY-NC-4.0": 8, "unknown": 8}
    log = (place / "first" / "log.txt").read_text("utf-8")
    for clause in (
        "section 3(b)",
        "section 2(a)(1)",
        "MIT (non-commercial, which does not require",
    ):
        assert clause in log
    assert "license is unknown: data 'corpus'" in log
    card = (place / "first" / "export" / "README.md").read_text("utf-8")
    assert card.startswith("---\nlicense: mit\n")
    assert "\n# first\n" in card
    assert main(["info", str(place / "first" / "export")]) == 0
    shown = capsys.readouterr().out
    assert "license: MIT" in shown
    assert "data corpus: license CC-BY-NC-4.0, 8 documents" in shown


def test_it_goes_along_with_every_copy(place: Path, tmp_path: Path) -> None:
    source = place / "first" / "export"
    known = read_provenance(source)
    model = AutoModel.from_pretrained(source)
    model.save_pretrained(tmp_path / "saved")
    assert main(["convert", str(source), str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    assert main(["quantize", str(source), str(tmp_path / "int8"), "--scheme", "int8"]) == 0
    packed = AutoModel.from_pretrained(source, quantize="int8")
    packed.save_pretrained(tmp_path / "packed")
    for name in ("saved", "half", "int8", "packed"):
        assert read_provenance(tmp_path / name) == known
        assert f"# {name}" in (tmp_path / name / "README.md").read_text("utf-8")


def test_a_gguf_file_has_it_too(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    source = place / "first" / "export"
    assert main(["convert", str(source), str(tmp_path / "a.gguf"), "--type", "f32"]) == 0
    assert read_provenance(tmp_path / "a.gguf") == read_provenance(source)
    assert main(["convert", str(tmp_path / "a.gguf"), str(tmp_path / "back")]) == 0
    assert read_provenance(tmp_path / "back") == read_provenance(source)


def test_who_goes_on_from_it_has_it_as_a_base(place: Path) -> None:
    model = str(place / "first" / "export")
    assert main(command(place, "second", "--model", model)) == 0
    known = read_provenance(place / "second" / "export")
    assert known.license == ""
    assert known.parts[0] == ProvenanceSource("base", "export", "MIT")
    assert licenses(known) == {"CC-BY-SA-4.0": 8, "CC-BY-NC-4.0": 8, "unknown": 8}


def test_a_delta_takes_it_along_and_a_merge_joins_it(place: Path, tmp_path: Path) -> None:
    base = place / "first" / "export"
    more = ("--model", str(base), "--adapter.kind", "lora", "--adapter.rank", "2")
    assert main(command(place, "delta", *more)) == 0
    delta_dir = place / "delta" / "export"
    known = read_provenance(delta_dir)
    assert known.parts[0] == ProvenanceSource("base", "export", "MIT")
    assert "corpus (CC-BY-NC-4.0)" in (delta_dir / "README.md").read_text("utf-8")
    write_provenance(delta_dir, known.joined([ProvenanceSource("data", "mine", "CC0-1.0", 3)]))
    model = AutoModel.from_pretrained(base)
    load_delta(model, delta_dir).merge()
    model.save_pretrained(tmp_path / "merged")
    assert main(["merge", str(delta_dir), "--out", str(tmp_path / "card")]) == 0
    assert "\n# card\n" in (tmp_path / "card" / "README.md").read_text("utf-8")
    merged = read_provenance(tmp_path / "merged")
    assert merged.license == ""  # nobody has said one for this
    assert merged.parts.count(ProvenanceSource("base", "export", "MIT")) == 1
    assert ProvenanceSource("data", "mine", "CC0-1.0", 3) in merged.parts


def test_nothing_is_written_where_nothing_is_known(tmp_path: Path, place: Path) -> None:
    model = AutoModel.from_pretrained(place / "first" / "export")
    model.provenance = Provenance()
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / LICENSE_FILE).exists()
    again = AutoModel.from_pretrained(tmp_path / "plain")
    assert again.provenance == Provenance()
    assert torch.equal(next(again.parameters()), next(model.parameters()))


def test_chosen_documents_alone_are_named(place: Path) -> None:
    """Conditions, of the run or of a path, leave the others out of what the export is made of."""
    corpus = place / "corpus"
    whole = {part.license: part for part in parts_of_corpus(str(corpus))}
    for license, part in whole.items():
        said = "license!=CC*" if license == "unknown" else f"license={license}"
        (found,) = parts_of_corpus(str(corpus), parse_conditions([said]))
        assert (found.license, found.tokens) == (license, part.tokens)
        assert 8 <= found.documents <= 9  # one that was cut is in both splits
    some = command(place, "some", "--model", "gpt2", *MODEL, "--data.where", "license=*SA*")
    assert main(some) == 0
    assert licenses(read_provenance(place / "some" / "export")) == {"CC-BY-SA-4.0": 8}
    card = (place / "some" / "export" / "README.md").read_text("utf-8")
    assert "CC-BY-NC" not in card


def test_an_unknown_license_is_refused_before_training(place: Path, tmp_path: Path) -> None:
    options = command(place, str(tmp_path / "run"), "--model", "gpt2", *MODEL)
    assert main([*options, "--license", "mitt"]) == 2
    assert not (tmp_path / "run").exists()


def test_a_record_that_is_damaged_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoModel.from_pretrained(place / "first" / "export").save_pretrained(tmp_path / "m")
    (tmp_path / "m" / LICENSE_FILE).write_text(json.dumps({"format": 1}))
    assert main(["info", str(tmp_path / "m")]) == 2
    assert LICENSE_FILE in capsys.readouterr().err


def test_licenses_are_reported_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are reported when a run begins, and not by later commands."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level(logging.INFO)

    def is_reported(*words: str) -> bool:
        caplog.clear()
        assert main(words) == 0
        return any(" license" in record.getMessage() for record in caplog.records)

    base = str(place / "first" / "export")
    run = command(place, "once", "--model", base, "--adapter.kind", "lora", "--adapter.rank", "2")
    assert is_reported(*run)
    assert not is_reported(*run)
    export = str(place / "once" / "export")
    assert not is_reported("merge", export, "--out", str(tmp_path / "merged"))
    assert not is_reported("quantize", export, str(tmp_path / "int8"), "--scheme", "int8")
    assert not is_reported("convert", str(tmp_path / "merged"), str(tmp_path / "half"))
    for directory in ("merged", "int8", "half"):
        assert read_provenance(tmp_path / directory).conflicts()
