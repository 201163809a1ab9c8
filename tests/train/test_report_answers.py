"""The report shows answers with their rewards, and charts of post-training metrics."""

from __future__ import annotations

import json
from pathlib import Path

from bmforge.train import write_report


def _answer(step: int, text: str, reward: float | None) -> str:
    row = {"step": step, "prompt": [{"role": "user", "content": "1<2?"}], "completion": text}
    return json.dumps({**row, "reward": reward, "advantage": 0.5}) + "\n"


def test_answers_and_reward_charts_are_shown(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": 0.0, "lr": 1.0, "reward": n / 4, "entropy": 2.0} for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    assert "Answers and rewards" not in page
    assert "Length of answers" not in page
    lines = [_answer(1, "worse <b>", 0.25), _answer(1, "better", 0.75), _answer(3, "last", None)]
    (tmp_path / "completions.jsonl").write_text("".join(lines) + '{"step": 4, "pro')
    page = write_report(tmp_path).read_text()
    for title in ("Reward", "KL divergence and entropy", "Answers and rewards", "step 1", "step 3"):
        assert title in page
    assert "1&lt;2?" in page
    assert "worse &lt;b&gt;" in page
    assert page.index("better") < page.index("worse")  # best first
    assert "step 4" not in page
