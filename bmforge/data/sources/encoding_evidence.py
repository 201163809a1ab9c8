"""Evidence for the encoding of bytes: the characters of the decoded text.

For Chinese, the first levels of GB 2312 and Big5 contain the characters in common use. A Western
text has accented letters inside words of ASCII letters.
"""

from __future__ import annotations

import codecs
import re
from functools import cache

__all__ = [
    "FEWEST",
    "MOST_BAD",
    "SURE",
    "decode_beginning",
    "frequent_characters",
    "frequent_ratio",
    "is_japanese_euc",
    "is_korean",
    "is_western",
    "score_frequent",
]

SURE = 0.75  # minimum share of frequent non-ASCII characters; below 0.5 in a wrong encoding
FEWEST = 4  # minimum non-ASCII characters for detection
MOST_BAD = 0.02  # share of characters that may be replaced
_KANA = re.compile("[\u3041-\u30ff]")
# Windows' code pages for Western, Central European and Turkish text differ in the other letters.
_PUNCTUATION = "\u2018\u2019\u201c\u201d\u2013\u2014\u2026\u2022\u20ac\u2122\xa0§©«®°±µ·»"
_SHARED = "áâäçéëíîóôöúüßÁÂÄÇÉËÍÎÓÔÖÚÜ"
_WESTERN = "àãåæèêìïñòõøùûœÀÃÅÆÈÊÌÏÑÒÕØÙÛŒ¿¡£"
# Frequent words of Western languages that do not occur in Central European ones or Turkish.
_WORDS = re.compile(
    r"\b(?:the|and|for|with|that|les|des|une|est|que|qui|dans|pour|una|del|como|che|della|sono|"
    r"non|uma|der|die|das|und|nicht|ist|auf|och|att|ikke|het|een)\b",
    re.I,
)
# Evidence against Western text: three adjacent non-ASCII characters, an accented capital letter
# after a lower-case letter, and accented letters outside of words.
_LETTER = "\xc0-\xd6\xd8-\xf6\xf8-\xff\u0152\u0153"
_STRAY = re.compile(
    rf"[^\x00-\x7f]{{3}}|[a-z][\xc0-\xd6\xd8-\xde]|"
    rf"(?<![A-Za-z{_LETTER}])(?![àéèóÀÉÈÓ](?![A-Za-z{_LETTER}]))[{_LETTER}]+(?![A-Za-z{_LETTER}])"
)
_MOST_ACCENTS = 0.25  # maximum share of non-ASCII characters in Western text


def decode_beginning(raw: bytes, name: str) -> str | None:
    """Decode bytes whose last character may be incomplete; None if they are invalid."""
    try:
        return codecs.getincrementaldecoder(name)("strict").decode(raw, final=False)
    except UnicodeDecodeError:
        return None


@cache
def frequent_characters() -> frozenset[str]:
    """Return the set of frequent Chinese and Japanese characters, with their punctuation."""
    # Row and cell ranges: level 1 of GB 2312 and of Big5; punctuation, kana, full-width of both.
    characters = {
        _pair(row, cell, "gb2312") for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF)
    }
    cells = [*range(0x40, 0x7F), *range(0xA1, 0xFF)]
    characters |= {_pair(row, cell, "big5") for row in range(0xA4, 0xC7) for cell in cells}
    kana = {chr(code) for code in range(0x3041, 0x30FF)}
    wide = {chr(code) for code in range(0xFF01, 0xFF5F)}
    marks = set("\u3000□○●■、。〃々〈〉《》「」『』【】〔〕—…‘’“”·～‖－")
    return frozenset((characters | kana | wide | marks) - {""})


def _pair(row: int, cell: int, name: str) -> str:
    return bytes((row, cell)).decode(name, "ignore")


def score_frequent(sample: bytes, name: str) -> float:
    """Return the fraction of frequent characters in non-ASCII text; 0 if it cannot be decoded."""
    text = codecs.getincrementaldecoder(name)("replace").decode(sample, final=False)
    bad = text.count("\ufffd")
    return 0.0 if bad > max(1, MOST_BAD * len(text)) else frequent_ratio(text)


def frequent_ratio(text: str) -> float:
    """Return the fraction of non-ASCII characters that are frequent; 0 if the text has too few."""
    wide = [c for c in text if c > "\x7f"]
    return sum(c in frequent_characters() for c in wide) / len(wide) if len(wide) >= FEWEST else 0.0


def is_japanese_euc(sample: bytes) -> bool:
    """Return True if bytes are Japanese text in EUC-JP, judged by the fraction of kana.

    The fraction of frequent characters is not enough: EUC-JP text that is decoded as GB 2312 also
    has frequent characters.
    """
    text = decode_beginning(sample, "euc_jp") or ""
    wide = sum(c > "\x7f" for c in text)
    return wide >= FEWEST and 10 * len(_KANA.findall(text)) >= wide and frequent_ratio(text) > SURE


def is_korean(sample: bytes) -> bool:
    """Return True if bytes are Korean text in EUC-KR, judged by the fraction of Hangul.

    The fraction of frequent characters is not enough: Korean text that is decoded as GB 2312 also
    has frequent characters.
    """
    # Not cp949: its further syllables are rare in Korean, and Shift-JIS bytes decode to them.
    text = decode_beginning(sample, "euc_kr")
    wide = [c for c in text or "" if c > "\x7f"]
    hangul = sum("\uac00" <= c <= "\ud7a3" for c in wide)
    return len(wide) >= FEWEST and hangul >= 0.9 * len(wide) and " " in (text or "")


def is_western(sample: bytes) -> bool:
    """Return True if bytes are mostly ASCII text with accents or punctuation of Windows-1252.

    An accented letter is part of a word, or a word such as "à"; in other encodings, bytes beyond
    ASCII are longer runs. Letters that Windows-1250 and 1254 lack need a frequent word of a Western
    language.
    """
    text = sample.decode("cp1252", "replace")
    accents = [char for char in text if char > "\x7f"]
    if not 0 < len(accents) <= _MOST_ACCENTS * len(text):
        return False
    allowed = _PUNCTUATION + _SHARED
    if _WORDS.search(text):
        allowed += _WESTERN
    return set(accents) <= set(allowed) and not _STRAY.search(text)
