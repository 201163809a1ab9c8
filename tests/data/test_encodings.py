"""Pages with right, wrong and missing labels, whole and damaged, against their source text."""

from __future__ import annotations

import itertools
import random

import pytest

from bmforge.data import PrepareConfig, prepare, read_documents
from bmforge.data.sources.document import Document
from bmforge.data.sources.encoding import decode
from bmforge.data.sources.html import parse_page
from bmforge.data.sources.record import ReadOptions, Where
from bmforge.errors import ConfigError, DataError

pytest.importorskip("resiliparse")

TEXTS = {
    "german": "Die Fähre fährt früh über das größere Gewässer, und die Möwen hören schön zu. ",
    "french": "Les élèves étaient très étonnés, déjà, à l'école de Genève où l'été s'achève. ",
    "russian": "Паром на северные острова уходит в шесть часов утра, и люди работают в порту. ",
    "greek": "Το πλοίο για τα βόρεια νησιά φεύγει στις έξι το πρωί από το μικρό λιμάνι μας. ",
    "chinese": "清晨六点，开往北部岛屿的渡轮准时离开码头，乘船的人大多在对岸的小港口工作。",
    "traditional": "清晨六點，開往北部島嶼的渡輪準時離開碼頭，乘船的人大多在對岸的小港口工作。",
    "japanese": "北の島々へ向かうフェリーは毎朝六時に出発します。霧が濃いときには船長が待ちます。",
    "korean": "북쪽 섬으로 가는 배는 아침 여섯 시에 떠나고 사람들은 작은 항구에서 일한다. ",
}
# Language, encoding of the bytes, labels that are tried.
SITUATIONS = [
    *itertools.product(("german", "french"), ("utf-8",), ("iso-8859-1", "windows-1251", "gbk")),
    *itertools.product(("russian", "greek"), ("utf-8",), ("iso-8859-1", "windows-1251", "big5")),
    *itertools.product(("chinese", "japanese", "korean"), ("utf-8",), ("latin1", "gb2312", "sjis")),
    *(
        (language, encoding, label)
        for language, encoding in (
            ("german", "cp1252"),
            ("french", "iso-8859-1"),
            ("russian", "cp1251"),
            ("russian", "koi8-r"),
            ("greek", "cp1253"),
            ("chinese", "gb2312"),
            ("chinese", "gb18030"),
            ("traditional", "big5"),
            ("japanese", "shift_jis"),
            ("japanese", "euc_jp"),
            ("japanese", "iso2022_jp"),
            ("korean", "euc-kr"),
        )
        for label in (encoding.replace("_", "-").replace("cp125", "windows-125"), "")
    ),
    *((name, "gb18030", "iso-8859-1") for name in ("chinese",)),
    *((name, "euc_jp", "iso-8859-1") for name in ("japanese",)),
    *((name, "big5", "windows-1252") for name in ("traditional",)),
    *((name, "utf-16", "") for name in ("german", "chinese")),
    *((name, "utf-8-sig", "iso-8859-1") for name in ("german", "chinese")),
]


def page(language: str, times: int = 6) -> str:
    return f"<html><body><p>{TEXTS[language] * times}</p></body></html>"


def is_silently_wrong(text: str, original: str) -> bool:
    """Return True if a character is there that the original does not have in this order."""
    rest = iter(original)
    return not all(character in rest for character in text.replace("\ufffd", ""))


@pytest.mark.parametrize(("language", "encoding", "label"), SITUATIONS)
def test_a_sound_page_is_read_whatever_its_label(language, encoding, label):
    text = page(language)
    decoded = decode(text.encode(encoding), "x", [label])
    assert (decoded.text, decoded.replaced) == (text, 0)


def test_there_are_forty_situations():
    assert len(SITUATIONS) >= 40


@pytest.mark.parametrize("label", ["", "utf-8", "iso-8859-1", "windows-1251", "gbk"])
@pytest.mark.parametrize("language", TEXTS)
def test_one_bad_byte_costs_one_character(language, label):
    """For UTF-8, under any label and at any place; strict reading refuses the page by name."""
    draw = random.Random(f"{language} {label}")
    raw = page(language).encode()
    for _ in range(25):
        at = draw.randrange(len(raw))
        bad = raw[:at] + bytes([draw.choice((0xFF, 0xFE, 0xC0))]) + raw[at:]
        decoded = decode(bad, "x", [label])
        assert 1 <= decoded.replaced <= 4
        assert not is_silently_wrong(decoded.text, page(language))
        with pytest.raises(DataError, match="invalid characters"):
            decode(bad, "x", [label], errors="strict")


@pytest.mark.parametrize(("encoding", "language"), [("gb2312", "chinese"), ("big5", "traditional")])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_bad_byte_in_a_chinese_page_loses_neither_page_nor_sense(encoding, language, labelled):
    draw = random.Random(encoding)
    text = page(language)
    kept = 0
    for _ in range(100):
        at = draw.randrange(len(text))
        raw = text[:at].encode(encoding) + b"\xff" + text[at:].encode(encoding)
        decoded = decode(raw, "x", [encoding] if labelled else [])
        assert decoded.replaced
        assert not is_silently_wrong(decoded.text, page(language))
        kept += 1
    assert kept >= 99


@pytest.mark.parametrize("language", TEXTS)
def test_a_zero_byte_does_not_cost_a_page(language):
    raw = page(language, 60).encode()
    at = raw.index(b"<p>") + 3
    sound = parse_page(raw, Where("x"), ReadOptions())
    found = parse_page(raw[:at] + b"\0" + raw[at:], Where("x"), ReadOptions())
    assert isinstance(found, Document)
    assert found.text == sound.text
    assert found.scores["replaced_characters"] == 1
    for bad, errors in ((b"\0", "strict"), (b"\0" * 99, "replace")):
        with pytest.raises(DataError, match="binary"):
            parse_page(raw[:at] + bad + raw[at:], Where("x"), ReadOptions(errors=errors))


@pytest.mark.parametrize("language", TEXTS)
def test_a_page_that_is_cut_off_inside_a_character_is_kept(language):
    raw = page(language).encode()
    wide = [at for at, byte in enumerate(raw) if byte & 0xC0 == 0x80]
    for at in wide[-20:]:
        decoded = decode(raw[:at], "x")
        assert decoded.replaced == 1
        assert page(language).startswith(decoded.text[:-1])


def test_windows_pages_may_have_bytes_without_a_character():
    raw = "naïve café".encode("latin-1") + b"\x81"
    assert decode(raw, "x", ["ISO-8859-1"]).text == "naïve café\x81"


@pytest.mark.parametrize(
    "text",
    [
        "She said “it is a fine day” and left – without her coat. It’s raining…",
        "Le café est très cher à Genève, où il pleut.",
        "Die Fähre fährt früh über das Wasser.",
        "¿Dónde está la niña que canta?",
        "Il perché è così, e non più di una città.",
        "O pão não é uma opção.",
        "På grund av väder och vind, det är så.",
        "One café of a long English text. " + "It has few accents and many plain words. " * 25,
    ],
)
def test_a_short_western_text_is_read(text):
    decoded = decode(text.encode("cp1252"), "x", errors="strict")
    assert (decoded.text, decoded.encoding) == (text, "cp1252")


OTHER = [
    ("Plzeň a Kroměříž", "cp1250"),
    ("Łódź jest duża", "cp1250"),
    ("Árvíztűrő tükör", "cp1250"),
    ("Çok güzel bir şehir, değil mi", "cp1254"),
    ("Привет", "cp1251"),
    ("The word привет means hello.", "koi8-r"),
    ("The word 中 means middle.", "gb18030"),
    ("The word 一 means one.", "big5"),
    ("The word 日 means sun, and ア is a sound.", "shift_jis"),
    ("The word 한국 is the name of a land.", "euc-kr"),
    ("The word και means and.", "cp1253"),
    ("It’s “fine” – with a crème brûlée.", "mac_roman"),
    ("A crème brûlée and the café.", "cp850"),
]


@pytest.mark.parametrize(("text", "encoding"), OTHER)
def test_a_short_text_in_another_encoding_is_read_as_named_or_refused(text, encoding, tmp_path):
    """The hint of the error is true: named, the encoding gives the text in every kind of file."""
    raw = text.encode(encoding)
    with pytest.raises(DataError, match="--encoding"):
        decode(raw, "x", errors="strict")
    rows = f'{{"text": "{text}", "n": 1}}\n{{"text": "ASCII only"}}'
    table = f'text,n\n"{text}",1\n'
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / "b.jsonl").write_bytes(rows.encode(encoding))
    (tmp_path / "c.csv").write_bytes(table.encode(encoding))
    (tmp_path / "d.csv").write_bytes(("text,n\n" + "plain,1\n" * 9000 + table[7:]).encode(encoding))
    (tmp_path / "e.txt").write_text("naïve – text in UTF-8, 中文", "utf-8")
    (tmp_path / "f.html").write_bytes(f"<p>{text}</p><p>{text}</p>".encode(encoding))
    texts = [one.text for one in read_documents(tmp_path, encoding=encoding)]
    assert texts[:3] == [text, text, "ASCII only"]
    assert [one for one in texts[3:] if one != "plain"] == [
        text,
        text,
        "naïve – text in UTF-8, 中文",
        f"{text}\n\n{text}",
    ]


@pytest.mark.parametrize(
    ("rows", "encoding"),
    [
        (["déjà vu", "noël", "\x81 naïve"], "cp1252"),
        (["中文句子甲，今天天气很好", "模", "模模"], "gb18030"),  # valid UTF-8 too
        (["漢字の行です", "ASCII"], "iso2022_jp"),
    ],
)
def test_tables_and_lines_mix_utf8_and_the_named_encoding(rows, encoding, tmp_path):
    """A row is read as UTF-8 or in the named encoding, in every order and kind of file."""
    # Windows-1252 lacks byte 0x81, which is a control character on the web, as in Latin-1.
    keys = [one.encode("latin-1" if "\x81" in one else encoding) for one in rows]
    own = [] if encoding == "iso2022_jp" else ["Ünïcödé «ïn» UTF-8 – 漢字の行"]
    for order in (1, -1):
        raws = [*keys, *(one.encode() for one in own)][::order]
        want = [*rows, *own][::order]
        (tmp_path / "a.csv").write_bytes(b"text,n\n" + b"".join(raw + b",1\n" for raw in raws))
        lines = b"".join(b'{"text": "' + raw + b'"}\n' for raw in raws)
        (tmp_path / "b.jsonl").write_bytes(lines)
        for name in ("a.csv", "b.jsonl"):
            texts = [one.text for one in read_documents(tmp_path / name, encoding=encoding)]
            assert texts == want, name


def test_short_lines_of_a_chinese_file_are_not_taken_for_utf8(tmp_path):
    rows = ["中文句子甲", "模", "今天天气很好，我们去公园吧", "模模", "plain"]
    raws = (f'{{"text": "{one}"}}\n'.encode("gb18030") for one in rows)
    (tmp_path / "a.jsonl").write_bytes(b"".join(raws))
    assert [one.text for one in read_documents(tmp_path / "a.jsonl")] == rows


def test_a_wrong_or_unknown_encoding_is_refused(tmp_path):
    for raw in (b"\xff\xff\xff\xff text", page("russian").encode("cp1251")):
        with pytest.raises(DataError, match="neither UTF-8 nor euc_jp"):
            decode(raw, "x", encoding="euc_jp")
    for name in ("cp9999", "hex"):
        with pytest.raises(ConfigError, match=f"encoding='{name}'"):
            prepare(None, tmp_path / "out", PrepareConfig(encoding=name))
    assert not (tmp_path / "out").exists()


def test_bytes_that_say_nothing_are_refused():
    for raw in ("中文".encode("gb18030"), bytes(range(128, 256)), b"\0\0\0\1text"):
        with pytest.raises(DataError):
            decode(raw, "x")
