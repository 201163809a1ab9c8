"""Optional text repairs as one step: encoding, width, script, invisible characters, lines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.lines import drop_boilerplate, join_wrapped_lines
from bmforge.data.clean.repair import repair_text
from bmforge.data.clean.script import convert_chinese, detect_script, fold_width, strip_invisible
from bmforge.data.sources.document import Document, primary_subtag
from bmforge.errors import ConfigError

__all__ = ["RepairText"]


@dataclass(frozen=True)
class RepairText:
    """A step that repairs texts; only `repair` is on by default.

    `repair` does not change intact texts.

    Attributes:
        repair: True to undo decoding with a wrong encoding.
        invisible: True to remove zero-width characters.
        width: True to convert letters and digits to half width, and kana to full width.
        chinese: target script of Chinese text: ``"Hans"``, ``"Hant"``, or "" to keep it.
        boilerplate: True to remove lines of menus, cookie notices, copyrights, and ICP numbers.
        wrapped: True to join the lines of hard-wrapped paragraphs.

    Raises:
        ConfigError: `chinese` has a different value.
    """

    repair: bool = True
    invisible: bool = False
    width: bool = False
    chinese: str = ""
    boilerplate: bool = False
    wrapped: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an unknown script."""
        if self.chinese not in ("", "Hans", "Hant"):
            raise ConfigError(
                f"chinese={self.chinese!r} must be 'Hans' (simplified), 'Hant' (traditional) or "
                "'' (no conversion)."
            )

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"text_repairs=4 {self!r}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document with its text repaired, or a `Drop` if no text is left."""
        text = document.text
        if self.repair:
            text = repair_text(text)
        if self.invisible:
            text = strip_invisible(text)
        if self.width:
            text = fold_width(text)
        if self.chinese and _may_be_chinese(document):
            text = convert_chinese(text, self.chinese)
        if self.boilerplate:
            text = drop_boilerplate(text)
        if self.wrapped:
            text = join_wrapped_lines(text)
        if not text.strip():
            return Drop("nothing_left", 0, 1, cut_excerpt(document.text))
        return document if text == document.text else replace(document, text=text)


def _may_be_chinese(document: Document) -> bool:
    """Return True if the text may be Chinese, that is, is not known to be in another language."""
    if document.language:
        return primary_subtag(document.language) == "zh"
    return detect_script(document.text) not in ("Jpan", "Kore")
