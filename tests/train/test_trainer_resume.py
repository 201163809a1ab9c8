"""An interrupted run that goes on is the uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_cases import logged, run, run_interrupted, run_signalled, write_corpus

from bmforge.errors import ConfigError, DistributedError
from bmforge.testing import assert_close, assert_equal_trees, run_distributed
from bmforge.train import Trainer
from bmforge.train.checkpoint.checkpointer import find_checkpoints
from bmforge.train.report.metrics import Row


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    ("optimizer", "precision", "at"),
    [("adamw", "fp32", 4), ("muon", "fp32", 1), ("adamw", "fp16", 3)],
)
def test_resumed_is_bit_identical(corpus, tmp_path, world, optimizer, precision, at) -> None:
    changes = {"optimizer": optimizer, "precision": precision, "dropout": 0.2, "evaluating": True}
    changes["eval_every_steps"] = 2
    want = run_distributed(run, world, corpus, str(tmp_path / "whole"), **changes)
    got = run_distributed(run_interrupted, world, corpus, str(tmp_path / "cut"), at, **changes)
    rows = logged(str(tmp_path / "whole"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for (cut_rows, state), (_, wanted) in zip(got, want, strict=True):
        assert cut_rows == rows
        assert_equal_trees(state, wanted)
    assert any(name.startswith("exp_avg/") for name in want[0][1])


def test_dropout_was_on(corpus) -> None:
    """Or else the test above would say nothing about random numbers."""
    plain, dropped, again = (
        run_distributed(run, 1, corpus, dropout=p, **more)[0][0][0]["loss"]
        for p, more in ((0.0, {}), (0.2, {}), (0.2, {"seed": 1}))
    )
    assert len({plain, dropped, again}) == 3


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (4, 1)])
def test_another_world_size_goes_on(corpus, tmp_path: Path, before: int, after: int) -> None:
    want_rows, want = run_distributed(run, 1, corpus, str(tmp_path / "whole"))[0]
    folder = str(tmp_path / "cut")
    run_distributed(run, before, corpus, folder, until_step=3)
    _, state = run_distributed(run, after, corpus, folder)[0]
    rows = logged(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, wanted in zip(rows, want_rows, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    parameters = {n: t for n, t in want.items() if n.startswith("param/")}
    # Adam divides by the root of tiny second moments: k_proj.bias, whose gradient is 0, is noise.
    sound = {n: t for n, t in parameters.items() if not n.endswith("k_proj.bias")}
    assert_close({n: state[n] for n in sound}, sound, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("world", [1, 3])
def test_a_signal_on_one_rank_stops_all_after_saving(corpus, tmp_path: Path, world: int) -> None:
    folder = tmp_path / "run"
    stopped = run_distributed(run_signalled, world, corpus, str(folder), dropout=0.1)
    assert {step for step, _ in stopped} == {4}
    assert [path.name for path in find_checkpoints(folder / "checkpoints")] == ["step-00000004"]
    on = run_distributed(run, world, corpus, str(folder), dropout=0.1)
    whole = run_distributed(run, world, corpus, str(tmp_path / "whole"), dropout=0.1)
    assert logged(str(folder)) == logged(str(tmp_path / "whole"))
    assert_equal_trees(on[0][1], whole[0][1])


def test_other_numbers_for_the_optimizer_are_refused(corpus, tmp_path: Path) -> None:
    """They would have no effect: the optimizer goes on with what was saved."""
    run_distributed(run, 1, corpus, str(tmp_path), until_step=1)
    said = r"optim\.lr=0\.5 \(was 0\.01\).* Restore the earlier settings"
    with pytest.raises(DistributedError, match=f"(?i){said}"):
        run_distributed(run, 1, corpus, str(tmp_path), lr=0.5)
    (rest, _), *_ = run_distributed(run, 1, corpus, str(tmp_path))
    assert len(rest) == 5


def test_a_finished_run_stays_as_it_is(corpus, tmp_path: Path) -> None:
    _, want = run_distributed(run, 1, corpus, str(tmp_path))[0]
    torch.manual_seed(5)
    rows, state = run_distributed(run, 1, corpus, str(tmp_path))[0]
    assert rows == []
    assert_equal_trees(state, want)


class Counting:
    """A callback that has a state: what it has counted."""

    name = "counting"

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, trainer: Trainer, row: Row) -> None:
        self.count += trainer.step

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def count_twice(corpus: str, folder: str) -> tuple[int, int]:
    """Stop at step 2 and go on with another object; then with none."""
    first, second = Counting(), Counting()
    run(corpus, folder, until_step=2, callbacks=(first,))
    run(corpus, folder, until_step=4, callbacks=(second,))
    with pytest.raises(ConfigError, match=r"had the callbacks \['counting'\], but this run"):
        run(corpus, folder)
    return first.count, second.count


def test_callbacks_with_a_state_go_on(corpus, tmp_path: Path) -> None:
    """As the loader does; a run without them, which lack it, does not."""
    assert run_distributed(count_twice, 1, corpus, str(tmp_path)) == [(3, 10)]
