"""What a model was made of: written, read again, and shown."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from bmforge.errors import DataError
from bmforge.logging import get_logger
from bmforge.provenance import (
    LICENSE_FILE,
    Provenance,
    ProvenanceSource,
    describe_provenance,
    read_provenance,
    warn_of_licenses,
    write_provenance,
)

KNOWN = Provenance(
    "CC-BY-SA-4.0",
    (
        ProvenanceSource("base", "org/base", "Apache-2.0"),
        ProvenanceSource("data", "wiki", "CC-BY-SA-4.0", 10, 1000, 300, ("wiki.example", "b|c")),
        ProvenanceSource("data", "crawl", "unknown", 5, 500, 100),
        ProvenanceSource("data", "more", "CC-BY-SA-4.0", 2, 20, 100),
        ProvenanceSource("terms", "crawl", "https://example.org/terms"),
    ),
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_provenance(tmp_path, KNOWN)
    assert read_provenance(tmp_path) == KNOWN
    record = json.loads((tmp_path / LICENSE_FILE).read_text("utf-8"))
    assert record["terms"]["CC-BY-SA-4.0"]["share-alike"] == "section 3(b)"
    assert record["do_not_go_together"] == []


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Earlier versions wrote LICENCE.json with the key "licence"."""
    write_provenance(tmp_path, KNOWN)
    text = (tmp_path / LICENSE_FILE).read_text("utf-8").replace('"license":', '"licence":')
    (tmp_path / LICENSE_FILE).unlink()
    (tmp_path / "LICENCE.json").write_text(text, "utf-8")
    assert read_provenance(tmp_path) == KNOWN
    write_provenance(tmp_path, Provenance("MIT"))
    assert read_provenance(tmp_path) == Provenance("MIT")
    assert not (tmp_path / "LICENCE.json").exists()


def test_the_card_has_the_sums_and_the_use(tmp_path: Path) -> None:
    write_provenance(tmp_path, KNOWN, name="mine")
    card = (tmp_path / "README.md").read_text("utf-8")
    head, text = card.removeprefix("---\n").split("\n---\n", 1)
    assert head.splitlines() == [
        "license: cc-by-sa-4.0",
        "base_model:",
        "- org/base",
        "library_name: bmforge",
    ]
    assert "# mine" in text
    assert "| CC-BY-SA-4.0 | 12 | 1,020 | 400 | 80.0 |" in text
    assert "| unknown | 5 | 500 | 100 | 20.0 |" in text
    assert "wiki.example, b/c" in text
    assert "- name the authors and the source (CC-BY-SA-4.0)" in text
    assert "the license of some parts is unknown" in text
    assert "https://example.org/terms" in text


def test_a_card_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine\n")
    write_provenance(tmp_path, KNOWN)
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    assert read_provenance(tmp_path) == KNOWN
    write_provenance(tmp_path, Provenance())
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_what_is_no_longer_known_does_not_stay(tmp_path: Path) -> None:
    write_provenance(tmp_path, KNOWN)
    write_provenance(tmp_path, Provenance())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("head", "license"),
    [
        ("license: apache-2.0", "Apache-2.0"),
        ("language: en\nlicense: 'cc-by-sa-3.0'\ntags:\n- x", "CC-BY-SA-3.0"),
        ("license: other\nlicense_name: my-own\nlicense_link: LICENSE", "my-own"),
        ("license: other", ""),
        ("tags: []", ""),
    ],
)
def test_the_head_of_a_card_says_the_license(tmp_path: Path, head: str, license: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\nlicense: mit\n")
    assert read_provenance(tmp_path) == Provenance(license)


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    write_provenance(tmp_path, KNOWN)
    record = json.loads((tmp_path / LICENSE_FILE).read_text("utf-8"))
    for damaged in ({**record, "format": 9}, {"format": 1}, {**record, "made_of": [{"x": 1}]}):
        (tmp_path / LICENSE_FILE).write_text(json.dumps(damaged))
        with pytest.raises(DataError, match=r"LICENSE\.json"):
            read_provenance(tmp_path)
    assert read_provenance(tmp_path / "nowhere") == Provenance()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged, which goes to handlers of our own."""
    get_logger().addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    yield caplog
    get_logger().removeHandler(caplog.handler)


def test_what_does_not_fit_is_said_with_both_clauses(said: pytest.LogCaptureFixture) -> None:
    known = KNOWN.joined([ProvenanceSource("data", "papers", "CC-BY-NC-4.0"), KNOWN.parts[0]])
    assert len(known.parts) == len(KNOWN.parts) + 1
    warn_of_licenses("here", known)
    assert len(said.messages) == 2
    assert any("section 3(b)" in line and "section 2(a)(1)" in line for line in said.messages)
    assert any("license is unknown: data 'crawl'" in line for line in said.messages)
    lines = describe_provenance(known)
    assert lines[0] == "license: CC-BY-SA-4.0"
    assert any(line.startswith("conflict: ") for line in lines)
    assert describe_provenance(Provenance()) == ["license: unknown"]
