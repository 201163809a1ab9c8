"""Removes boilerplate lines (menus, cookie notices, licenses), and joins hard-wrapped lines.

A line that consists entirely of such a notice is removed wherever it occurs. A line that only
contains typical words of a notice may be an ordinary sentence: it is removed only at the top or
bottom of a page, or next to another boilerplate line. Rows of Markdown tables are kept.
"""

from __future__ import annotations

import re
from itertools import pairwise

from bmforge.data.clean.characters import HAN, SENTENCE_ENDS

__all__ = ["BOILERPLATE", "drop_boilerplate", "join_wrapped_lines"]

_LONGEST = 200  # characters; a longer line is never boilerplate
_SEPARATORS = re.compile(r"\s*[|｜›»>·•/]\s*")
_MENU_MARKS = re.compile("[|｜·•]")
_SLASHES = re.compile(r"[^|｜›»>·•]*")  # no other separator than a slash
_FIRST_ITEMS = re.compile(r"(?:home|start|index|main page|首页|主页|首頁|网站首页)$", re.I)
# Entries that the menus of most sites have.
_SITE_ITEMS = re.compile(
    r"(?:home|homepage|main page|news|blog|about(?: us)?|contact(?: us)?|(?:my )?account|search"
    r"|faqs?|help|support|shop|store|cart|log ?in|log ?out|sign (?:in|up|out)|register|subscribe"
    r"|careers|jobs|press|site ?map|privacy(?: policy| notice)?"
    r"|terms(?: (?:of|and|&) \w{3,10})?|cookies?(?: policy| settings)?|legal(?: notice)?|imprint"
    r"|impressum|datenschutz|kontakt|disclaimer|advertise|feedback|accessibility|rss|facebook|twitter|instagram|youtube|linkedin"
    r"|products|services|首[页頁]|主[页頁]|网站首页|登[录錄入]|注[册冊]|退出|关于(?:我们|本站)|關於我們"
    r"|联系(?:我们|方式)|聯絡我們|网站地图|隐私(?:政策|声明)|使用条款|免责声明|版权声明|帮助(?:中心)?"
    r"|友情链接|广告服务|加入(?:我们|收藏)|设为首页|招聘(?:信息)?|意见反馈|新闻(?:中心)?|产品(?:中心)?"
    r"|服务|论坛|博客|购物车|会员中心|客服中心|搜索)$",
    re.IGNORECASE,
)
_TABLE_RULE = re.compile(r"\s*\|?(?:\s*:?-{2,}:?\s*\|)+(?:\s*:?-{2,}:?\s*)?$")
_CODE_MARKS = re.compile(r"""[$\\=<{}`;"]|(?:^|\s)'""")  # shell commands have menu separators too
_ITEM = 24  # maximum length of a menu entry in characters
_FEWEST_ITEMS = 4
_FEWEST_SITE_ITEMS = 3
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
    grades = [_classify_line(line) for line in lines]
    if not any(grades):
        return text
    for at in _table_rows(lines):
        grades[at] = 0
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


def _classify_line(line: str) -> int:
    """Classify a line: `_SURE` for boilerplate, `_MAYBE` for possible boilerplate, 0 for text."""
    if not line.strip() or len(line) > _LONGEST:
        return 0
    if any(form.search(line) for form in BOILERPLATE.values()):
        return _SURE
    return _classify_menu(line) or (_MAYBE if _WORDS.search(line) else 0)


def _table_rows(lines: list[str]) -> set[int]:
    """Return the indexes of the rows of Markdown tables, which have a row of dashes ("|---|")."""
    rows: set[int] = set()
    for at, line in enumerate(lines):
        if "|" in line and _TABLE_RULE.match(line):
            for step in (-1, 1):
                row = at
                while (
                    0 <= row < len(lines) and "|" in lines[row] and (row == at or row not in rows)
                ):
                    rows.add(row)
                    row += step
    return rows


def _classify_menu(line: str) -> int:
    """Classify a line of short items, which may be a menu, a breadcrumb trail, or a plain list."""
    items = [item for item in _SEPARATORS.split(line.strip()) if item]
    if len(items) < 2 or _CODE_MARKS.search(line):
        return 0
    is_short = all(len(item) <= _ITEM and not item.endswith(SENTENCE_ENDS) for item in items)
    site_items = sum(bool(_SITE_ITEMS.match(item)) for item in items)
    if is_short and site_items == len(items) >= _FEWEST_SITE_ITEMS:
        return _SURE
    has_slashes = _SLASHES.fullmatch(line) is not None
    if has_slashes and "/ " not in line:  # a path of a file system, such as home/user/bin/a
        return 0
    # Dates and fractions have the same separators, but no letters.
    worded = sum(any(map(str.isalpha, item)) for item in items)
    starts_at_home = bool(_FIRST_ITEMS.match(items[0]))
    if is_short and worded >= _FEWEST_ITEMS:
        if starts_at_home or (site_items and _MENU_MARKS.search(line)):
            return _SURE
        # Prose has slashes too: "tea / coffee / milk / water".
        return _MAYBE if site_items or not has_slashes else 0
    # The path of a page may be short, and end in its long title.
    is_path = (
        starts_at_home and site_items and len(items) > 2 and max(map(len, items[:-1])) <= _ITEM
    )
    return _MAYBE if is_path or (is_short and 2 * site_items > len(items)) else 0


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
    is_wrapped = [_is_wrapped(a, b, width) for a, b in pairwise(lines)]
    if sum(is_wrapped) < _FEWEST_WRAPPED or 2 * sum(is_wrapped) < len(is_wrapped):
        return paragraph
    parts = [lines[0]]
    for before, line, joined in zip(lines, lines[1:], is_wrapped, strict=False):
        full = len(before) >= 0.75 * width
        if joined or (full and before.endswith(SENTENCE_ENDS) and not line.startswith((" ", "\t"))):
            parts[-1] = _glue(parts[-1], line)
        else:
            parts.append(line)
    return "\n".join(parts)


def _is_wrapped(line: str, following: str, width: int) -> bool:
    """Return True if a line ends only because the text was wrapped at `width`."""
    if len(line) < 0.75 * width or line.endswith(SENTENCE_ENDS) or not following:
        return False
    return following[0].islower() or bool(_HAN_END.search(line) and _HAN_START.match(following))


def _glue(line: str, following: str) -> str:
    if line.endswith("-") and line[-2:-1].isalpha() and following[:1].islower():
        return line[:-1] + following
    return line + following if _HAN_START.match(following) else f"{line} {following}"
