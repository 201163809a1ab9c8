"""Extracts the main text of a web page, and checks it against the visible text.

An extractor (resiliparse or trafilatura) decides which blocks are main text. Both lose some main
text, for example a list close to the body, or a page without an article element. So the lines of
the visible text are compared with the extractor's. A lost sentence between the first and the last
sentence that the extractor kept is restored, and so is a list or caption between or next to them.
If much text before or after these two sentences is lost, the lines that the other extractor keeps
are added. If the visible text lacks much of the extractor's text, that text is kept as a whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bmforge.data.clean.characters import HAN, SENTENCE_ENDS
from bmforge.errors import MissingDependencyError

__all__ = ["MainText", "find_main_text", "unwrap_ruby"]

_SPACE = re.compile(r"\s+")
_BULLET = re.compile(r"^\s*(?:•|\d{1,3}\.)\s+")
_EAST_ASIAN = re.compile(f"[{HAN}\u3040-\u30ff]")
_SHORTEST = 25  # characters of a sentence; 10 in Chinese and Japanese
_SHORTEST_EAST_ASIAN = 10
_MOST_LINKED = 0.5  # share of a line's characters in links
_MUCH = 0.1  # share of lost characters above which the second extractor is used
_ENDS = (*SENTENCE_ENDS, ":", "：", "…")
_CLOSING = "\"'”’»」』）)]"
# Visible parts of a page that are rarely main text, by element, role, and class or id.
_SKIPPED_WORDS = (
    "newsletter subscribe cookie consent sidebar breadcrumb share-buttons sharing social related "
    "recommend advert promo banner popup modal comment footer navbar pagination copyright"
)
_SKIPPED = [
    *("nav", "footer", "aside", "form", "button", "select", "dialog", "menu", "iframe"),
    *("body > header", ".credit"),
    *(f'[role="{role}"]' for role in ("navigation", "contentinfo", "banner", "search", "dialog")),
    *(f'[{name}*="{word}" i]' for word in _SKIPPED_WORDS.split() for name in ("class", "id")),
]
# Unicode noncharacters, which do not occur in pages.
_LINK_BEGIN, _LINK_END = "\ufdd0", "\ufdd1"
_CAPTION_BEGIN, _CAPTION_END = "\ufdd2", "\ufdd3"
_MARK = re.compile(f"([{_LINK_BEGIN}{_LINK_END}{_CAPTION_BEGIN}{_CAPTION_END}])")
_LINK_TAG = re.compile(r"<a\b(?=[\s>])|</a\s*>", re.I)
_FIGURE_TAG = re.compile(r"<(/?)fig(ure|caption)\b([^<>]*)>", re.I)
# Stops at the next opening tag, so that thousands of tags without an end are searched once each.
_RUBY = re.compile(r"<ruby\b[^>]*>((?:[^<]|<(?!ruby\b)){0,5000}?)</ruby\s*>", re.I)
_READING = re.compile(
    r"<(?:rp|rt|rtc)\b[^>]*>.*?(?:</(?:rp|rt|rtc)\s*>|(?=<(?:rp|rt|rtc|rb)\b)|$)", re.I | re.S
)
_TAG = re.compile("<[^>]*>")
_MOST_SEARCHES = 2000  # maximum substring searches, each of which scans the whole text


@dataclass(frozen=True)
class MainText:
    """Main text of a page, with measures of its quality.

    Attributes:
        lost_ratio: fraction of the characters of visible sentences that are not in the text.
        link_ratio: fraction of the characters of the whole page that are links.
    """

    text: str
    lost_ratio: float
    link_ratio: float


def unwrap_ruby(page: str) -> str:
    """Replace each HTML ruby element with its base text, without the readings above it."""
    if "<ruby" not in page and "<RUBY" not in page:
        return page
    return _RUBY.sub(lambda ruby: _TAG.sub("", _READING.sub("", ruby[1])), page)


def find_main_text(tree: Any, page: str, reader: str) -> MainText:
    """Extract the main text of a page.

    Args:
        tree: resiliparse's tree of the page.
        page: the HTML.
        reader: extractor whose result is checked, ``resiliparse`` or ``trafilatura``.

    Raises:
        MissingDependencyError: trafilatura is selected but not installed.
    """
    readers: dict[str, Callable[[], str]] = {
        "resiliparse": lambda: _plain_text(tree, main_content=True),
        "trafilatura": lambda: _trafilatura_text(page),
    }
    text = readers.pop(reader)()
    lines, link_ratio = _visible_lines(page)
    by_reader = _lines_in(lines, text)
    chosen = _restore(lines, by_reader)
    if _lost_ratio(lines, chosen) > _MUCH and (other := _run_if_installed(readers.popitem()[1])):
        also = _restore(lines, _lines_in(lines, other))
        chosen = [first_choice or two for first_choice, two in zip(chosen, also, strict=True)]
    lost = _lost_ratio(lines, chosen)
    if chosen != by_reader:
        text = _combine(lines, chosen, by_reader, text)
    return MainText(text, lost, link_ratio)


def _plain_text(tree: Any, *, main_content: bool, skip: list[str] | None = None) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    text: str = extract_plain_text(
        tree,
        preserve_formatting=True,
        main_content=main_content,
        alt_texts=False,
        comments=False,
        skip_elements=skip or [],
    )
    return text


def _trafilatura_text(page: str) -> str:
    try:
        import trafilatura
    except ImportError as error:
        raise MissingDependencyError("trafilatura", "data", "html_reader='trafilatura'") from error
    return trafilatura.extract(page, include_comments=False) or ""


def _run_if_installed(reader: Callable[[], str]) -> str:
    """Return the main text that `reader` extracts; "" if its library is not installed."""
    try:
        return reader()
    except MissingDependencyError:
        return ""


@dataclass(frozen=True)
class _Line:
    """One line of a page's visible text.

    Attributes:
        raw: the line with its indentation and bullet.
        plain: its characters without spaces and bullet.
        is_item: True for a list item or a caption.
        is_linked: True if half of its characters or more are links.
        is_sentence: True if the line is long, has a sentence end and is not linked.
    """

    raw: str
    plain: str
    is_item: bool
    is_linked: bool
    is_sentence: bool


def _visible_lines(page: str) -> tuple[list[_Line], float]:
    """Return the lines of the visible text, without navigation, and the fraction of link text.

    Marker characters for the start and end of links and captions are inserted in the page before it
    is parsed.
    """
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(_FIGURE_TAG.sub(_mark_figure, _LINK_TAG.sub(_mark_link, page)))
    visible = _plain_text(tree, main_content=False, skip=_SKIPPED)
    lines = [_make_line(*split) for split in _split_marks(visible)]
    sizes = [(len(_SPACE.sub("", raw)), n) for raw, n, _ in _split_marks(_body_text(tree))]
    total = sum(size for size, _ in sizes)
    return lines, round(min(sum(n for _, n in sizes) / total, 1.0), 4) if total else 0.0


def _body_text(tree: Any) -> str:
    return "" if tree.body is None else tree.body.text or ""  # a frameset has no text


def _mark_link(tag: re.Match[str]) -> str:
    return f"{tag[0]}{_LINK_END}" if tag[0][1] == "/" else f"{_LINK_BEGIN}{tag[0]}"


def _mark_figure(tag: re.Match[str]) -> str:
    """Replace a figure by a div, as resiliparse omits figures, and mark the caption in it."""
    is_end, kind, attributes = tag.groups()
    if kind.lower() == "figure":
        return f"<{is_end}div{attributes}>"
    return f"{_CAPTION_END}</div>" if is_end else f"<div{attributes}>{_CAPTION_BEGIN}"


def _split_marks(marked: str) -> Iterator[tuple[str, int, bool]]:
    """Yield each line without markers, its number of linked characters, and if it is a caption.

    Spaces are not counted.
    """
    in_link = in_caption = False
    for line in marked.split("\n"):
        linked, has_caption, plain = 0, False, []
        for part in _MARK.split(line):
            if part in (_LINK_BEGIN, _LINK_END):
                in_link = part == _LINK_BEGIN
            elif part in (_CAPTION_BEGIN, _CAPTION_END):
                in_caption = part == _CAPTION_BEGIN
            elif part:
                size = len(_SPACE.sub("", part)) if in_link or in_caption else 0
                linked += size if in_link else 0
                has_caption = has_caption or (in_caption and size > 0)
                plain.append(part)
        yield "".join(plain), linked, has_caption


def _make_line(raw: str, linked: int, is_caption: bool) -> _Line:
    content = _BULLET.sub("", raw)
    plain = _SPACE.sub("", content)
    is_linked = linked > 0 and linked >= _MOST_LINKED * len(plain)
    shortest = _SHORTEST_EAST_ASIAN if _EAST_ASIAN.search(content) else _SHORTEST
    ends = content.rstrip().rstrip(_CLOSING).endswith(_ENDS)
    is_sentence = len(plain) >= shortest and ends and not is_linked
    return _Line(raw, plain, is_caption or content != raw, is_linked, is_sentence)


def _lines_in(lines: list[_Line], text: str) -> list[bool]:
    """Return a list with True for each visible line that the extractor's text contains."""
    reader_lines = {_SPACE.sub("", _BULLET.sub("", line)) for line in text.split("\n")}
    joined, searches, flags = _SPACE.sub("", text), 0, []
    for line in lines:
        is_known = bool(line.plain) and line.plain in reader_lines
        if line.is_sentence and not is_known and searches < _MOST_SEARCHES:
            searches += 1
            is_known = line.plain in joined
        flags.append(is_known)
    return flags


def _restore(lines: list[_Line], by_reader: list[bool]) -> list[bool]:
    """Add lost sentences between the first and the last sentence that the extractor kept.

    Lists and captions between or next to these sentences are added too, unless most of the lines
    are links.
    """
    places = [at for at, line in enumerate(lines) if by_reader[at] and line.is_sentence]
    chosen = list(by_reader)
    if not places:
        return chosen
    first, last = places[0], places[-1]
    for at in range(first, last):
        chosen[at] = chosen[at] or lines[at].is_sentence
    for begin, end in _main_items(lines, by_reader, first, last + 1):
        chosen[begin:end] = [True] * (end - begin)
    return chosen


def _main_items(
    lines: list[_Line], by_reader: list[bool], begin: int, end: int
) -> Iterator[tuple[int, int]]:
    """Yield the range of each list or caption of the main text, which is from `begin` to `end`.

    Only blank lines may separate a list before the main text from it. Between the main text and a
    list after it there may also be lines that the extractor kept, such as a heading or a table.
    """
    first = begin
    while begin > 0 and (lines[begin - 1].is_item or not lines[begin - 1].plain):
        begin -= 1
    menus = (at for at in range(begin, first - 1) if _is_menu(lines[at : at + 2]))
    begin = max((at + 2 for at in menus), default=begin)
    for start, stop in _item_runs(lines, begin, len(lines)):
        if start >= end:
            if any(lines[at].plain and not by_reader[at] for at in range(end, start)):
                return
            # Two adjacent links are the beginning of a menu that follows the list.
            menu = (at for at in range(start, stop - 1) if _is_menu(lines[at : at + 2]))
            end = stop = next(menu, stop)
        run = lines[start:stop]
        if 2 * sum(line.is_linked for line in run) < len(run):
            yield start, stop


def _is_menu(lines: list[_Line]) -> bool:
    return all(line.is_linked for line in lines)


def _item_runs(lines: list[_Line], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last line index of each list; a list may contain blank lines."""
    at = begin
    while at < end:
        if not lines[at].is_item:
            at += 1
            continue
        start = at
        while at < end and (lines[at].is_item or not lines[at].plain):
            at += 1
        yield start, at


def _lost_ratio(lines: list[_Line], chosen: list[bool]) -> float:
    sentences = [
        (len(line.plain), is_chosen)
        for line, is_chosen in zip(lines, chosen, strict=True)
        if line.is_sentence
    ]
    lost = sum(size for size, is_chosen in sentences if not is_chosen)
    return round(lost / max(sum(size for size, _ in sentences), 1), 4)


def _combine(lines: list[_Line], chosen: list[bool], by_reader: list[bool], text: str) -> str:
    """Join the chosen lines; if they lack much of the extractor's text, add them to it instead.

    They lack it if the main text is in an element that is skipped, such as one with the class
    "social-news".
    """
    joined = _join(lines, chosen)
    own = [_make_line(raw, 0, False) for raw in text.split("\n")]
    if _lost_ratio(own, _lines_in(own, joined)) <= _MUCH:
        return joined
    places: dict[str, list[int]] = defaultdict(list)
    for at in reversed(range(len(lines))):
        if by_reader[at] and lines[at].plain:
            places[lines[at].plain].append(at)
    parts, begin = [], 0
    for line in own:
        matches = places.get(line.plain, [])
        while matches and matches[-1] < begin:
            matches.pop()
        end = matches[-1] if matches else begin
        parts += [lines[at].raw for at in range(begin, end) if chosen[at] and not by_reader[at]]
        parts.append(line.raw)
        begin = end
    remaining = range(begin, len(lines))
    parts += [lines[at].raw for at in remaining if chosen[at] and not by_reader[at]]
    return "\n".join(parts)


def _join(lines: list[_Line], chosen: list[bool]) -> str:
    """Join the chosen lines; keep a blank line between two of them if the page has one."""
    parts: list[str] = []
    is_apart = False
    for line, is_chosen in zip(lines, chosen, strict=True):
        if is_chosen and line.plain:
            parts += ["", line.raw] if is_apart and parts else [line.raw]
            is_apart = False
        else:
            is_apart = is_apart or not line.plain
    return "\n".join(parts)
