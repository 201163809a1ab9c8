"""Extracts text from XML with a streaming parser, so that memory is small for any file size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html.entities import html5
from html.parser import HTMLParser
from xml.parsers import expat

from bmforge.errors import DataError

__all__ = ["TextRules", "read_page_text", "read_xml_text", "walk_xml"]

_BLOCK_NAMES = "p div h1 h2 h3 h4 h5 h6 li br tr blockquote dd dt section pre"
_VOID_NAMES = "area base br col embed hr img input link meta source track wbr"
_HTML_BLOCKS, _VOID = frozenset(_BLOCK_NAMES.split()), frozenset(_VOID_NAMES.split())
_HTML_UNSEEN = frozenset(("head", "script", "style"))
Attributes = Mapping[str, str]


def walk_xml(
    raw: bytes,
    begin: Callable[[str, Attributes], None],
    end: Callable[[str], None],
    text: Callable[[str], None],
) -> None:
    """Parse XML; call the functions for each element start, element end, and text.

    Element names are passed without their namespace.

    Raises:
        DataError: the XML is not well-formed, or defines entities, which may expand without bound.
    """
    parser = expat.ParserCreate(namespace_separator="}")
    parser.buffer_text = True

    def refuse(*_: object) -> None:
        raise DataError(
            "the XML declares entities (<!ENTITY ...>), which are not allowed because they may "
            "expand without limit. Remove the declarations, or skip the file."
        )

    def skip_entity(name: str, is_parameter: bool) -> None:
        if not is_parameter:  # an HTML entity; the document type that defines it is not loaded
            text(html5.get(f"{name};", ""))

    parser.StartElementHandler = lambda name, attributes: begin(name.rpartition("}")[2], attributes)
    parser.EndElementHandler = lambda name: end(name.rpartition("}")[2])
    parser.CharacterDataHandler = text
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = skip_entity
    parser.UseForeignDTD(True)
    try:
        parser.Parse(raw, True)
    except (expat.ExpatError, ValueError) as error:
        raise DataError(
            f"the XML is not well-formed ({error}). Correct the file, or remove it from the input."
        ) from error


class TextRules:
    """Rules to extract the text of an XML format: elements with text, and separators.

    Args:
        shown: elements whose text is included; None for all text.
        before, after: dict from element name to the string inserted before or after the element.
        hidden: elements whose content is excluded.
    """

    def __init__(
        self,
        shown: frozenset[str] | None,
        before: Mapping[str, str],
        after: Mapping[str, str],
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self.shown, self.before, self.after, self.hidden = shown, before, after, hidden


def read_xml_text(raw: bytes, rules: TextRules) -> str:
    """Extract the text of an XML file by the rules of its format."""
    parts: list[str] = []
    state = {"shown": 0, "hidden": 0}

    def begin(name: str, _: Attributes) -> None:
        state["hidden"] += name in rules.hidden
        state["shown"] += rules.shown is None or name in rules.shown
        if not state["hidden"] and name in rules.before:
            parts.append(rules.before[name])

    def end(name: str) -> None:
        if not state["hidden"] and name in rules.after:
            parts.append(rules.after[name])
        state["hidden"] -= name in rules.hidden
        state["shown"] -= rules.shown is None or name in rules.shown

    def text(data: str) -> None:
        if state["shown"] and not state["hidden"]:
            parts.append(data)

    walk_xml(raw, begin, end, text)
    return "".join(parts)


def read_page_text(raw: bytes) -> str:
    """Extract the text of an XHTML page, a line per block; malformed XML is parsed as HTML."""
    parts: list[str] = []
    hidden = 0

    def begin(name: str, _: object) -> None:
        nonlocal hidden
        hidden += name in _HTML_UNSEEN
        parts.append("\n" if name in _HTML_BLOCKS else "")

    def end(name: str) -> None:
        nonlocal hidden
        hidden = max(hidden - (name in _HTML_UNSEEN), 0)
        parts.append("\n" if name in _HTML_BLOCKS else "")

    def text(data: str) -> None:
        if not hidden:
            parts.append(data.replace("\n", " ").replace("\r", " "))

    try:
        walk_xml(raw, begin, end, text)
    except DataError:
        parts.clear()
        hidden = 0
        _HtmlParser(begin, end, text).walk(raw.decode("utf-8", "replace"))
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return "\n".join(line for line in lines if line)


class _HtmlParser(HTMLParser):
    """HTML parser with the same callbacks as `walk_xml`, for malformed XHTML."""

    def __init__(
        self,
        begin: Callable[[str, object], None],
        end: Callable[[str], None],
        text: Callable[[str], None],
    ) -> None:
        super().__init__(convert_charrefs=True)
        self._begin, self._end, self.handle_data = begin, end, text  # type: ignore[method-assign, assignment]

    def walk(self, page: str) -> None:
        """Parse a whole page, calling the callbacks."""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Handle a start tag, which for a void element is also the end tag."""
        self._begin(tag, attrs)
        if tag in _VOID:
            self._end(tag)

    def handle_endtag(self, tag: str) -> None:
        """Handle an end tag, except of void elements, which have ended already."""
        if tag not in _VOID:
            self._end(tag)
