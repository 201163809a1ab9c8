"""`profile_steps` leaves a trace that can be read, of the steps it names."""

from __future__ import annotations

import json

import pytest
from trainer_cases import run, write_corpus

from bmforge.errors import ConfigError, DistributedError
from bmforge.testing import run_distributed
from bmforge.train import TrainConfig


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


@pytest.mark.parametrize(("steps", "asked", "traced"), [(4, 1, [3]), (5, 9, [3, 4])])
def test_traces_steps_after_the_third(corpus, tmp_path, steps, asked, traced):
    run_dir = tmp_path / "run"
    changes = {"steps": steps, "profile_steps": asked}
    rows, _ = run_distributed(run, 1, corpus, str(run_dir), **changes)[0]
    assert len(rows) == steps
    events = json.loads((run_dir / "profile" / "trace-rank0.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert "aten::embedding" in names
    marks = {name for name in names if name.startswith("ProfilerStep")}
    marks.discard(f"ProfilerStep#{steps}")  # begun, when the run ended
    assert marks == {f"ProfilerStep#{number}" for number in traced}
    assert "aten::" in (run_dir / "profile" / "operators-rank0.txt").read_text()


def test_nothing_is_written_without(corpus, tmp_path):
    run_distributed(run, 1, corpus, str(tmp_path / "run"), steps=3)
    assert not (tmp_path / "run" / "profile").exists()


def test_settings_without_effect_are_refused(corpus):
    with pytest.raises(ConfigError, match=r"profile_steps=2 has no effect with train.steps=3"):
        TrainConfig(steps=3, profile_steps=2)
    with pytest.raises(ConfigError, match=r"profile_steps=-1"):
        TrainConfig(profile_steps=-1)
    with pytest.raises(DistributedError, match="needs a directory for the trace"):
        run_distributed(run, 1, corpus, None, steps=4, profile_steps=1)
