"""Peak memory above the imports, as a control group counts it, stays within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from bmforge.testing.limited_engine import ALLOWANCE, CASES, MODELS, Case, run_limited


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.long) for case in CASES[1:])]
)
def test_peak_is_within_the_budget(tmp_path: Path, case: Case) -> None:
    MODELS[case.model]().save_pretrained(tmp_path)
    found = run_limited(tmp_path, case)
    assert found["peak"] <= ALLOWANCE * found["budget"], found
    assert found["planned"] <= found["budget"], found
    assert (case.share == 1.0) == (found["moved"] == 0), found
