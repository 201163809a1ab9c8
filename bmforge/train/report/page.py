"""HTML report of a run: one self-contained page generated from the run directory.

Reads ``metrics.jsonl`` (required) and, if present, ``run.toml``, ``results.json``,
``samples.jsonl``, ``completions.jsonl`` and ``checkpoints/``. The curves are inline SVG, so the
page needs no network, scripts or other packages; it supports light and dark mode.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bmforge.errors import DataError
from bmforge.files import check_place
from bmforge.html_page import write_page
from bmforge.train.report.answer_section import answer_section
from bmforge.train.report.metrics import Row, read_metrics

__all__ = ["write_report"]

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 40
_MAX_POINTS = 4000
_MAX_DOTS = 300
Point = tuple[float, float]


@dataclass(frozen=True)
class _Curve:
    """Line of a chart: name, (step, value) points and color class (c1 to c4)."""

    name: str
    points: list[Point]
    colour: str


def write_report(run_dir: str | Path) -> Path:
    """Write ``run_dir/report.html`` and return its path.

    ``results.json`` is an object of numbers, or of objects of numbers such as ``{"bits per byte":
    {"model": 1.9, "unigram": 4.5}}``; ``samples.jsonl`` has ``{"step": 100, "prompt": "...",
    "text": "..."}`` on each line.

    Raises:
        DataError: the run has no metrics yet, or one of its files is damaged.
    """
    run_dir = Path(run_dir)
    check_place(run_dir / "report.html", "report", is_file=True)
    metrics = run_dir / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.is_file() else []
    if not rows:
        raise DataError(
            f"{run_dir} has no metrics yet ({metrics.name} is missing or empty). Pass the "
            "directory of a run that has trained for at least one step."
        )
    results = _read_results(run_dir / "results.json")
    sections = [
        _tiles(rows, results),
        '<section class="charts">' + "".join(_charts(rows)) + "</section>",
        _results_section(results),
        _samples_section(run_dir / "samples.jsonl"),
        answer_section(run_dir / "completions.jsonl"),
        _skips_section(rows),
        _checkpoints_section(run_dir / "checkpoints"),
        _config_section(run_dir / "run.toml"),
    ]
    return write_page(run_dir / "report.html", run_dir.resolve().name, "training report", sections)


# Sections of the page


def _points(rows: Sequence[Row], key: str) -> list[Point]:
    """Return the (step, value) points of all rows with a finite number under `key`."""
    points = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            points.append((float(row["step"]), float(value)))
    return points


def _charts(rows: Sequence[Row]) -> list[str]:
    """Return SVG charts: four for every run, and more for a run with post-training metrics."""
    skips = [float(row["step"]) for row in rows if row.get("skipped")]
    loss = [_Curve("training", _points(rows, "loss"), "c1")]
    validation = _points(rows, "val_loss")
    if validation:
        loss.append(_Curve("validation", validation, "c2"))
    return [
        _chart("Loss", loss, skips),
        _chart("Learning rate", [_Curve("learning rate", _points(rows, "lr"), "c3")]),
        _chart("Gradient norm", [_Curve("norm", _points(rows, "grad_norm"), "c4")], skips),
        _chart("Tokens per second", [_Curve("tokens/s", _points(rows, "tokens_per_s"), "c1")]),
        *(_chart(title, curves) for title, keys in _MORE if (curves := _curves(rows, keys))),
    ]


# Additional charts, for runs with these metrics: title -> metrics.
_MORE = (
    ("Reward", ("reward", "reward_std")),
    ("Rewards of pairs", ("rewards/chosen", "rewards/rejected", "rewards/margins")),
    ("KL divergence and entropy", ("kl", "entropy")),
    ("Length of answers", ("completions/mean_length", "completions/mean_terminated_length")),
    ("Clipped share", ("clip_ratio/region_mean", "completions/clipped_ratio")),
)


def _curves(rows: Sequence[Row], keys: Sequence[str]) -> list[_Curve]:
    """Return a curve for each of the metrics that the run has."""
    curves = [
        _Curve(key.rpartition("/")[2], _points(rows, key), f"c{number}")
        for number, key in enumerate(keys, 1)
    ]
    return [curve for curve in curves if curve.points]


def _tiles(rows: Sequence[Row], results: dict[str, Any]) -> str:
    """Return an HTML row with the most important numbers of the run."""
    loss, validation = _points(rows, "loss"), _points(rows, "val_loss")
    speed = [value for _, value in _points(rows, "tokens_per_s")]
    tiles = [("steps", f"{max(row['step'] for row in rows):,}")]
    if loss:
        tiles.append(("training loss", f"{loss[-1][1]:.4f}"))
    if validation:
        tiles.append(("best validation loss", f"{min(v for _, v in validation):.4f}"))
    for key, value in results.items():
        model = value.get("model") if isinstance(value, dict) else None
        if isinstance(model, int | float):
            tiles.append((key.replace("_", " "), _number(float(model))))
    if speed:
        tiles.append(("median tokens/s", f"{sorted(speed)[len(speed) // 2]:,.0f}"))
    tiles.append(("skipped steps", str(sum(1 for row in rows if row.get("skipped")))))
    cells = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)
    return f'<section class="tiles">{cells}</section>'


def _results_section(results: dict[str, Any]) -> str:
    """Return HTML tables of the evaluation results, with bars for comparable numbers."""
    flat = {k: v for k, v in results.items() if not isinstance(v, dict)}
    tables = [(k, v) for k, v in results.items() if isinstance(v, dict) and v]
    if flat:
        tables.append(("other", flat))
    if not tables:
        return ""
    parts = []
    for title, entries in tables:
        numbers = [abs(v) for v in entries.values() if _is_number(v)]
        largest = max(numbers, default=0.0) if title != "other" else 0.0
        lines = "".join(_result_row(k, v, largest) for k, v in entries.items())
        parts.append(f"<h3>{escape(title.replace('_', ' '))}</h3><table>{lines}</table>")
    return "<section><h2>Evaluation</h2>" + "".join(parts) + "</section>"


def _result_row(name: str, value: Any, largest: float) -> str:
    """Return one HTML table row, with a bar if there are values to compare with."""
    text = _number(float(value)) if _is_number(value) else str(value)
    bar = ""
    if largest > 0 and _is_number(value):
        bar = f'<td class="bar"><i style="width:{100 * abs(value) / largest:.1f}%"></i></td>'
    return f"<tr><th>{escape(name)}</th><td class='num'>{escape(text)}</td>{bar}</tr>"


def _samples_section(path: Path) -> str:
    """Return an HTML section with the samples, newest first."""
    if not path.is_file():
        return ""
    samples = []
    for row in reversed(read_metrics(path)):
        prompt, text = str(row.get("prompt", "")), str(row.get("text", ""))
        if prompt and text.startswith(prompt):
            text = text[len(prompt) :]
        samples.append(
            f"<figure><figcaption>step {row['step']:,}</figcaption>"
            f"<pre><mark>{escape(prompt)}</mark>{escape(text)}</pre></figure>"
        )
    return "<section><h2>Samples</h2>" + "".join(samples) + "</section>" if samples else ""


def _skips_section(rows: Sequence[Row]) -> str:
    """Return an HTML list of skipped steps."""
    lines = [
        f"<tr><th>{row['step']:,}</th><td>{escape(str(row['skipped']))}</td></tr>"
        for row in rows
        if row.get("skipped")
    ]
    if not lines:
        return ""
    return f"<section><h2>Skipped steps</h2><table>{''.join(lines)}</table></section>"


def _checkpoints_section(directory: Path) -> str:
    """Return an HTML list of the existing checkpoints and their sizes."""
    if not directory.is_dir():
        return ""
    lines = []
    for path in sorted(p for p in directory.iterdir() if re.fullmatch(r"step-\d+", p.name)):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        lines.append(
            f"<tr><th>{escape(path.name)}</th><td class='num'>{size / 1e6:,.1f} MB</td></tr>"
        )
    if not lines:
        return ""
    return f"<section><h2>Checkpoints</h2><table>{''.join(lines)}</table></section>"


def _config_section(path: Path) -> str:
    """Return an HTML section with the resolved configuration."""
    if not path.is_file():
        return ""
    text = escape(path.read_text(encoding="utf-8"))
    return (
        f"<section><h2>Configuration</h2><details open><summary>{path.name}</summary>"
        f"<pre>{text}</pre></details></section>"
    )


def _read_results(path: Path) -> dict[str, Any]:
    """Return the contents of results.json; {} if it does not exist."""
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} is not valid JSON: {error}. Remove the file, or evaluate again."
        ) from error
    if not isinstance(results, dict):
        raise DataError(
            f"{path} must contain a JSON object of numbers, not {type(results).__name__}. Remove "
            "the file, or evaluate again."
        )
    return results


# SVG of a chart


def _chart(title: str, curves: list[_Curve], skips: Sequence[float] = ()) -> str:
    """Return one SVG chart, with title, legend and the curves over the steps."""
    points = [point for curve in curves for point in curve.points]
    legend = "".join(f'<span class="{c.colour}">{escape(c.name)}</span>' for c in curves)
    if skips:
        legend += '<span class="skip">skipped step</span>'
    head = f"<figcaption><b>{escape(title)}</b>{legend}</figcaption>"
    if not points:
        return f'<figure class="chart">{head}<p class="none">no values recorded</p></figure>'
    steps = [x for x, _ in points] + list(skips)
    x_ticks = _ticks(min(steps), max(steps), integers_only=True)
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    x_range = (min(steps), max(steps)) if min(steps) < max(steps) else (x_ticks[0], x_ticks[-1])
    scale = _Scale(x_range, (y_ticks[0], y_ticks[-1]))
    inside = [x for x in x_ticks if x_range[0] <= x <= x_range[1]]
    drawn = [_axes(scale, inside, y_ticks)]
    drawn += [
        f'<line class="skipline" x1="{scale.x(s):.1f}" x2="{scale.x(s):.1f}" y1="{_TOP}" '
        f'y2="{_HEIGHT - _BOTTOM}"><title>step {s:.0f} skipped</title></line>'
        for s in skips
    ]
    drawn += [_line(curve, scale) for curve in curves if curve.points]
    return (
        f'<figure class="chart">{head}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)} over steps">{"".join(drawn)}</svg></figure>'
    )


@dataclass(frozen=True)
class _Scale:
    """Maps (step, value) to coordinates of the chart."""

    x_range: Point
    y_range: Point

    def x(self, step: float) -> float:
        low, high = self.x_range
        return _LEFT + (step - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(scale: _Scale, x_ticks: list[float], y_ticks: list[float]) -> str:
    """Return the SVG of grid lines, tick labels and the label of the x axis."""
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{scale.y(y):.1f}" '
        f'y2="{scale.y(y):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{scale.y(y) + 4:.1f}" text-anchor="end">{_number(y)}</text>'
        for y in y_ticks
    ]
    parts += [
        f'<line class="grid" x1="{scale.x(x):.1f}" x2="{scale.x(x):.1f}" y1="{bottom}" '
        f'y2="{bottom + 4}"/><text x="{scale.x(x):.1f}" y="{bottom + 18}" '
        f'text-anchor="middle">{_number(x)}</text>'
        for x in x_ticks
    ]
    middle = (_LEFT + right) / 2
    return "".join(parts) + (
        f'<text x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">step</text>'
    )


def _line(curve: _Curve, scale: _Scale) -> str:
    """Return the SVG of one curve, with a tooltip for each point."""
    points = _thin(curve.points, _MAX_POINTS)
    path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
    radius = 3 if len(points) <= 60 else 2
    shown = "dot" if len(points) <= 30 else "dot hidden"
    dots = "".join(
        f'<circle class="{shown}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="{radius}">'
        f"<title>{escape(curve.name)} {_number(y)} at step {x:,.0f}</title></circle>"
        for x, y in _thin(points, _MAX_DOTS)
    )
    name = escape(curve.name)
    return f'<g class="{curve.colour}"><polyline data-curve="{name}" points="{path}"/>{dots}</g>'


def _thin(points: list[Point], most: int) -> list[Point]:
    """Return about `most` evenly spaced points, always including the last one."""
    every = max(1, math.ceil(len(points) / most))
    thinned = points[::every]
    return thinned if thinned[-1] == points[-1] else [*thinned, points[-1]]


def _ticks(low: float, high: float, integers_only: bool = False) -> list[float]:
    """Return about five round tick values from `low` to `high` (seven integers for steps)."""
    if high <= low:
        pad = 1.0 if integers_only else abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / (6 if integers_only else 4)
    size = 10.0 ** math.floor(math.log10(raw))
    unit = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    if integers_only:
        unit = max(1.0, math.ceil(unit))
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    digits = max(0, 12 - math.floor(math.log10(unit)))
    return [round(i * unit, digits) for i in range(first, last + 1)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: float) -> str:
    """Format a number as short text, such as 1,200 or 0.0003 or 2.5e-07."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
