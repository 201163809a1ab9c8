"""Splits text into words and counts sentences; Chinese text is split by rjieba.

The splitter follows spaCy's rules for English (punctuation before and after a word is a separate
token, as are ``n't`` and ``'s``; hyphens and slashes inside a word divide it), without spaCy's
tables of abbreviations. The classes of letters and sentence ends are Unicode's, so that other
scripts are split in the same way. The words of each whitespace-separated string are cached, as most
strings are frequent, and so is its effect on the number of sentences.
Source: github.com/explosion/spaCy, spacy/lang/punctuation.py and spacy/lang/en/ (rules, no code).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain, filterfalse
from typing import Any, NamedTuple

import regex

from bmforge.data.clean.characters import HAN_RUN, SENTENCE_ENDS, replace_surrogates
from bmforge.data.clean.string_cache import StringCache
from bmforge.errors import MissingDependencyError

__all__ = [
    "WordSplitter",
    "count_sentences",
    "count_sentences_in",
    "has_word_spaces",
    "is_chinese",
    "split_chinese_words",
    "split_words",
    "words_of",
]

WordSplitter = Callable[[str], list[str]]

_UNITS = (
    "km²?³?|m²|m³|m|dm|cm²?³?|mm²?|ha|µm|nm|yd|in|ft|kg|g|mg|µg|t|lb|oz|m/s|km/h|kmh|mph|hPa|Pa|mbar"
    "|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|%"
)
_HYPHENS = "(?:-|–|—|--|---|——|~)"
_MONEY = "[$£€¥₽₩₹]"
_ICON = r"[\u00a6\u00a9\u00ae\u00b0\u2100-\u214f\u2195-\u2bff\U0001f000-\U0001faff]"


class _Rules(NamedTuple):
    """Patterns that split a whitespace-free string into words and punctuation marks."""

    prefix: regex.Pattern[str] | re.Pattern[str]
    suffix: regex.Pattern[str] | re.Pattern[str]
    infix: regex.Pattern[str] | re.Pattern[str]


class _Classes(NamedTuple):
    """Character classes for the patterns: lower case (with caseless scripts), upper case, ..."""

    lower: str
    upper: str
    letter: str
    mark: str
    stop: str


def _make_rules(c: _Classes, compile_pattern: Callable[[str], Any]) -> _Rules:
    prefix = rf"…|\.\.+|[§%=—–]|\+(?![0-9])|{c.mark}|(?:US|C|A)\$|{_MONEY}|{_ICON}"
    suffix = (
        rf"(?:…|\.\.+|{c.mark}|{_ICON}|['’][sS]|[—–]|(?<=[0-9])\+|(?<=[0-9]){_MONEY}"
        rf"|(?<=[0-9])(?:{_UNITS})|(?<=[0-9{c.lower}%²\-+…]|{c.mark})\."
        rf"|(?<=[{c.upper}][{c.upper}])\.)$"
    )
    infix = (
        rf"\.\.+|{c.stop}|…|{_ICON}|(?<=[0-9])[+\-*^](?=[0-9-])"
        rf"|(?<=[{c.lower}'\"”“`‘´’])\.(?=[{c.upper}'\"”“`‘´’])"
        rf"|(?<={c.letter}),(?={c.letter})|(?<=[^\W_]){_HYPHENS}(?={c.letter})"
        rf"|(?<=[^\W_])[:<>=/](?={c.letter})"
    )
    return _Rules(*map(compile_pattern, (prefix, suffix, infix)))


# Both for `re` and `regex`: on plain ASCII, `re` takes two thirds of the time of `regex`.
_ASCII_RULES = _make_rules(
    _Classes("a-z", "A-Z", "[A-Za-z]", r"""[,:;!?()\[\]{}<>_#*&'"`]""", "(?!)"), re.compile
)
_UNICODE_RULES = _make_rules(
    _Classes(
        r"\p{Ll}\p{Lo}\p{Lm}\p{M}",
        r"\p{Lu}",
        r"[\p{L}\p{M}]",
        r"""[\p{Terminal_Punctuation}--[.]||[¿¡()\[\]{}<>_#*\&～·٪'"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧]]""",
        # Sentence ends of other scripts divide words at any position.
        r"[\p{Sentence_Terminal}--[.!?]]",
    ),
    lambda pattern: regex.compile(f"(?V1){pattern}"),
)
_ADDRESS = re.compile(
    r"(?:[a-z][\w.+-]*://|www\.)\S+|[\w.+%-]+@[\w-]+(?:\.[\w-]+)+"
    r"|(?:[a-z0-9][a-z0-9-]*\.)+(?:com|org|net|edu|gov|io|uk|cn|de|fr|jp|ru|info)(?:[:/?#]\S*)?",
    re.IGNORECASE,
)
# Abbreviations, which keep their full stop.
_ABBREVIATED = (
    "Mr. Mrs. Ms. Messrs. Dr. Prof. Gen. Gov. Sen. Rep. Rev. Sgt. Lt. Col. Capt. Adm. St. Mt. Jr. "
    "Sr. Inc. Corp. Co. Ltd. Bros. vs. v.s. a.m. p.m. e.g. i.e. E.g. I.e. E.G. I.E. Ph.D. Jan. "
    "Feb. Mar. Apr. Jun. Jul. Aug. Sep. Sept. Oct. Nov. Dec. Ala. Ariz. Ark. Calif. Colo. Conn. "
    "Del. Fla. Ga. Ia. Id. Ill. Ind. Kan. Kans. Ky. La. Mass. Md. Mich. Minn. Miss. Mo. Mont. N.C. "
    "N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Okla. Ore. Pa. S.C. Tenn. Va. Wash. Wis. ca. a. b. "
    "c. d. e. f. g. h. i. j. k. l. m. n. o. p. q. r. s. t. u. v. w. x. y. z."
)
_ABBREVIATIONS = frozenset(_ABBREVIATED.split())
# Emoticons, and other strings of marks that spaCy keeps as one token.
_FACE_MARKS = "): (: :) :( ;) :] [: [; 8) :/ :-) ;-) :-( :D :P :p :x :o 0.0 '' <3"
_FACES = frozenset(_FACE_MARKS.split())
_SUBJECT = re.compile(
    r"(i|you|he|she|it|we|they|who|what|when|where|why|how|there|that|this|these|those|let|could"
    r"|might|must|should|would)((?:['’](?:ll|d|ve|re|s|m))+)",
    re.IGNORECASE,
)
_NOT_VERBS = (
    "ai|are|ca|could|did|does|do|had|dare|has|have|is|may|might|must|need|ought|sha|should|was"
    "|were|wo|would"
)
_NOT = re.compile(
    rf"(?:({_NOT_VERBS})(n['’]?t)((?:['’]ve)?)|(can)(not)|(i)(?-i:(d|m)))", re.IGNORECASE
)
_ENDINGS = re.compile(r"['’](?:ll|d|ve|re|s|m)", re.IGNORECASE)
_MARKS_BEHIND = frozenset(',;:!?)"')  # marks that are split from any word in front of them
# Strings of letters that `_NOT` splits into two words, such as "cannot".
_DIVIDED = frozenset([f"{verb}nt" for verb in _NOT_VERBS.split("|")] + ["cannot", "id", "im"])
_TAIL = 40  # characters at a string's end in which closing marks are searched
# Maximum length of a string in characters; longer strings are first split at this length.
_LONGEST_RUN = 1000
_ENDS = frozenset(SENTENCE_ENDS)
# LineBreak=SA: Thai, Lao, Khmer, Burmese and other scripts without spaces between words.
_UNSPACED = regex.compile(r"[\p{LineBreak=SA}\p{Hiragana}\p{Katakana}]+")


def split_words(text: str) -> list[str]:
    """Split a text with spaces between words into words and punctuation marks."""
    return list(chain.from_iterable(map(_WORDS_OF_RUN.__getitem__, text.split())))


def _split_run(run: str) -> tuple[str, ...]:
    """Split a whitespace-free string into words and punctuation marks."""
    if len(run) > _LONGEST_RUN:
        starts = range(0, len(run), _LONGEST_RUN)
        return tuple(chain.from_iterable(_split_part(run[i : i + _LONGEST_RUN]) for i in starts))
    # Letters with at most one mark: nine of ten strings, in a tenth of the time of the rules.
    if run.isascii():
        if run.isalpha():
            return (run,) if run.lower() not in _DIVIDED else _split_by_rules(run)
        word, mark = run[:-1], run[-1]
        has_mark = mark in _MARKS_BEHIND or (mark == "." and word[-1:].islower())
        if has_mark and word.isalpha() and word.lower() not in _DIVIDED:
            return (word, mark) if run not in _ABBREVIATIONS else (run,)
    return _split_by_rules(run)


@lru_cache(maxsize=256)
def _split_part(run: str) -> tuple[str, ...]:
    """Split a part of a long string; cached, as the parts of a repetitive string are equal."""
    return _split_run(run)


_WORDS_OF_RUN = StringCache(_split_run, 1 << 16)


def _split_by_rules(run: str) -> tuple[str, ...]:
    """Split a string by the rules for prefixes, suffixes, infixes and special strings."""
    before: list[str] = []
    after: list[str] = []
    rules = _ASCII_RULES if run.isascii() else _UNICODE_RULES
    while run and not (special := _find_special(run)):
        if mark := rules.prefix.match(run):
            before.append(mark[0])
            run = run[mark.end() :]
        elif (mark := _find_suffix(run, rules)) and mark.start() > 0:
            after.append(mark[0])
            run = run[: mark.start()]
        else:
            special = _split_inside(run, rules)
            break
    if run:
        before += special
    return tuple(_join_faces([*before, *reversed(after)]))


def _find_suffix(run: str, rules: _Rules) -> Any:
    """Return the match of a mark, a unit or ``'s`` at the end of a string, or None."""
    if run.isalpha() and run.isascii():  # a unit follows a digit, and ``s`` an apostrophe
        return None
    return rules.suffix.search(run, max(len(run) - _TAIL, 0))


def _join_faces(parts: list[str]) -> list[str]:
    """Join adjacent marks that form an emoticon in spaCy's rules, such as a colon and a bracket."""
    joined: list[str] = []
    for part in parts:
        if joined and len(part) == 1 and joined[-1] + part in _FACES:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _find_special(run: str) -> list[str]:
    """Split a string that has a special rule, such as an abbreviation; [] for other strings."""
    if run in _ABBREVIATIONS or run in _FACES:
        return [run]
    if "'" not in run and "’" not in run and run.lower() not in _DIVIDED:
        return []
    if match := _NOT.fullmatch(run):
        return [part for part in match.groups() if part]
    if match := _SUBJECT.fullmatch(run):
        return [match[1], *_ENDINGS.findall(match[2])]
    return []


def _split_inside(run: str, rules: _Rules) -> list[str]:
    """Split a string, unless it is an address, at the hyphens, slashes and dots inside it."""
    if run.isalnum() or (("." in run or "://" in run) and _ADDRESS.fullmatch(run)):
        return [run]
    parts, start = [], 0
    for mark in rules.infix.finditer(run):
        parts += [run[start : mark.start()], mark[0]]
        start = mark.end()
    return [part for part in (*parts, run[start:]) if part]


def count_sentences(words: Iterable[str]) -> int:
    """Count the sentences in a list of words.

    A sentence begins after a full stop and its closing quotation marks or brackets.
    """
    count, ended = 0, False
    for word in words:
        if word in _ENDS:
            count, ended = count or 1, True
        elif not count or (ended and not _is_punctuation(word)):
            count, ended = count + 1, False
    return count


def count_sentences_in(text: str) -> int:
    """Count the sentences of a text with spaces between words.

    Equal to ``count_sentences(split_words(text))``, without a loop over words: the count is the
    number of strings that end a sentence, plus one if a word follows the last of them.
    """
    runs = text.split()
    if not runs:
        return 0
    effects = bytes(map(_EFFECT_OF_RUN.__getitem__, filterfalse(str.isalpha, runs)))
    last = _WORD if runs[-1].isalpha() else effects[-1]
    ends = effects.count(_SENTENCE_END)
    if _OTHER in effects or (last == _MARKS and ends):
        return count_sentences(split_words(text))
    return ends + (last == _WORD) if ends else 1


_WORD, _MARKS, _SENTENCE_END, _OTHER = range(4)


def _effect_of(run: str) -> int:
    """Classify a whitespace-free string by its effect on the number of sentences.

    `_WORD`: a word without a sentence end. `_MARKS`: only punctuation. `_SENTENCE_END`: a word, one
    sentence end, and then only punctuation. `_OTHER`: anything else.
    """
    words = _WORDS_OF_RUN[run]
    if _ENDS.isdisjoint(words):
        return _WORD if words[0].isalnum() or not all(map(_is_punctuation, words)) else _MARKS
    if len(words) == 2 and words[0].isalnum() and words[1] in _ENDS:
        return _SENTENCE_END
    ends = [position for position, word in enumerate(words) if word in _ENDS]
    before, behind = words[: ends[0]], words[ends[0] + 1 :]
    is_last = len(ends) == 1 and all(map(_is_punctuation, behind))
    return _SENTENCE_END if is_last and not all(map(_is_punctuation, before)) else _OTHER


_EFFECT_OF_RUN = StringCache(_effect_of)


@lru_cache(maxsize=1 << 12)
def _is_punctuation(word: str) -> bool:
    return all(unicodedata.category(character).startswith("P") for character in word)


def split_chinese_words(text: str) -> list[str]:
    """Split a Chinese text into words and punctuation marks; spaces are omitted.

    Raises:
        MissingDependencyError: ``rjieba`` is not installed.
    """
    try:
        import rjieba
    except ImportError as error:
        raise MissingDependencyError("rjieba", "zh", "splitting Chinese text into words") from error
    return [word for word in rjieba.cut(replace_surrogates(text), True) if not word.isspace()]


def is_chinese(text: str) -> bool:
    """Return True if more than a third of the first 4,000 characters are Chinese."""
    beginning = text[:4000]
    size = sum(map(len, beginning.split()))
    return size > 0 and 3 * sum(map(len, HAN_RUN.findall(beginning))) > size


def has_word_spaces(text: str) -> bool:
    """Return False if a third of the characters belong to scripts without spaces between words.

    `split_words` splits such a text into clauses. Chinese is not counted, see `is_chinese`.
    """
    return text.isascii() or 3 * sum(map(len, _UNSPACED.findall(text))) <= sum(
        map(len, text.split())
    )


def words_of(text: str) -> list[str]:
    """Split a text into words with the splitter for its script."""
    return split_chinese_words(text) if is_chinese(text) else split_words(text)
