"""Licenses in `prepare`: said by sources or by the user, summed up, and chosen by a policy."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bmforge.data import PrepareConfig, prepare, read_documents
from bmforge.data.prepare.record import RECORD_NAME, read_record
from bmforge.data.report import write_corpus_report
from bmforge.data.sources.html import parse_page
from bmforge.data.sources.record import ReadOptions, Where
from bmforge.data.store.columns import columns_path, read_columns
from bmforge.data.store.sharded import open_store
from bmforge.errors import ConfigError

CONFIG = PrepareConfig(vocab_size=300, validation_fraction=0.0, shard_bytes=700)
SAID = [
    ("https://creativecommons.org/licenses/by-sa/4.0/", "https://wiki.example/a", ""),
    ("CC BY-SA 4.0", "https://wiki.example/b", "https://wiki.example/terms"),
    ("cc-by-nc-4.0", "https://papers.example/c", ""),
    ("mit", "", ""),
    ("ask me", "", ""),
    ("", "http://[broken", ""),
    ("", "", ""),
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    rows = [
        {"text": f"Text {n} about a mill, a river and a bridge. " * 3, "url": url, "license": said}
        | ({"terms": terms} if terms else {})
        for n, (said, url, terms) in enumerate(SAID * 3)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in" / "a.jsonl").write_text(lines)
    (tmp_path / "in" / "deep" / "b.txt").write_text("A text that says nothing of a license.")
    return tmp_path


def test_sums_are_those_of_the_documents(corpus: Path) -> None:
    report = prepare(corpus / "in", corpus / "out", CONFIG)
    summary = read_record(corpus / "out")[0].summary
    assert summary == report.summary
    assert summary is not None
    documents = {name: counts[0] for name, counts in summary.licenses.items()}
    assert documents == {"CC-BY-SA-4.0": 6, "CC-BY-NC-4.0": 3, "MIT": 3, "ask me": 3, "unknown": 7}
    hosts = {name: counts[0] for name, counts in summary.origins["CC-BY-SA-4.0"].items()}
    assert hosts == {"wiki.example": 6}
    assert set(summary.origins["unknown"]) == {"a.jsonl", "b.txt"}
    assert summary.terms["https://wiki.example/terms"][0] == 3
    for column in range(3):
        total = sum(counts[column] for counts in summary.licenses.values())
        assert total == (report.documents, report.train.text_bytes, report.train.tokens)[column]
    page = write_corpus_report(corpus / "out").read_text("utf-8")
    assert "CC-BY-NC-4.0" in page
    assert "https://wiki.example/terms" in page


FORMS = [
    (["CC-BY-NC-4.0"], "CC-BY-NC-4.0"),
    ([{"id": 1, "name": "Attribution License", "url": SAID[0][0]}], "CC-BY-SA-4.0"),
    ({"key": "mit", "name": "MIT License", "spdx_id": "MIT"}, "MIT"),
    (["mit", "cc-by-nc-4.0", "MIT"], "MIT AND CC-BY-NC-4.0"),
    (["MIT OR GPL-3.0-only", "CC BY 4.0 (Germany)"], "(MIT OR GPL-3.0-only) AND CC-BY-4.0"),
    (["MIT", "ours) or (mit"], "MIT AND unknown"),
    (["MIT", "ask me"], "MIT AND ask me"),
    ({"tier": 3}, "unknown"),
    (7, "unknown"),
    ("\ud800", "unknown"),
    *((missing, "CC0-1.0") for missing in (None, "", [], {}, [None], {"name": None}, math.nan)),
]


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_license_of_any_form_is_one_that_the_source_states(
    tmp_path: Path, is_nested: bool
) -> None:
    """`license` replaces only a missing license, and a policy drops what it cannot recognize."""
    rows = [{"license": said} for said, _ in FORMS]
    rows = [{"metadata": row} if is_nested else row for row in rows]
    rows = [row | {"text": f"Text {n} about a mill. " * 9} for n, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(CONFIG, license=("CC0-1.0",))
    report = prepare(tmp_path / "a.jsonl", tmp_path / "all", config)
    assert report.summary is not None
    documents = {name: counts[0] for name, counts in report.summary.licenses.items()}
    assert documents == Counter(expected for _, expected in FORMS)
    config = replace(config, license_policy="commercial")
    left = prepare(tmp_path / "a.jsonl", tmp_path / "some", config).documents
    assert left == sum(e in ("MIT", "CC0-1.0", "CC-BY-SA-4.0") or "OR" in e for _, e in FORMS)


def test_metadata_of_a_table_has_the_types_of_its_columns(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    day = datetime(2024, 5, 1, tzinfo=UTC)
    row = {
        "text": "A text.",
        "license": ["CC-BY-4.0", "MIT"],
        "terms": ["https://a.example/terms", "https://b.example/terms"],
        "metadata": {"url": ["https://a.example/"], "language": [{"code": "en"}]},
        "date": day,
    }
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    for stamp in (day, day.timestamp(), 1000 * int(day.timestamp()), 2024):
        line = row | {"date": stamp if isinstance(stamp, float | int) else day.isoformat()}
        with (tmp_path / "b.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    *whole, year = read_documents([tmp_path / "a.parquet", tmp_path / "b.jsonl"])
    assert len(whole) == 4
    for document in whole:
        assert datetime.fromisoformat(document.date) == day
        assert document.license == "CC-BY-4.0 AND MIT"
        assert document.terms == "https://a.example/terms, https://b.example/terms"
        assert (document.url, document.language) == ("https://a.example/", "en")
    assert year.date == "2024"


def test_records_of_earlier_versions_are_read(corpus: Path) -> None:
    """Earlier versions spelled settings, sums and the column of the store "licence"."""
    out = corpus / "out"
    prepare(corpus / "in", out, CONFIG)
    expected, columns = read_record(out)[0], read_columns(open_store(out / "train" / "tokens"))
    record = out / RECORD_NAME
    text = record.read_text("utf-8")
    assert "license_policy = " in text
    assert "[summary.licenses" in text
    text = text.replace("license_policy = ", "licence_policy = ").replace(
        "[summary.licenses", "[summary.licences"
    )
    record.write_text(text, "utf-8")
    assert read_record(out)[0] == expected
    documents = columns_path(out / "train" / "tokens")
    head, rows = documents.read_bytes().split(b"\n", 1)
    documents.write_bytes(head.replace(b'"license"', b'"licence"') + b"\n" + rows)
    assert read_columns(open_store(out / "train" / "tokens")).names == columns.names


def test_the_user_says_what_sources_do_not(corpus: Path) -> None:
    said = ("CC-BY-4.0", f"{corpus / 'in' / '..' / 'in' / 'deep'}=CC0-1.0")
    report = prepare(corpus / "in", corpus / "out", replace(CONFIG, license=said))
    assert report.summary is not None
    documents = Counter({name: counts[0] for name, counts in report.summary.licenses.items()})
    assert documents["CC0-1.0"] == 1
    assert documents["CC-BY-4.0"] == 6
    assert documents["ask me"] == 3
    assert "unknown" not in documents


@pytest.mark.parametrize(
    ("policy", "left"), [("known", 12), ("commercial", 9), ("permissive", 3), ("any", 22)]
)
def test_a_policy_drops_with_a_reason(corpus: Path, policy: str, left: int) -> None:
    config = replace(CONFIG, license_policy=policy)
    report = prepare(corpus / "in", corpus / "out", config)
    assert report.documents == left
    assert report.funnel is not None
    gone = report.funnel.dropped.get("license")
    assert (gone.documents if gone else 0) == 22 - left
    if gone:
        lines = (corpus / "out" / "dropped.jsonl").read_text("utf-8").splitlines()
        assert {json.loads(line)["bound"] for line in lines} == {policy}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"license": ("CC-BY-4",)}, "Did you mean 'CC-BY-4.0'"),
        ({"license": ("in/deep.txt=MIT",)}, "no input file is .*deep.txt"),
        ({"license": ("MIT", "CC0-1.0")}, "two licenses for all files"),
        ({"license_policy": "permisive"}, "Did you mean 'permissive'"),
    ],
)
def test_what_is_not_known_is_refused(corpus: Path, change: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare(corpus / "in", corpus / "out", replace(CONFIG, **change))
    assert not (corpus / "out").exists()


def test_a_page_says_its_license_and_terms() -> None:
    text = "<p>" + "The river rose in the night, and the mill stood still. " * 9
    head = (
        '<link rel="license" href="https://creativecommons.org/licenses/by/4.0/">'
        '<meta name="tdm-policy" content="https://example.org/policy.json">'
    )
    page = parse_page(
        f"<html><head>{head}</head><body>{text}</body></html>".encode(),
        Where("page.html"),
        ReadOptions(),
    )
    assert page.license == "https://creativecommons.org/licenses/by/4.0/"
    assert page.terms == "https://example.org/policy.json"
