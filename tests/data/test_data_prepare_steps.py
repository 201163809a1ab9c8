"""Published steps in `prepare`: they are asked for by a setting, and every drop has its rule."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bmforge.data import PrepareConfig, prepare, show_preparation
from bmforge.data.clean.drop import Drop
from bmforge.data.clean.filter_step import RuleFilter
from bmforge.data.clean.rules.gopher import GOPHER_QUALITY
from bmforge.data.prepare.funnel import Amount
from bmforge.data.prepare.steps import choose_steps
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, DataError

CONFIG = PrepareConfig(vocab_size=300, validation_fraction=0.2, shard_bytes=1500)
NEWS = (
    "The council met on Monday to talk about the new bridge over the {0}. Several people who "
    "live near the {1} said that they have waited for it since the flood of last year. The mayor "
    "promised an answer within a month. Nobody knew what the {2} would cost, and a report is to "
    "follow. Two members asked for a vote. The meeting ended late in the evening."
)
PLACES = [("river", "mill", "work"), ("lake", "church", "steel"), ("valley", "school", "road")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sound texts, and four kinds of texts that rules drop, in one file."""
    folder = tmp_path_factory.mktemp("judged")
    texts = [NEWS.format(*place) + tail for place in PLACES for tail in ("", " It was cold.")]
    texts += ["Subscribe now. " * 40, "Home", "Shop", " ", NEWS.format("a", "b", "{c}")]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text("".join(lines))
    return folder


def dropped(out: Path) -> list[dict[str, object]]:
    """Return the lines of dropped.jsonl."""
    return [json.loads(line) for line in (out / "dropped.jsonl").open()]


def test_rules_drop_what_they_drop_alone(corpus: Path, tmp_path: Path) -> None:
    """Against the rules as a function of one document."""
    config = replace(CONFIG, rules="english")
    report = prepare(corpus, tmp_path, config)
    judge, expected, kept = RuleFilter("english"), Counter({"empty": 1}), 0
    for line in (corpus / "texts.jsonl").open():
        text = json.loads(line)["text"].strip()
        found = judge(Document(text, "x")) if text else None
        if isinstance(found, Drop):
            expected[found.rule] += 1
        kept += isinstance(found, Document)
    assert kept == report.documents == 6
    assert len(expected) == 4
    assert report.funnel is not None
    assert {rule: n.documents for rule, n in report.funnel.dropped.items()} == expected
    assert report.funnel.missing() == Amount()
    lines = dropped(tmp_path)
    assert Counter(str(line["rule"]) for line in lines) == expected
    (short, *_) = (line for line in lines if line["rule"] == "gopher_quality.short_doc")
    assert (short["value"], short["bound"]) == (1, 50)
    assert prepare(corpus, tmp_path, config).reused
    with pytest.raises(ConfigError, match="rules='english' in that corpus, 'none' now"):
        prepare(corpus, tmp_path, CONFIG)


def test_workers_judge_alike(corpus: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, rules="mixed")
    for workers in (0, 1):
        prepare(corpus, tmp_path / str(workers), replace(config, workers=workers))
    one, other = (
        {p.name: p.read_bytes() for p in (tmp_path / name).rglob("tok*.*")} for name in "01"
    )
    assert one == other
    assert dropped(tmp_path / "0") == dropped(tmp_path / "1")


def test_other_rules_redo_the_first_stage(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, rules="english", keep_stages=True)
    prepare(corpus, tmp_path, config)

    def to_do(rules: str) -> list[str]:
        states = show_preparation(corpus, tmp_path, replace(config, rules=rules))
        return [state.stage for state in states if state.done < state.parts]

    assert to_do("english") == []
    assert to_do("mixed")[0] == "documents"
    sets = {"gopher_quality": replace(GOPHER_QUALITY, version=GOPHER_QUALITY.version + 1)}
    monkeypatch.setattr("bmforge.data.clean.rules.RULE_SETS", {**judge_sets(), **sets})
    assert to_do("english")[0] == "documents"


def judge_sets() -> dict[str, object]:
    """Return the rule sets as they are."""
    from bmforge.data.clean.rules import RULE_SETS

    return dict(RULE_SETS)


def test_unknown_rules_are_refused_before_anything_is_written(corpus: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, rules="englsh")
    with pytest.raises(ConfigError, match="Did you mean 'english'"):
        prepare(corpus, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_rules_that_leave_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Home\n")
    with pytest.raises(DataError, match=r"all 1 documents.*gopher_quality\.short_doc \(1\)"):
        prepare(tmp_path / "a.txt", tmp_path / "out", replace(CONFIG, rules="english"))


def test_without_settings_only_normalise_runs() -> None:
    assert [step.name for step in choose_steps(PrepareConfig())] == ["normalise"]


def test_listed_words_and_hosts_are_dropped(tmp_path: Path) -> None:
    pytest.importorskip("ahocorasick_rs")
    rows = [
        {"text": "A page about rivers.", "url": "http://good.example/1"},
        {"text": "A page about mills.", "url": "https://shop.bad.example/2"},
        {"text": "A page about badminton.", "url": "http://notbad.example/3"},
        {"text": "Casino, casino! And a casino.", "url": ""},
        {"text": "在线赌博网站", "url": ""},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.txt").write_text("# mine\ncasino\n\n赌博\n", "utf-8")
    (tmp_path / "hosts.txt").write_text("bad.example\n")
    config = replace(
        CONFIG,
        bad_words=str(tmp_path / "words.txt"),
        bad_hosts=str(tmp_path / "hosts.txt"),
        keep_stages=True,
        keep_dropped=True,
    )
    report = prepare(tmp_path / "in.jsonl", tmp_path / "out", config)
    assert report.documents == 2
    gone = {line["place"]: str(line["rule"]) for line in dropped(tmp_path / "out")}
    assert gone == {"2": "listed_host", "4": "listed_words", "5": "listed_words"}
    states = show_preparation(tmp_path / "in.jsonl", tmp_path / "out", config)
    assert all(state.done == state.parts for state in states)
    (tmp_path / "words.txt").write_text("casino\n")
    states = show_preparation(tmp_path / "in.jsonl", tmp_path / "out", config)
    assert states[0].done == 0
    (tmp_path / "words.txt").write_text("# nothing\n")
    for path in (tmp_path / "words.txt", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="bad_words="):
            choose_steps(replace(config, bad_words=str(path)))
