"""Writing systems: detects scripts, converts traditional and simplified Chinese, folds widths."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any

from bmforge.data.clean.characters import HAN, HAN_RUN, replace_surrogates
from bmforge.errors import ConfigError, MissingDependencyError

__all__ = ["SCRIPTS", "convert_chinese", "detect_script", "fold_width", "strip_invisible"]

# ISO 15924 codes and patterns of their characters.
_SCRIPTS = {
    "Latn": "A-Za-z\u00aa\u00ba\u00c0-\u024f\u1e00-\u1eff",
    "Hani": HAN,
    "Kana": "\u3041-\u30ff\uff66-\uff9f",
    "Hang": "\u1100-\u11ff\uac00-\ud7a3",
    "Cyrl": "\u0400-\u052f",
    "Arab": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufefc",
    "Deva": "\u0900-\u097f",
    "Grek": "\u0370-\u03ff\u1f00-\u1fff",
    "Hebr": "\u0590-\u05ff",
    "Thai": "\u0e00-\u0e7f",
    "Beng": "\u0980-\u09ff",
    "Taml": "\u0b80-\u0bff",
    "Telu": "\u0c00-\u0c7f",
    "Geor": "\u10a0-\u10ff",
    "Armn": "\u0530-\u058f",
    "Ethi": "\u1200-\u137f",
    "Khmr": "\u1780-\u17ff",
    "Mymr": "\u1000-\u109f",
    "Tibt": "\u0f00-\u0fff",
    "Guru": "\u0a00-\u0a7f",
    "Gujr": "\u0a80-\u0aff",
    "Orya": "\u0b00-\u0b7f",
    "Knda": "\u0c80-\u0cff",
    "Mlym": "\u0d00-\u0d7f",
    "Sinh": "\u0d80-\u0dff",
    "Laoo": "\u0e80-\u0eff",
    "Thaa": "\u0780-\u07bf",
    "Syrc": "\u0700-\u074f",
    "Mong": "\u1800-\u18af",
    "Tfng": "\u2d30-\u2d7f",
}
# Values that `detect_script` returns.
SCRIPTS = (*_SCRIPTS.keys() - {"Kana", "Hang"}, "Hans", "Hant", "Jpan", "Kore")
_RUNS = {name: re.compile(f"[{characters}]+") for name, characters in _SCRIPTS.items()}
_COMMON = ("Latn", "Hani", "Kana")
_OTHER = re.compile(f"[{''.join(c for name, c in _SCRIPTS.items() if name not in _COMMON)}]")
_CONVERSIONS = {"Hans": "t2s", "Hant": "s2t"}
_WIDE = {code: code - 0xFEE0 for code in (*range(0xFF10, 0xFF1A), *range(0xFF21, 0xFF3B))}
_WIDE |= {code: code - 0xFEE0 for code in range(0xFF41, 0xFF5B)}
_HALF_KANA = re.compile("[\uff66-\uff9f]+")
# Zero-width characters; joiners are kept where scripts and emoji need them.
_INVISIBLE = re.compile(
    "[\u00ad\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ufff9-\ufffb]"
    f"|(?<=[ -~{HAN}])[\u200c\u200d]+|[\u200c\u200d]+(?=[ -~{HAN}])"
)


def detect_script(text: str) -> str:
    """Return the ISO 15924 code of a text's main script: ``"Latn"``, ``"Hans"``, ``"Jpan"``, ...

    The main script is the one with the most letters. Chinese text is ``"Hans"`` (simplified) or
    ``"Hant"`` (traditional) by the characters that only occur in one of the two, and ``"Hani"`` if
    both are equally frequent. Text of which at least a tenth is kana is ``"Jpan"``; with Hangul it
    is ``"Kore"``. The result is ``""`` if the text has no letters.

    Raises:
        MissingDependencyError: the text is Chinese and ``opencc`` is not installed.
    """
    if text.isascii():
        return "Latn" if _RUNS["Latn"].search(text) else ""
    # One search for all other scripts, instead of 27: most texts have none of them.
    names = _RUNS if _OTHER.search(text) else _COMMON
    counts = dict.fromkeys(_RUNS, 0)
    counts |= {name: sum(map(len, _RUNS[name].findall(text))) for name in names}
    han, kana, hangul = counts["Hani"], counts["Kana"], counts["Hang"]
    asian = {"Jpan": kana + han, "Kore": hangul + han, "Hani": han}
    best = max((name for name in counts if name not in ("Kana", "Hang", "Hani")), key=counts.get)  # type: ignore[arg-type]
    if max(asian.values()) >= counts[best]:
        if not max(asian.values()):
            return ""
        if kana * 10 >= han and kana > hangul:
            return "Jpan"
        if hangul * 10 >= han and hangul:
            return "Kore"
        return _tell_chinese(text)
    return best


def _tell_chinese(text: str) -> str:
    traditional, simplified = _only_in()
    characters = "".join(HAN_RUN.findall(text[:20_000]))
    first = sum(map(traditional.__contains__, characters))
    second = sum(map(simplified.__contains__, characters))
    if first == second:
        return "Hani"
    return "Hant" if first > second else "Hans"


@lru_cache(maxsize=1)
def _only_in() -> tuple[frozenset[str], frozenset[str]]:
    """Return two sets: characters used only in traditional Chinese, and only in simplified."""
    ideographs = [chr(code) for code in range(0x4E00, 0xA000)]
    lines = "\n".join(ideographs)
    to_simplified = _converter("t2s").convert(lines).split("\n")
    to_traditional = _converter("s2t").convert(lines).split("\n")
    pairs = list(zip(ideographs, to_simplified, to_traditional, strict=True))
    return (
        frozenset(character for character, simple, _ in pairs if simple != character),
        frozenset(
            character
            for character, simple, old in pairs
            if old != character and simple == character
        ),
    )


@lru_cache(maxsize=8)
def _converter(name: str) -> Any:
    try:
        import opencc
    except ImportError as error:
        raise MissingDependencyError(
            "opencc", "data", "detecting simplified and traditional Chinese"
        ) from error
    return opencc.OpenCC(name)


def convert_chinese(text: str, script: str) -> str:
    """Convert a text to simplified (``"Hans"``) or traditional (``"Hant"``) characters.

    Raises:
        ConfigError: `script` is neither ``"Hans"`` nor ``"Hant"``.
    """
    if script not in _CONVERSIONS:
        raise ConfigError(f"script={script!r} must be one of {', '.join(_CONVERSIONS)}.")
    return _converter(_CONVERSIONS[script]).convert(replace_surrogates(text))


def fold_width(text: str) -> str:
    """Convert letters and digits to half width, and kana to full width.

    Punctuation is kept, as full-width marks are correct in Chinese.
    """
    if text.isascii():
        return text
    text = text.translate(_WIDE)
    return _HALF_KANA.sub(lambda run: unicodedata.normalize("NFKC", run[0]), text)


def strip_invisible(text: str) -> str:
    """Remove zero-width characters, except the joiners that some scripts need."""
    return text if text.isascii() else _INVISIBLE.sub("", text)
