"""Charts of a corpus as inline SVG: the filter funnel, and bars."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["draw_bars", "draw_funnel"]

_WIDTH, _ROW, _GAP = 720, 34, 6
_MIDDLE, _WIDEST = 470, 470  # center and width of the funnel; names are to its left
_BAR_ROW, _BAR_LEFT, _BAR_WIDEST = 24, 170, 400
_BAR_ROOM = _WIDTH - _BAR_LEFT - _BAR_WIDEST


def draw_funnel(stages: Sequence[tuple[str, int, int]]) -> str:
    """Return an SVG chart of the filter funnel: the fraction of documents left after each stage.

    Args:
        stages: name, remaining documents and dropped documents of each stage.
    """
    most = max(stages[0][1], 1)
    parts, before = [], stages[0][1]
    for number, (name, left, gone) in enumerate(stages):
        top = number * (_ROW + _GAP)
        above, below = _WIDEST * before / most, _WIDEST * left / most
        corners = " ".join(
            f"{x:.1f},{y}"
            for x, y in (
                (_MIDDLE - above / 2, top),
                (_MIDDLE + above / 2, top),
                (_MIDDLE + below / 2, top + _ROW),
                (_MIDDLE - below / 2, top + _ROW),
            )
        )
        label = f"{left:,}" + (f" (−{gone:,})" if gone else "")
        parts.append(
            f'<polygon points="{corners}" class="part"><title>{escape(name)}: {label}</title>'
            f'</polygon><text x="0" y="{top + 22}">{escape(name)}</text>'
            f'<text x="{_MIDDLE}" y="{top + 22}" class="in">{label}</text>'
        )
        before = left
    height = len(stages) * (_ROW + _GAP)
    return _svg(height, "".join(parts), "funnel")


def draw_bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return an SVG horizontal bar chart.

    Args:
        rows: name, value, and label of each bar.
    """
    most = max((value for _, value, _ in rows), default=0) or 1
    parts = []
    for number, (name, value, label) in enumerate(rows):
        top, width = number * _BAR_ROW, _BAR_WIDEST * value / most
        parts.append(
            f'<text x="{_BAR_LEFT - 8}" y="{top + 16}" class="end">{escape(name)}</text>'
            f'<rect x="{_BAR_LEFT}" y="{top + 4}" width="{width:.1f}" height="14" class="part">'
            f"<title>{escape(name)}: {escape(label)}</title></rect>"
            f'<text x="{_BAR_LEFT + width + 6:.1f}" y="{top + 16}">{escape(label)}</text>'
        )
    return _svg(len(rows) * _BAR_ROW, "".join(parts), "bars")


def _svg(height: int, content: str, name: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{name}" '
        f'class="{name}">{content}</svg>'
    )
