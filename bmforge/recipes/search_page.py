"""HTML page of an adapter search, with the loss of every candidate in each round."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bmforge.html_page import write_page

__all__ = ["write_search_page"]

_STYLE = """
tr.best{font-weight:600}.loss{background:var(--c1);display:inline-block;height:9px;
border-radius:5px;margin-right:6px}
"""


def write_search_page(path: Path, state: Mapping[str, Any], title: str) -> Path:
    """Write the page of an adapter search; return its path.

    Args:
        path: output file.
        state: dict with `candidates`, a dict from name to number of parameters; `plan`, a list of
            (candidates, steps) per round; and `rounds`, a list of dicts from name to loss and
            metrics.
        title: title of the search.
    """
    rounds, plan = state["rounds"], state["plan"]
    losses = [result["loss"] for results in rounds for result in results.values()]
    worst = max(losses, default=1.0)
    heads = "".join(f"<th>step {steps:,}</th>" for _, steps in plan)
    metrics = list(
        dict.fromkeys(m for results in rounds for o in results.values() for m in o["metrics"])
    )
    heads += "".join(f"<th>{html.escape(metric)}</th>" for metric in metrics)
    order = sorted(state["candidates"], key=lambda name: _rank(rounds, name))
    is_done = len(rounds[-1]) == plan[-1][0]
    lines = []
    for rank, name in enumerate(order):
        cells = [_cell(results.get(name), worst) for results in rounds]
        last = next((results[name] for results in reversed(rounds) if name in results), None)
        values = ({} if last is None else last["metrics"]).get
        cells += [_number(values(metric)) for metric in metrics]
        mark = ' class="best"' if rank == 0 and is_done else ""
        count = f"{state['candidates'][name]:,}"
        body = "".join(f"<td>{cell}</td>" for cell in [count, *cells])
        lines.append(f"<tr{mark}><td>{html.escape(name)}</td>{body}</tr>\n")
    state_word = "done" if is_done else "still running"
    section = (
        f"<section><p>{len(order)} adapters, {len(plan)} rounds, {state_word}. Held-out loss "
        "after each round; the shorter the bar, the "
        f"better.</p><table><thead><tr><th>adapter</th><th>trained</th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></section>"
    )
    return write_page(path, title, "delta search", [section], style=_STYLE)


def _rank(rounds: list[Mapping[str, Any]], name: str) -> tuple[int, float]:
    """Return the sort key of a candidate: last round reached, then the loss in that round."""
    seen = [number for number, results in enumerate(rounds) if name in results]
    return (-seen[-1], rounds[seen[-1]][name]["loss"]) if seen else (1, 0.0)


def _cell(result: Mapping[str, Any] | None, worst: float) -> str:
    if result is None:
        return ""
    width = 6 * result["loss"] / worst if worst > 0 else 0
    return f'<span class="loss" style="width:{width:.2f}rem"></span>{result["loss"]:.4f}'


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
