"""The page about a model that became small: numbers as people read them, long lists by length."""

from __future__ import annotations

from pathlib import Path

from bmforge.compress import CompressReport
from bmforge.compress.report import ModelSizes, PhaseResults


def test_the_page_shows_facts_for_people(tmp_path: Path) -> None:
    facts = {
        "is_shrunk": True,
        "reason": "",
        "parameters_after": 677_888,
        "plan": {"layers.0": {"features": list(range(300))}, "gone": [], "kept": [3, 4]},
        "shares": {"layers.0": 0.25},
    }
    before, after = ModelSizes(941_056, 3_764_224, 0), ModelSizes(677_888, 1_171_000, 0)
    phase = PhaseResults("structure", after, {"structure": facts})
    report = CompressReport("OPT", before, (phase,))
    page = report.save(tmp_path).read_text("utf-8")
    rows = page.replace("<tr>", "\n<tr>").splitlines()
    assert any("941,056" in row and "before" in row for row in rows)
    assert "<th>is shrunk</th><td>yes</td>" in page
    assert "<th>parameters after</th><td>677,888</td>" in page
    assert "layers.0: features: 300; kept: 3, 4" in page
    assert "<th>reason</th>" not in page
    assert CompressReport.load(tmp_path).facts == report.facts  # whole in the file beside it
