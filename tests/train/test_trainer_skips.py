"""A step that must not be applied is applied on no process."""

from __future__ import annotations

import itertools
import math

import pytest
from trainer_cases import run_poisoned, write_corpus

from bmforge.testing import assert_equal_trees, run_distributed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


def assert_skipped(results, step: int) -> None:
    """Step `step` (0-based) changed nothing anywhere, the ones around it did, all ranks agree."""
    for rows, snapshots, _ in results:
        for earlier, later in itertools.pairwise(snapshots):
            names = [n for n in later if n.startswith("param/") and "k_proj.bias" not in n]
            same = all((earlier[n] == later[n]).all() for n in names if n in earlier)
            assert same == (later is snapshots[step])
        assert_equal_trees(snapshots[step], snapshots[step - 1])
        assert_equal_trees(snapshots[-1], results[0][1][-1])
        assert [("skipped" in row) for row in rows] == [i == step for i in range(len(rows))]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("world", "factor"),
    [(1, math.nan), (2, math.nan), pytest.param(4, math.inf, marks=pytest.mark.long)],
)
def test_a_non_finite_loss_on_one_rank_skips_the_step_on_all(corpus, precision, world, factor):
    results = run_distributed(run_poisoned, world, corpus, factor, precision=precision)
    assert_skipped(results, 3)
    for rows, _, _ in results:
        assert "non-finite" in rows[3]["skipped"]
        assert all(math.isfinite(row["loss"]) for i, row in enumerate(rows) if i != 3)


@pytest.mark.parametrize("world", [1, 2])
def test_fp16_overflow_halves_the_scale(corpus, world) -> None:
    """The loss stays finite; 2**16 times 1e5 does not fit into float16's gradients."""
    results = run_distributed(run_poisoned, world, corpus, 1e5, precision="fp16")
    assert_skipped(results, 3)
    for rows, _, scale in results:
        assert math.isfinite(rows[3]["loss"])
        assert rows[3]["skipped"] == "a non-finite gradient"
        assert [row["loss_scale"] for row in rows] == [2.0**16] * 4 + [2.0**15] * 2
        assert scale == 2.0**15


@pytest.mark.parametrize("world", [1, 2])
def test_a_spike_is_skipped(corpus, world) -> None:
    results = run_distributed(run_poisoned, world, corpus, 10.0, sigmas=20.0)
    assert_skipped(results, 3)
    assert "spike" in results[0][0][3]["skipped"]


def test_without_a_limit_a_spike_is_applied(corpus) -> None:
    rows, _, _ = run_distributed(run_poisoned, 1, corpus, 10.0)[0]
    assert not any("skipped" in row for row in rows)
