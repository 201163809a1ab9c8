"""The benchmark of sums: both stages run, the curve is kept, and problems do not overlap."""

from __future__ import annotations

import json

import pytest

from benchmarks.alignment import arithmetic


@pytest.mark.long
def test_a_tiny_model_runs_through_both_stages_and_a_second_call_trains_nothing(
    tmp_path, monkeypatch
):
    sizes = ["--hidden-size", "16", "--layers", "1", "--sft-steps", "1", "--rl-steps", "2"]
    sizes += ["--rl-batch-size", "8", "--portion", "1"]
    options = arithmetic.make_parser().parse_args([str(tmp_path), *sizes])
    folder = tmp_path / "seed0"
    points = arithmetic.run_seed(folder, 0, options)
    steps = [(point["stage"], point["step"]) for point in points]
    assert steps == [("sft", 1), ("rl", 1), ("rl", 2)]
    metrics = (folder / "rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]  # resumed, not repeated

    def fail(argv):
        raise AssertionError(argv)

    monkeypatch.setattr(arithmetic, "bmforge", fail)
    assert arithmetic.run_seed(folder, 0, options) == points


def test_problems_of_the_files_do_not_overlap(tmp_path):
    arithmetic.arithmetic.write_problems(tmp_path, seed=1)
    texts = {
        name: {
            json.loads(line)["prompt"][0]["content"]
            for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
        }
        for name in ("solved", "pairs", "problems", "held_out")
    }
    counts = {"solved": 1500, "pairs": 1000, "problems": 6000, "held_out": 1000}
    assert {name: len(found) for name, found in texts.items()} == counts
    assert len(set.union(*texts.values())) == sum(counts.values())
