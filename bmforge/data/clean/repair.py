"""Repairs mojibake (text decoded with a wrong encoding) if this is reliably possible.

A table lists which encodings are mistaken for which others. A valid UTF-8 result is accepted; a
result in a Chinese encoding must have frequent Chinese characters. Other lines are passed to ftfy
one at a time. Intact text is not changed, nor is text that lost characters in the wrong decoding.
"""

from __future__ import annotations

import codecs

from bmforge.data.clean.characters import HAN_RUN
from bmforge.errors import MissingDependencyError

__all__ = ["READINGS", "repair_text"]

# (wrong, true) encodings. The sloppy code pages, registered by ftfy, decode every byte.
READINGS = (
    ("latin-1", "utf-8"),
    ("sloppy-windows-1252", "utf-8"),
    ("sloppy-windows-1251", "utf-8"),
    ("gb18030", "utf-8"),
    ("latin-1", "gb18030"),
    ("sloppy-windows-1252", "gb18030"),
    ("latin-1", "big5"),
    ("sloppy-windows-1252", "big5"),
)
# Frequent characters of modern and classical Chinese, simplified and traditional.
_FREQUENT = frozenset(
    "的一是不了人我在有他这這中大来來上个個国國到说說们們为為子和你地出道也时時年得就那要下以生会會自着著去之过過家学學"
    "对對可她里裡后後小么麼心多天而能好都然没沒日于於起还還发發成事只作当當想看文无無开開手十用主行方又如前所本见見经經"
    "头頭面公同三已老从從动動两兩长長知民样樣现現分将將外但身些与與高意进進把法此实實回二理美点點月明其种種声聲全工己话話"
    "山水风風花春秋云雲雪江河夜白青玉金木石海门門马馬酒客君何处處归歸路城城东東西南北楼樓台臺古今万萬千百，。、；："
)
_SHARE = 0.12  # minimum share of frequent characters in a Chinese text
_FEWEST = 3  # minimum non-ASCII characters for which valid UTF-8 is not by chance


def repair_text(text: str) -> str:
    """Repair mojibake in a text; intact text is returned unchanged.

    Raises:
        MissingDependencyError: ``ftfy`` is not installed and the text is not ASCII.
    """
    if text.isascii():
        return text
    try:
        from ftfy import fix_encoding
        from ftfy.badness import is_bad
    except ImportError as error:
        raise MissingDependencyError("ftfy", "data", "repairing wrongly decoded text") from error
    # Repeated, as a text may have been decoded wrongly twice.
    while redecoded := _decode_again(text):
        text = redecoded
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not line.isascii():
            again = _decode_again(line)
            lines[number] = again or (fix_encoding(line) if is_bad(line) else line)
    return "\n".join(lines)


def _decode_again(text: str) -> str:
    """Decode the text with other encodings; return the first clearly better text, else "".

    A text is better if its fraction of frequent Chinese characters is clearly higher.
    """
    best, best_share = "", max(_SHARE, 1.5 * _share(text))
    for wrong, right in READINGS:
        try:
            data = codecs.encode(text, wrong)
            decoded = data.decode(right)
        except UnicodeError:
            continue
        if decoded == text:
            continue
        if right == "utf-8":
            if _is_sure(text, decoded, wrong):
                return decoded
        elif (share := _share(decoded)) >= best_share and _are_adjacent(decoded):
            best, best_share = decoded, share
    return best


def _is_sure(text: str, decoded: str, wrong: str) -> bool:
    """Return True if `decoded` has too many non-ASCII characters to be valid by chance.

    Args:
        text: text with mojibake.
        decoded: repaired text.
        wrong: encoding as which the original bytes were mistakenly decoded.
    """
    high = sum(character > "\x7f" for character in decoded)
    if wrong != "gb18030":
        return high >= _FEWEST
    # The four bytes of two Chinese characters can be valid UTF-8 by chance; longer runs cannot.
    chinese = sum(map(len, HAN_RUN.findall(decoded)))
    return chinese >= 4 and 2 * chinese >= high and len(decoded) < len(text)


def _are_adjacent(text: str) -> bool:
    """Return True if most Chinese characters are adjacent, unlike accents in Latin text."""
    runs = [len(run) for run in HAN_RUN.findall(text)]
    return 2 * sum(length for length in runs if length > 1) > sum(runs)


def _share(text: str) -> float:
    """Return the fraction of a text's non-ASCII characters that are frequent Chinese characters."""
    high = [character for character in text if character > "\x7f"]
    return sum(map(_FREQUENT.__contains__, high)) / len(high) if high else 0.0
