"""Best checkpoint and early stopping, against transformers' rules and plainly shortened runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import run, run_scripted, write_corpus

from bmforge.errors import ConfigError
from bmforge.parallel import Layout
from bmforge.testing import assert_equal_trees, run_distributed
from bmforge.train import TrainConfig
from bmforge.train.best import BestEvaluation
from bmforge.train.checkpoint.format import find_checkpoints, step_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


def stop_of_transformers(losses: list[float], patience: int, threshold: float) -> tuple[int, int]:
    """Return (evaluation that ends the run, best evaluation), by transformers' callback."""
    callback = transformers.EarlyStoppingCallback(patience, threshold)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    arguments: Any = transformers.TrainingArguments(
        "unused", metric_for_best_model="loss", greater_is_better=False, report_to=[]
    )
    best = 0
    for number, loss in enumerate(losses, 1):
        callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:  # as Trainer does afterwards
            state.best_metric, best = loss, number
        if control.should_training_stop:
            return number, best
    return len(losses), best


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.integers(0, 12).map(lambda n: n / 4), min_size=1, max_size=12),
    patience=st.integers(1, 4),
    threshold=st.sampled_from([0.0, 0.25, 0.6]),
)
def test_the_rule_is_that_of_transformers(
    losses: list[float], patience: int, threshold: float
) -> None:
    config = TrainConfig(
        eval_every_steps=1,
        load_best_model_at_end=True,
        early_stopping_patience=patience,
        early_stopping_threshold=threshold,
    )
    best, end = BestEvaluation(config, True, True), len(losses)
    for number, loss in enumerate(losses, 1):
        best.note(number, loss)
        # A run that is resumed here goes on in the same way.
        state, best = best.state_dict(), BestEvaluation(config, True, True)
        best.load_state_dict(state)
        if best.is_exhausted:
            end = number
            break
    assert (end, best.step) == stop_of_transformers(losses, patience, threshold)


def test_a_loss_that_is_not_a_number_is_no_improvement() -> None:
    config = TrainConfig(eval_every_steps=1, load_best_model_at_end=True, early_stopping_patience=2)
    best = BestEvaluation(config, True, True)
    assert not best.note(1, math.nan)
    assert best.step is None
    assert best.note(2, 3.0)
    assert not best.note(3, math.nan)
    assert (best.step, best.is_exhausted) == (2, False)


@pytest.mark.parametrize(
    ("world", "layout", "at"),
    [(1, Layout(), None), (1, Layout(), 8), (2, Layout(zero=3), 7), (2, Layout(tp=2), None)],
)
def test_a_run_ends_with_its_best_weights(
    corpus: str, tmp_path: Path, world: int, layout: Layout, at: int | None
) -> None:
    """Stopped at step 10, it has the weights of a run of 4 steps; interrupted and resumed too."""
    losses = [3.0, 1.0, 2.0, 2.0, 2.0, 0.5]
    changes: dict[str, Any] = {"steps": 12, "layout": layout}
    best = {
        **{"eval_every_steps": 2, "early_stopping_patience": 3, "load_best_model_at_end": True},
        **{"keep_last": 1, "save_every_steps": 1},
    }
    folder = str(tmp_path / "run")
    if at is not None:
        more = {"until_step": at, **changes, **best}
        run_distributed(run_scripted, world, corpus, folder, losses, **more)
    step, got = run_distributed(run_scripted, world, corpus, folder, losses, **changes, **best)[0]
    assert step == 10
    assert [step_of(p) for p in find_checkpoints(tmp_path / "run" / "checkpoints")] == [10, 4]
    _, want = run_distributed(run, world, corpus, None, until_step=4, **changes)[0]
    same = {n: t for n, t in want.items() if n.startswith("param/")}
    assert_equal_trees({n: got[n] for n in same}, same)


def test_a_lost_best_checkpoint_is_said(
    corpus: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, folder = [1.0, 3.0, 2.0], str(tmp_path / "run")
    changes: dict[str, Any] = {"steps": 6, "eval_every_steps": 2, "load_best_model_at_end": True}
    run_scripted(corpus, folder, losses, until_step=4, **changes)
    checkpoints = find_checkpoints(tmp_path / "run" / "checkpoints")
    assert [step_of(path) for path in checkpoints] == [4, 2]
    checkpoints[1].rename(tmp_path / "elsewhere")
    _, got = run_scripted(corpus, folder, losses, **changes)
    assert "the best checkpoint so far, of step 2, is missing" in caplog.text
    _, want = run(corpus, None, steps=6)
    assert_equal_trees(got, want)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"load_best_model_at_end": True}, "Set train.eval_every_steps"),
        ({"early_stopping_patience": 2}, "Set train.eval_every_steps"),
        ({"early_stopping_patience": 0, "eval_every_steps": 1}, "must be above 0"),
        ({"early_stopping_threshold": 0.1}, "no effect without train.early_stopping_patience"),
        ({"early_stopping_threshold": -1.0}, "must be at least 0"),
    ],
)
def test_settings_without_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        TrainConfig(**fields)


def test_a_run_without_evaluations_or_directory_is_refused(corpus: str) -> None:
    changes: dict[str, Any] = {"eval_every_steps": 2, "load_best_model_at_end": True}
    with pytest.raises(ConfigError, match="has no validation data"):
        run(corpus, None, **changes)
    with pytest.raises(ConfigError, match="needs checkpoints"):
        run(corpus, None, evaluating=True, **changes)
