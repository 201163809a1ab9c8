"""Reads web pages: extracts their main text and metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.sources.document import Document, primary_subtag
from bmforge.data.sources.encoding import Decoded, decode
from bmforge.data.sources.main_text import find_main_text, unwrap_ruby
from bmforge.data.sources.record import ReadOptions, Record, Where
from bmforge.errors import DataError, MissingDependencyError

__all__ = ["parse_page", "read_html"]

# Limits above which a page is not parsed: 20,000 nested elements took a parser 19 s.
_LARGEST_BYTES = 1 << 23
_DEEPEST = 500
_MOST_TAGS = 300_000  # a million elements take 0.8 GB of memory
_MOST_ATTRIBUTES = 4000  # of one tag; the parser compares each with all others
_BYTES_PER_ZERO = 1000  # with fewer bytes per zero byte, a page is UTF-16 or no text
_HEAD_BYTES = 4096
# Elements with a required end tag; `<p>` and `<li>` may stay open, so they do not measure depth.
_NESTING = re.compile(
    rb"<(/?)(?:div|span|section|article|table|tbody|ul|ol|b|i|u|em|strong|font|center|a|form|"
    rb"blockquote|main|nav|header|footer|aside|small|big|sub|sup)\b",
    re.I,
)
_TAG_START = re.compile(rb"<[a-zA-Z]")
_CHARSET = re.compile(
    rb"""(?:<meta[^>]{0,200}?charset|<\?xml[^>]{0,80}?encoding)\s*=\s*["']?\s*([\w.:-]{2,40})""",
    re.I,
)
_SPACE = re.compile(r"\s+")
_DATE = re.compile(r"\d{4}(-\d\d(-\d\d)?)?")
_DATES = (
    ('meta[property="article:published_time"]', "content"),
    ('meta[name="date"]', "content"),
    ('meta[itemprop="datePublished"]', "content"),
    ("time[datetime]", "datetime"),
)
_LICENSES = ('link[rel~="license"]', 'a[rel~="license"]')
_TERMS = (
    ('meta[name="tdm-policy"]', "content"),
    ('link[rel~="terms-of-service"]', "href"),
    ('a[rel~="terms-of-service"]', "href"),
)


def read_html(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the page as one record."""
    raw = stream.read(_LARGEST_BYTES + 1)
    yield Record(where.whole(), len(raw), partial(parse_page, raw, where, options))


def parse_page(
    raw: bytes, where: Where, options: ReadOptions, *, charset: str = "", url: str = ""
) -> Document | Drop:
    """Extract the main text and metadata of a page.

    Args:
        raw: the HTML.
        where: location of the page.
        options: reader options.
        charset: encoding declared by the protocol, used if the page declares none.
        url: URL of the page.

    Raises:
        DataError: the encoding cannot be detected.
        MissingDependencyError: the HTML reader is not installed.
    """
    if len(raw) > _LARGEST_BYTES:
        return Drop("page_too_large", len(raw), _LARGEST_BYTES, str(where))
    tags = raw.count(b"<")
    if tags > _MOST_TAGS:
        return Drop("page_tags", tags, _MOST_TAGS, str(where))
    depth = _depth(raw)
    if depth > _DEEPEST:
        return Drop("page_too_deep", depth, _DEEPEST, str(where))
    attributes = _most_attributes(raw)
    if attributes > _MOST_ATTRIBUTES:
        return Drop("page_attributes", attributes, _MOST_ATTRIBUTES, str(where))
    labels = [label.decode("ascii", "ignore") for label in _CHARSET.findall(raw[:_HEAD_BYTES])]
    decoded = _decode_page(raw, where, [charset, *labels], options)
    page = unwrap_ruby(decoded.text)
    tree = _parse(page, where)
    main = find_main_text(tree, page, options.html_reader)
    text = main.text
    if not text.strip():
        return Drop("no_main_text", 0, 1, cut_excerpt(_SPACE.sub(" ", tree.title or str(where))))
    metadata = {
        "url": url or _find(tree, (('link[rel="canonical"]', "href"),)),
        "license": _find(tree, tuple((selector, "href") for selector in _LICENSES)),
        "terms": _find(tree, _TERMS),
        "date": _date(_find(tree, _DATES)),
        "language": primary_subtag(_find(tree, (("html", "lang"),))),
    }
    title = _SPACE.sub(" ", tree.title or "").strip()
    if title and title not in text:
        text = f"{title}\n\n{text}"
    scores = {"link_ratio": main.link_ratio, **decoded.scores()}
    if main.lost_ratio:
        scores["lost_ratio"] = main.lost_ratio
    return Document(text, where.source, where.whole(), **metadata, scores=scores)


def _decode_page(raw: bytes, where: Where, labels: list[str], options: ReadOptions) -> Decoded:
    """Decode a page; a few zero bytes are removed, as browsers do, and count as replaced."""
    run = partial(decode, labels=labels, errors=options.errors, encoding=options.encoding)
    location, zeros = f"page {str(where)!r}", raw.count(0)
    try:
        return run(raw, location)
    except DataError:
        is_text = 0 < zeros <= max(len(raw) // _BYTES_PER_ZERO, 1)
        if options.errors == "strict" or not is_text or raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise
    decoded = run(raw.replace(b"\0", b""), location)
    return replace(decoded, replaced=decoded.replaced + zeros)


def _depth(raw: bytes) -> int:
    depth = deepest = 0
    for tag in _NESTING.finditer(raw):
        depth = max(depth - 1, 0) if tag[1] else depth + 1
        deepest = max(deepest, depth)
    return deepest


def _most_attributes(raw: bytes) -> int:
    """Return about the number of attributes of the tag with the most, if it is a long tag."""
    most = 0
    for piece in raw.split(b">"):
        if len(piece) > _MOST_ATTRIBUTES and (tag := _TAG_START.search(piece)):
            most = max(most, len(piece[tag.start() :].split()))
    return most


def _parse(page: str, where: Where) -> Any:
    try:
        from resiliparse.parse.html import HTMLTree
    except ImportError as error:
        raise MissingDependencyError("resiliparse", "data", f"reading {where}") from error
    try:
        return HTMLTree.parse(page)
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"page {str(where)!r} cannot be parsed as HTML ({error}). Remove it from the input."
        ) from error


def _find(tree: Any, selectors: tuple[tuple[str, str], ...]) -> str:
    """Return the first nonempty attribute value of elements that the CSS selectors match, or ""."""
    for selector, attribute in selectors:
        element = tree.document.query_selector(selector)
        value = element.getattr(attribute, "") if element is not None else ""
        if value:
            return value.strip()
    return ""


def _date(value: str) -> str:
    match = _DATE.match(value)
    return match[0] if match else ""
