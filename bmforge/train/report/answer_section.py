"""Report section with generated answers and their rewards, grouped by prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["answer_section"]

_STEPS, _GROUPS = 4, 4


def answer_section(path: Path) -> str:
    """Return an HTML section with the answers of ``completions.jsonl`` at a few steps.

    Returns "" if the file does not exist.

    Args:
        path: file whose lines have step, prompt, completion, reward and advantage; an
            incomplete last line is ignored.
    """
    if not path.is_file():
        return ""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = [json.loads(line) for line in lines if line]
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return ""
    shown = sorted({steps[n * (len(steps) - 1) // (_STEPS - 1)] for n in range(_STEPS)})
    parts = [_step_table(step, [row for row in rows if row["step"] == step]) for step in shown]
    return "<section><h2>Answers and rewards</h2>" + "".join(parts) + "</section>"


def _step_table(step: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table of one step: the answers to the first prompts, best first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_text_of(row["prompt"]), []).append(row)
    lines = []
    for prompt, answers in list(groups.items())[:_GROUPS]:
        lines.append(f"<tr><th colspan='3'>{escape(prompt)}</th></tr>")
        lines += [_row(row) for row in sorted(answers, key=_reward_of, reverse=True)]
    return (
        f"<h3>step {step:,}</h3><table><tr><th>answer</th><th>reward</th><th>advantage</th></tr>"
        f"{''.join(lines)}</table>"
    )


def _row(row: Mapping[str, Any]) -> str:
    reward = "none" if row["reward"] is None else f"{row['reward']:.3g}"
    return (
        f"<tr><td><pre>{escape(str(row['completion']))}</pre></td><td class='num'>{reward}</td>"
        f"<td class='num'>{row['advantage']:.3g}</td></tr>"
    )


def _reward_of(row: Mapping[str, Any]) -> float:
    return float("-inf") if row["reward"] is None else float(row["reward"])


def _text_of(prompt: Any) -> str:
    """Return a prompt as text; for a conversation, its last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
