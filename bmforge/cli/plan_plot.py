"""SVG chart of a plan's memory: one stacked bar per layout, next to the device's memory."""

from __future__ import annotations

from html import escape

from bmforge.parallel.planner.search import Plan

__all__ = ["draw_memory"]

_GIB = 2**30
_COLOURS = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "optimizer": "#8172b3",
    "activations": "#55a868",
    "logits": "#c44e52",
    "communication": "#937860",
}
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 330, 560, 20, 8, 58


def draw_memory(result: Plan, count: int) -> str:
    """Return an SVG chart with a bar for each of the first `count` layouts."""
    rows = result.rows[:count]
    room = result.request.cluster.device.memory_bytes
    # Bars are cut at twice the device memory, so that very large ones do not make the others tiny.
    widest = min(max([room, *(row.memory.total for row in rows)]), 2 * room)
    scale = _WIDTH / widest
    bottom = _TOP + len(rows) * (_BAR + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 90}" '
        f'height="{bottom + 30}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(result.request.workload.name)}: memory per device</title>",
        *_legend(),
    ]
    for number, row in enumerate(rows):
        y, x = _TOP + number * (_BAR + _GAP), float(_LEFT)
        layout = str(row.choice.layout).removeprefix("Layout(").removesuffix(")")
        notes = [layout, f"{row.choice.rows} rows"]
        notes += ["recompute"] if row.choice.recompute else []
        notes += [f"offload {row.choice.offloaded:.0%}"] if row.choice.offloaded else []
        label = escape(", ".join(notes))
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 14}" text-anchor="end">{label}</text>')
        for name, colour in _COLOURS.items():
            width = min(row.memory.parts.get(name, 0.0) * scale, _LEFT + _WIDTH - x)
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="{_BAR}" '
                f'fill="{colour}"/>'
            )
            x += max(width, 0)
        lines.append(f'<text x="{x + 4:.1f}" y="{y + 14}">{row.memory.total / _GIB:.1f} GiB</text>')
    edge = _LEFT + room * scale
    lines.append(
        f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="{_TOP - 8}" y2="{bottom}" stroke="black" '
        f'stroke-dasharray="4 3"/><text x="{edge:.1f}" y="{bottom + 16}" text-anchor="middle">'
        f"{room / _GIB:.1f} GiB usable</text></svg>"
    )
    return "\n".join(lines) + "\n"


def _legend() -> list[str]:
    return [
        f'<rect x="{20 + 130 * i}" y="14" width="12" height="12" fill="{colour}"/>'
        f'<text x="{36 + 130 * i}" y="24">{name}</text>'
        for i, (name, colour) in enumerate(_COLOURS.items())
    ]
