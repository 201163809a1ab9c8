"""A step that changes texts by switches: repair, width, script, invisible marks, lines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.lines import drop_boilerplate, join_wrapped_lines
from bmforge.data.clean.repair import repair_text
from bmforge.data.clean.script import convert_chinese, detect_script, fold_width, strip_invisible
from bmforge.data.sources.document import Document, primary_subtag
from bmforge.errors import ConfigError

__all__ = ["TidyText"]


@dataclass(frozen=True)
class TidyText:
    """Change texts; all switches are off but `repair`, which leaves sound texts alone.

    Attributes:
        repair: read again what was read in a wrong encoding.
        invisible: drop characters without width.
        width: letters and digits of half width, kana of full width.
        chinese: ``"Hans"`` or ``"Hant"``: write Chinese in these characters.
        boilerplate: drop lines of menus, cookie notices, copyrights, ICP numbers.
        wrapped: make one line of each paragraph that was wrapped at a width.

    Raises:
        ConfigError: `chinese` is neither.
    """

    repair: bool = True
    invisible: bool = False
    width: bool = False
    chinese: str = ""
    boilerplate: bool = False
    wrapped: bool = False

    def __post_init__(self) -> None:
        """Refuse a script that Chinese is not written in."""
        if self.chinese not in ("", "Hans", "Hant"):
            raise ConfigError(f"chinese={self.chinese!r}: needed is 'Hans', 'Hant' or ''")

    @property
    def version(self) -> str:
        """What changes whenever a text may come out differently."""
        return f"tidy=3 {self!r}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document with its text changed, or a `Drop` where nothing is left."""
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
    """Tell a text whose characters are converted: Japanese and Korean ones are not."""
    if document.language:
        return primary_subtag(document.language) == "zh"
    return detect_script(document.text) not in ("Jpan", "Kore")
