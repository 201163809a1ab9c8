"""An SVG canvas with one style for all pictures, in light and dark."""

from __future__ import annotations

from html import escape
from pathlib import Path

# Kind of shape -> fill in light, stroke in light, fill in dark, stroke in dark.
KINDS = {
    "box": ("#ffffff", "#57606a", "#0d1117", "#8b949e"),
    "file": ("#f6f8fa", "#8c959f", "#161b22", "#6e7681"),
    "blue": ("#ddf4ff", "#0969da", "#0c2d6b", "#58a6ff"),
    "green": ("#dafbe1", "#1a7f37", "#033a16", "#3fb950"),
    "orange": ("#fff1e5", "#bc4c00", "#5a1e02", "#f0883e"),
    "purple": ("#fbefff", "#8250df", "#3c1e70", "#bc8cff"),
    "gray": ("#eaeef2", "#afb8c1", "#21262d", "#484f58"),
}


def _rules(theme: int) -> str:
    ink, note = (("#1f2328", "#57606a"), ("#e6edf3", "#9198a1"))[theme]
    shapes = "".join(
        f".{kind}{{fill:{colors[2 * theme]};stroke:{colors[2 * theme + 1]}}}"
        f".{kind}-line{{stroke:{colors[2 * theme + 1]};fill:none;stroke-width:2}}"
        for kind, colors in KINDS.items()
    )
    return (
        f"{shapes}.name{{fill:{ink}}}.note{{fill:{note}}}.value{{fill:{ink}}}"
        f".arrow,.axis{{stroke:{note}}}#tip{{fill:{note}}}"
    )


STYLE = (
    ".name{font:600 14px system-ui,sans-serif}.note{font:12px system-ui,sans-serif}"
    ".value{font:12px system-ui,sans-serif}"
    ".arrow{stroke-width:1.5;fill:none;marker-end:url(#head)}"
    ".axis{stroke-width:1;fill:none;stroke-opacity:.5}"
    f"{_rules(0)}@media (prefers-color-scheme:dark){{{_rules(1)}}}"
)
HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path id="tip" d="M0 0 8 4 0 8z"/></marker></defs>'
)


class Canvas:
    """Collects shapes and writes them as one SVG file.

    Args:
        width: width of the view box.
        height: height of the view box.
        title: the picture in words, for readers who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, kind: str = "box", r: int = 6) -> None:
        """Draw a rectangle with its upper left corner at (x, y)."""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{r}"'
        self._parts.append(f'<rect class="{kind}" {size}/>')

    def text(self, x: float, y: float, text: str, kind: str = "note", at: str = "middle") -> None:
        """Write text whose baseline is at y; `at` is start, middle or end."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{at}"'
        self._parts.append(f'<text class="{kind}" {place}>{escape(text)}</text>')

    def box(
        self, x: float, y: float, w: float, h: float, name: str, note: str = "", kind: str = "box"
    ) -> None:
        """Draw a rectangle with a name and a note in it."""
        self.rect(x, y, w, h, kind)
        middle = y + h / 2
        self.text(x + w / 2, middle + (5 if not note else -3), name, "name")
        if note:
            self.text(x + w / 2, middle + 15, note)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through the points with an arrow head at the last one."""
        path = " ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(f'<path class="arrow" d="M{path}"/>')

    def line(self, points: list[tuple[float, float]], kind: str = "axis") -> None:
        """Draw a line through the points."""
        path = " ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(f'<path class="{kind}" d="M{path}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """Draw a point of a chart."""
        self._parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')

    def save(self, path: Path) -> None:
        """Write the file."""
        view = f'viewBox="0 0 {self.width} {self.height}" role="img" aria-labelledby="title"'
        body = "\n  ".join(self._parts)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" {view}>\n'
            f'  <title id="title">{escape(self.title)}</title>\n'
            f"  <style>{STYLE}</style>\n  {HEAD}\n  {body}\n</svg>\n",
            encoding="utf-8",
        )
