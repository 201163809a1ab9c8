"""Removes boilerplate lines (menus, cookie notices, licenses), and joins hard-wrapped lines.

A line that consists entirely of such a notice is removed wherever it occurs. A line that only
contains typical words of a notice may be an ordinary sentence: it is removed only at the top or
bottom of a page, or next to another boilerplate line.
"""

from __future__ import annotations

import re
from itertools import pairwise

from bmforge.data.clean.characters import HAN, SENTENCE_ENDS

__all__ = ["BOILERPLATE", "drop_boilerplate", "join_wrapped_lines"]

_LONGEST = 200  # characters; a longer line is never boilerplate
_SEPARATORS = re.compile(r"\s*[|｜›»>·•/]\s*")
_MENU_MARKS = re.compile("[|｜·•]")
_FIRST_ITEMS = re.compile(r"(?:home|start|index|main page|首页|主页|首頁|网站首页)$", re.I)
_ITEM = 24  # maximum length of a menu entry in characters
_FEWEST_ITEMS = 4
_EDGE_LINES = 3  # lines that count as the top or bottom of a page
_FEWEST_LINES = 5  # minimum lines of a page with a separate top and bottom
_END = r"[\s。.!！>»|]*$"
# Patterns that match a whole boilerplate line, for lines of at most 200 characters.
BOILERPLATE = {
    "cookies": re.compile(
        r"^\W*(?:(?:we|this (?:web)?site|our (?:web)?site)\b.{0,30}\b(?:use|uses|using)\b.{0,20}"
        r"\bcookies\b|by (?:using|continuing)\b.{0,60}\bcookies\b"
        rf"|(?:accept|reject|manage) (?:all )?cookies{_END}"
        rf"|cookie (?:policy|settings|preferences){_END}"
        r"|本(?:网站|站|網站).{0,12}(?:使用|採用).{0,6}cookie)",
        re.IGNORECASE,
    ),
    "copyright": re.compile(
        r"^\W*(?:copyright\s*(?:©|\(c\)|[12]\d{3})|©|\(c\)\s*[12]\d{3})"
        r"|^\W*(?:版权所有|版權所有)(?:[\s：:©]|$)"
        rf"|^\W*(?:all rights reserved|保留(?:一切|所有)(?:权利|權利)){_END}",
        re.IGNORECASE,
    ),
    "registration": re.compile(
        r"^.{0,40}(?:[一-鿿]?ICP[备備证証]\s*\d{5,}号?|公网安备\s*\d{6,}).{0,40}$"
    ),
    "navigation": re.compile(
        r"^\W*(?:skip to (?:main )?content|back to top|(?:previous|next) (?:post|article|page)"
        r"|share (?:on|this)\b.{0,30}|read more|sign in|log ?in|subscribe(?: now)?|menu)\W*$"
        r"|^\W*(?:上一篇|下一篇|上一页|下一页|当前位置|您的位置|分享到|责任编辑"
        r"|相关(?:阅读|推荐|文章))\s*(?:[：:>]|$)"
        r"|^\W*(?:(?:上|下)一(?:篇|页)|返回(?:顶部|首页|列表)|点击查看更多|打印本页|关闭窗口)\W*$",
        re.IGNORECASE,
    ),
}
# Words of notices that also occur in ordinary sentences.
_WORDS = re.compile(
    r"\ball rights reserved\W*$|^\W*copyright\b(?!\s+(?:law|is|was|has|protects?|holders?)\b)"
    r"|版权所有(?![者人的权])|^\W*未经.{0,8}(?:许可|授权|允许).{0,12}(?:转载|使用|复制)[^，,]{0,6}$",
    re.IGNORECASE,
)
_HAN_END = re.compile(f"[{HAN}，、：；]$")
_HAN_START = re.compile(f"[{HAN}]")
_FEWEST_WRAPPED = 3  # minimum number of long lines in a hard-wrapped paragraph


def drop_boilerplate(text: str) -> str:
    """Return the text of a web page without its boilerplate lines."""
    lines = text.split("\n")
    grades = [_grade(line) for line in lines]
    if not any(grades):
        return text
    filled = [at for at, line in enumerate(lines) if line.strip()]
    dropped = {at for at in filled if grades[at] == _SURE}
    edges = _EDGE_LINES if len(filled) >= _FEWEST_LINES else 0
    for index, at in enumerate(filled):
        is_edge = index < edges or index >= len(filled) - edges
        neighbors = filled[max(index - 1, 0) : index + 2]
        is_framed = any(grades[near] for near in neighbors if near != at)
        if grades[at] == _MAYBE and (is_edge or is_framed):
            dropped.add(at)
    return "\n".join(line for at, line in enumerate(lines) if at not in dropped)


_MAYBE, _SURE = 1, 2


def _grade(line: str) -> int:
    """Classify a line: `_SURE` for boilerplate, `_MAYBE` for possible boilerplate, 0 for text."""
    if not line.strip() or len(line) > _LONGEST:
        return 0
    if any(form.search(line) for form in BOILERPLATE.values()):
        return _SURE
    return _grade_menu(line) or (_MAYBE if _WORDS.search(line) else 0)


def _grade_menu(line: str) -> int:
    """Classify a line of short items, which may be a menu, a breadcrumb trail, or a plain list."""
    items = [item for item in _SEPARATORS.split(line.strip()) if item]
    is_short = all(len(item) <= _ITEM and not item.endswith(SENTENCE_ENDS) for item in items)
    # Dates and fractions have the same separators, but no letters.
    worded = sum(any(map(str.isalpha, item)) for item in items)
    if not is_short or len(items) < _FEWEST_ITEMS or worded < _FEWEST_ITEMS:
        return 0
    return _SURE if _MENU_MARKS.search(line) or _FIRST_ITEMS.match(items[0]) else _MAYBE


def join_wrapped_lines(text: str) -> str:
    """Join the lines of each hard-wrapped paragraph into one line.

    A paragraph counts as hard-wrapped if at least three lines have nearly the width of the longest
    line (at least 40 characters), do not end a sentence, and continue on the next line. Verse and
    code are not changed.
    """
    return "\n\n".join(map(_join_paragraph, text.split("\n\n")))


def _join_paragraph(paragraph: str) -> str:
    lines = paragraph.split("\n")
    width = max(map(len, lines))
    if len(lines) <= _FEWEST_WRAPPED or width < 40 or width > 120:
        return paragraph
    goes_on = [_goes_on(a, b, width) for a, b in pairwise(lines)]
    if sum(goes_on) < _FEWEST_WRAPPED or 2 * sum(goes_on) < len(goes_on):
        return paragraph
    parts = [lines[0]]
    for before, line, joined in zip(lines, lines[1:], goes_on, strict=False):
        full = len(before) >= 0.75 * width
        if joined or (full and before.endswith(SENTENCE_ENDS) and not line.startswith((" ", "\t"))):
            parts[-1] = _glue(parts[-1], line)
        else:
            parts.append(line)
    return "\n".join(parts)


def _goes_on(line: str, following: str, width: int) -> bool:
    """Return True if a line ends only because the text was wrapped at `width`."""
    if len(line) < 0.75 * width or line.endswith(SENTENCE_ENDS) or not following:
        return False
    return following[0].islower() or bool(_HAN_END.search(line) and _HAN_START.match(following))


def _glue(line: str, following: str) -> str:
    if line.endswith("-") and line[-2:-1].isalpha() and following[:1].islower():
        return line[:-1] + following
    return line + following if _HAN_START.match(following) else f"{line} {following}"
