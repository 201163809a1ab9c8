"""Decodes bytes into text, by byte order mark, as UTF-8, by declared encoding, or by detection.

Most byte strings are valid in several encodings, so detection compares the fraction of frequent
characters (`encoding_evidence.py`). Bytes with several valid multi-byte UTF-8 characters are
decoded as UTF-8 whatever encoding is declared: in other encodings such a sequence is extremely
unlikely.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from bmforge.data.sources.encoding_evidence import (
    FEWEST,
    MOST_BAD,
    SURE,
    decode_beginning,
    frequent_characters,
    frequent_ratio,
    is_japanese_euc,
    is_korean,
    is_western,
    score_frequent,
)
from bmforge.errors import ConfigError, DataError

__all__ = [
    "SAMPLE_BYTES",
    "Decoded",
    "check_encoding",
    "decode",
    "detect_encoding",
    "may_replace",
]

SAMPLE_BYTES = 1 << 16
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Escape sequence that leaves ASCII -> 7-bit encoding, whose bytes all look like ASCII.
_ESCAPES = (
    (b"\x1b$)C", "iso2022_kr"),
    (b"\x1b$B", "iso2022_jp_2"),
    (b"\x1b$@", "iso2022_jp_2"),
    (b"\x1b(J", "iso2022_jp_2"),
)
_WIDE = ("gb18030", "big5", "cp950", "big5hkscs", "shift_jis", "cp932", "euc_jp")
_VERY_SURE = 0.9  # minimum score that overrules a declared encoding
_BAD_OF_WIDE = 0.25  # maximum share of damaged multi-byte characters in a text taken as UTF-8
_LABEL = re.compile(r"[\w.:-]{2,40}")
_REPLACEMENT = "\ufffd"
_WINDOWS = {
    "iso8859-1": "cp1252",
    "iso8859-2": "cp1250",
    "iso8859-7": "cp1253",
    "iso8859-9": "cp1254",
    "iso8859-13": "cp1257",
}
# Meaning of labels on the web (encoding.spec.whatwg.org): subsets are decoded as supersets.
_WEB_LABELS = {
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "x-gbk": "gb18030",
    "gb_2312-80": "gb18030",
    "hz-gb-2312": "hz",
    "iso-8859-1": "cp1252",
    "latin1": "cp1252",
    "us-ascii": "cp1252",
    "ascii": "cp1252",
    "windows-1252": "cp1252",
    "iso-8859-9": "cp1254",
    "iso-8859-11": "cp874",
    "tis-620": "cp874",
    "shift_jis": "cp932",
    "sjis": "cp932",
    "x-sjis": "cp932",
    "euc-kr": "cp949",
    "ks_c_5601-1987": "cp949",
    "big5": "big5hkscs",
    "utf8": "utf-8",
}


@dataclass(frozen=True)
class Decoded:
    """Text decoded from bytes, with the encoding that was used.

    Attributes:
        encoding: Python's name for the encoding.
        replaced: number of damaged characters, which are U+FFFD in the text.
    """

    text: str
    encoding: str
    replaced: int = 0

    def scores(self) -> Mapping[str, float]:
        """Return the number of replaced characters as a document score; empty if there are none."""
        return {"replaced_characters": self.replaced} if self.replaced else {}


def decode(
    raw: bytes,
    location: str,
    labels: Sequence[str] = (),
    expected: str = "",
    errors: str = "replace",
    encoding: str = "",
) -> Decoded:
    """Decode bytes into text; a byte order mark is removed.

    Args:
        raw: bytes to decode.
        location: name of the source for error messages.
        labels: encodings that a protocol or page declares.
        expected: encoding of the whole file that contains `raw`.
        errors: "replace" to decode single damaged characters as U+FFFD, "strict" to raise an error.
        encoding: encoding of bytes that are not UTF-8, instead of a declared or detected one.

    Raises:
        DataError: the bytes are binary, damaged or in an unknown encoding.
    """
    labels = [encoding] if encoding else labels
    decoded = _decode_intact(raw, labels, expected, is_named=bool(encoding))
    if decoded is None or not _is_allowed(decoded, encoding):
        decoded = _decode_damaged(raw, labels, expected)
        if decoded is None or errors == "strict" or not _is_allowed(decoded, encoding):
            raise _explain(raw, location, decoded, encoding)
    if "\0" in decoded.text:
        raise DataError(
            f"{location} is binary (a zero byte at offset {raw.find(0)}), not text. Remove the "
            "file from the input, or convert it, for example: iconv -f UTF-16 -t UTF-8."
        )
    return decoded


def check_encoding(name: str) -> None:
    """Raise `ConfigError` if Python has no text encoding of this name."""
    try:
        "a".encode(name or "utf-8")
    except LookupError as error:
        raise ConfigError(
            f"unknown encoding: encoding={name!r}. Use a name such as cp1252, gb18030 or koi8-r."
        ) from error


def _is_allowed(decoded: Decoded, encoding: str) -> bool:
    """Return True if a text was decoded with an encoding that the option `encoding` allows.

    These are UTF-8, encodings that a BOM or escape sequences identify, and `encoding` itself. If
    `encoding` is "", every encoding is allowed.
    """
    marked = (name for _, name in (*_MARKS, *_ESCAPES))
    names = ("utf-8", *marked, *_known_labels([encoding]))
    return not encoding or decoded.encoding in names


def _explain(raw: bytes, location: str, damaged: Decoded | None, encoding: str) -> DataError:
    if encoding and (damaged is None or not _is_allowed(damaged, encoding)):
        return DataError(
            f"{location} is neither UTF-8 nor {encoding}. Correct encoding=... "
            "(--encoding), or remove the file from the input."
        )
    if damaged is not None:
        return DataError(
            f"{location} is encoded in {damaged.encoding}, but has {damaged.replaced} invalid "
            "characters. Repair the text, or replace the characters with errors='replace' "
            "(--errors replace)."
        )
    try:
        raw.decode("utf-8")
        at = raw.find(0)
    except UnicodeDecodeError as error:
        at = error.start
    return DataError(
        f"{location} is not UTF-8 (byte {raw[at]:#04x} at offset {at}), and its encoding cannot be "
        f"detected{_hint()}. Name it with encoding=... (bmforge prepare: --encoding), or convert "
        "the file with iconv -f ENCODING -t UTF-8."
    )


def _decode_intact(
    raw: bytes, labels: Sequence[str], expected: str, is_named: bool
) -> Decoded | None:
    """Decode bytes with the first candidate encoding in which they are valid, or return None."""
    for mark, name in _MARKS:
        if raw.startswith(mark) and (text := _try(raw, name)) is not None:
            return Decoded(text, name)
    # A short line of a Chinese file may be valid UTF-8 by chance.
    is_expected = expected in _WIDE and not is_named
    names = _known_labels([*labels, expected] if is_expected else labels)
    for escape, name in _ESCAPES:
        if escape in raw and (text := _try(raw, name)) is not None:
            return Decoded(text, name)
    as_utf8 = _try(raw, "utf-8")
    if as_utf8 is not None and "\0" not in as_utf8 and _is_surely_utf8(as_utf8, raw, names):
        return Decoded(as_utf8, "utf-8")
    detected = detect_encoding(raw)
    is_damaged = as_utf8 is None and _is_damaged_utf8(raw[:SAMPLE_BYTES])
    is_long = is_damaged and sum(byte & 0xC0 == 0x80 for byte in raw[:SAMPLE_BYTES]) >= 2 * FEWEST
    for name in names if is_named else _put_detected_first(raw, names, detected):
        text = _try(raw, name)
        is_unlikely = is_damaged and (is_long or _is_single_byte(name))
        if text is not None and "\0" not in text and not is_unlikely:
            return Decoded(text, name)
    if as_utf8 is not None and "\0" not in as_utf8:
        return Decoded(as_utf8, "utf-8")
    for name in (expected, detected, _detect_utf16(raw[:SAMPLE_BYTES])):
        if name not in ("", "utf-8") and (text := _try(raw, name)) is not None:
            return Decoded(text, name)
    return Decoded(as_utf8, "utf-8") if as_utf8 is not None else None


def _known_labels(labels: Sequence[str]) -> list[str]:
    """Return the supported encodings among the labels; Latin-1, a server's default, comes last."""
    names = [_WEB_LABELS.get(label.lower(), label.lower()) for label in labels]
    supported = [
        name for name in dict.fromkeys(names) if _LABEL.fullmatch(name) and _supports_encoding(name)
    ]
    return sorted(supported, key=lambda name: name == "cp1252")


def _is_surely_utf8(text: str, raw: bytes, names: Sequence[str]) -> bool:
    """Return True if the bytes are UTF-8, whatever encoding is declared.

    ASCII bytes may be text in a declared 7-bit encoding, and a few multi-byte sequences may be
    valid UTF-8 by chance in Chinese or Japanese text.
    """
    if text.isascii():
        return not any(name == "hz" for name in names)
    wide = len(text) - len(text.encode("ascii", "ignore"))
    return wide >= FEWEST or all(name == "utf-8" or _is_single_byte(name) for name in names)


def _is_single_byte(name: str) -> bool:
    return name.startswith(("cp125", "cp8", "windows-125", "iso-8859", "iso8859", "koi8", "mac"))


def _put_detected_first(raw: bytes, names: Sequence[str], detected: str) -> Sequence[str]:
    """Return the declared encodings, preceded by a surely detected Chinese or Japanese encoding.

    A declared single-byte encoding is valid for any bytes, and a server's default is no evidence.
    """
    if detected not in _WIDE or detected in names or not names:
        return names
    single = all(map(_is_single_byte, names))
    sure = score_frequent(raw[:SAMPLE_BYTES], detected) >= _VERY_SURE
    return [detected, *names] if single and sure else names


def _decode_damaged(raw: bytes, labels: Sequence[str], expected: str) -> Decoded | None:
    """Decode bytes with a few damaged characters; None if too many are damaged."""
    sample = raw[:SAMPLE_BYTES]
    names = [name for name in _known_labels(labels) if name != "utf-8"]
    if _is_damaged_utf8(sample) or not (names or expected):
        names.insert(0, "utf-8")
    for name in (*names, expected, detect_encoding(raw), "utf-8"):
        if not name:
            continue
        text = raw.decode(name, "replace").removeprefix("\ufeff")
        bad = text.count(_REPLACEMENT)
        if "\0" not in text and may_replace(bad, len(text)) and _is_common(text, name):
            return Decoded(text, name, bad)
    return None


def may_replace(bad: int, characters: int) -> bool:
    """Return True if so few characters of a text are damaged that the text is usable.

    One bad byte inside a multi-byte character damages up to three characters.
    """
    return 0 < bad <= MOST_BAD * characters or (0 < bad <= 3 and characters >= 50)


def _is_common(text: str, name: str) -> bool:
    """Return False if a Chinese or Japanese text lost byte synchronization after a damaged byte."""
    return name not in _WIDE or frequent_ratio(text) >= SURE


def detect_encoding(raw: bytes) -> str:
    """Detect the encoding of bytes from their beginning; "" if it cannot be detected."""
    for mark, name in _MARKS:
        if raw.startswith(mark):
            return name
    sample = raw[:SAMPLE_BYTES]
    if _is_utf8(sample):
        return _detect_utf16(sample) if b"\0" in sample else "utf-8"
    if _is_damaged_utf8(sample):
        return ""
    if wide := _detect_utf16(sample):
        return wide
    if is_western(sample):
        return "cp1252"
    if is_korean(sample):
        return "cp949"
    if is_japanese_euc(sample):
        return "euc_jp"
    scores = {name: score_frequent(sample, name) for name in _WIDE}
    best = max(scores, key=lambda name: scores[name])  # of equal scores, the first
    if scores[best] >= SURE:
        return best
    return _detect_by_library(sample)


def _try(raw: bytes, name: str) -> str | None:
    try:
        if name == "cp1252":  # on the web, its five undefined bytes are control characters
            text = raw.decode(name, "surrogateescape").translate(_WINDOWS_CONTROLS)
        else:
            text = raw.decode(name)
    except (UnicodeDecodeError, LookupError, ValueError):
        return None
    return text.removeprefix("\ufeff") if isinstance(text, str) else None


_WINDOWS_CONTROLS = {0xDC00 + byte: byte for byte in (0x81, 0x8D, 0x8F, 0x90, 0x9D)}


def _is_utf8(sample: bytes) -> bool:
    return decode_beginning(sample, "utf-8") is not None


def _is_damaged_utf8(sample: bytes) -> bool:
    """Return True if nearly all multi-byte characters are valid UTF-8."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(sample, final=False)
    wide = sum(character > "\x7f" for character in text)
    bad = text.count(_REPLACEMENT)
    return bad <= _BAD_OF_WIDE * (wide - bad) or (bad == 1 and wide > 2)


def _detect_utf16(sample: bytes) -> str:
    """Detect UTF-16 without a byte order mark by its frequent characters; "" if not detected."""
    scores = {}
    for name in ("utf-16-le", "utf-16-be"):
        text = decode_beginning(sample, name) or ""
        common = sum(c in frequent_characters() or "\t" <= c <= "~" for c in text)
        scores[name] = common / len(text) if text and "\0" not in text else 0.0
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= 0.9 and len(sample) >= 4 else ""


def _detect_by_library(sample: bytes) -> str:
    """Detect the encoding with the library resiliparse, which also knows Windows code pages."""
    try:
        from resiliparse.parse.encoding import detect_encoding as ask
    except ImportError:
        return ""  # the error that follows names the extra
    if sum(byte > 0x7F for byte in sample) < 2 * FEWEST:
        return ""
    detected = ask(sample, html5_compatible=False) or ""
    if re.search(rb"[\x80-\x9f]", sample) or detected == "iso8859-1":
        detected = _WINDOWS.get(detected, detected)  # C1 controls are not text
    text = decode_beginning(sample, detected) if detected and _supports_encoding(detected) else None
    return detected if text is not None and detected not in ("utf-8", "ascii") else ""


def _hint() -> str:
    is_installed = find_spec("resiliparse") is not None
    return "" if is_installed else " (bmforge's extra `data` detects more encodings)"


def _supports_encoding(name: str) -> bool:
    try:
        codecs.lookup(name)
    except LookupError:
        return False
    return True
