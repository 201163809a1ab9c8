"""metrics.jsonl through kills and resumes, TensorBoard, throughput, memory, the progress line."""

import builtins
import json
import logging
import math
import re
import resource
import sys
import types

import pytest
import torch

from bmforge.errors import DataError, MissingDependencyError, install_command
from bmforge.logging import get_logger
from bmforge.train.report.metrics import (
    MetricsWriter,
    Throughput,
    WandbSink,
    format_progress,
    measure_memory,
    read_metrics,
)


def write(run_dir, steps, resume_step=None):
    with MetricsWriter(run_dir, resume_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, {"loss": 10.0 / step})


def steps_in(run_dir):
    return [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]


def test_rows_are_json_one_a_line_and_flushed(tmp_path):
    writer = MetricsWriter(tmp_path / "new" / "run", tensorboard=False)
    writer.write(1, {"loss": torch.tensor(2.5), "lr": 1e-3, "note": "ä", "skipped": None})
    writer.write(2, {"loss": math.nan, "grad_norm": math.inf})
    lines = writer.path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 2.5, "lr": 1e-3, "note": "ä", "skipped": None},
        {"step": 2, "loss": None, "grad_norm": None},
    ]
    writer.close()


def test_resume_drops_later_rows_and_a_new_run_all(tmp_path):
    write(tmp_path, range(1, 9))
    write(tmp_path, [6, 7], resume_step=5)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    write(tmp_path, [1])
    assert steps_in(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_any_torn_tail_is_dropped(tmp_path):
    write(tmp_path, [1, 2, 3])
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(start, len(whole) - 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:cut])
        assert steps_in(tmp_path) == [1, 2]
        write(tmp_path, [4], resume_step=3)
        assert steps_in(tmp_path) == [1, 2, 4]


def test_damage_inside_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)
    path.write_text('[1]\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"line 1.*integer 'step'"):
        MetricsWriter(tmp_path, 3, tensorboard=False)


def test_sinks_get_every_row(tmp_path):
    seen = []
    sinks = [lambda step, row: seen.append((step, row))]
    with MetricsWriter(tmp_path, tensorboard=False, sinks=sinks) as writer:
        writer.write(3, {"loss": 1.5})
    assert seen == [(3, {"step": 3, "loss": 1.5})]


def test_tensorboard_holds_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0 / step, "skipped": "spike" if step == 2 else None})
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write(3, {"loss": 7.0})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 0.5), (3, 7.0)]
    assert events.Tags()["scalars"] == ["loss"]


def hide(monkeypatch, *packages):
    """Make these packages look as if they were not installed."""
    real = builtins.__import__

    def guarded(name, *args, **kwargs):
        if name in packages:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for package in packages:
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(builtins, "__import__", guarded)


def test_without_tensorboard_it_says_so_once_and_goes_on(tmp_path, monkeypatch, caplog):
    hide(monkeypatch, "torch.utils.tensorboard")
    logger = get_logger()
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "bmforge"), MetricsWriter(tmp_path) as writer:
            writer.write(1, {"loss": 1.0})
            writer.write(2, {"loss": 1.0})
    finally:
        logger.removeHandler(caplog.handler)
    (record,) = caplog.records
    assert install_command("report") in record.getMessage()
    assert steps_in(tmp_path) == [1, 2]


def test_wandb_is_optional_and_gets_the_rows(tmp_path, monkeypatch):
    logged, started = [], {}
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: logged.append("finished"),
    )
    fake = types.SimpleNamespace(init=lambda **settings: started.update(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tmp_path / "run-7").mkdir()
    sink = WandbSink("project", tmp_path / "run-7", {"lr": 0.1})
    with MetricsWriter(tmp_path, tensorboard=False, sinks=[sink]) as writer:
        writer.write(4, {"loss": 2.0})
    sink.close()
    assert logged == [(4, {"loss": 2.0}), "finished"]
    assert (started["name"], started["resume"]) == ("run-7", "allow")
    assert started["config"] == {"lr": 0.1}
    first = started["id"]
    WandbSink("project", tmp_path / "run-7")
    assert started["id"] == first  # a resumed run goes on in the same place
    (tmp_path / "elsewhere" / "run-7").mkdir(parents=True)
    WandbSink("project", tmp_path / "elsewhere" / "run-7")
    assert started["id"] != first  # and another run of the same name does not
    hide(monkeypatch, "wandb")
    with pytest.raises(MissingDependencyError, match=re.escape(install_command("wandb"))):
        WandbSink("project", tmp_path)


def test_throughput_over_a_window_with_its_own_clock():
    now = [0.0]
    speed = Throughput(flops_per_token=6.0, peak_flops=1200.0, window_steps=2, clock=lambda: now[0])
    assert (speed.tokens_per_s, speed.step_s, speed.mfu) == (0.0, 0.0, 0.0)
    for tokens, seconds, pause in ((1000, 1.0, 50.0), (100, 2.0, 50.0), (300, 2.0, 0.0)):
        speed.start()
        now[0] += seconds
        speed.stop(tokens)
        now[0] += pause
    assert speed.tokens_per_s == (100 + 300) / 4.0
    assert speed.step_s == 2.0
    assert speed.mfu == pytest.approx(100.0 * 6.0 / 1200.0)
    assert Throughput(flops_per_token=6.0).mfu is None


def test_memory_is_that_of_this_process():
    found = measure_memory(lambda: 11)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 10e6 < found["memory_bytes"] <= found["memory_peak_bytes"]
    assert found["memory_peak_bytes"] <= peak * 1.2
    assert found["device_memory_bytes"] == 11
    assert "device_memory_bytes" not in measure_memory(lambda: None)


def test_progress_line():
    line = format_progress(12, 300, 3.14159, 1234.5, 1_250_000_000, 3725.0)
    assert line == "step 12/300  loss 3.1416  1,234 tokens/s  1.25 GB  ETA 1:02:05"
    line = format_progress(1, 2, 0.5, 2_345_678.0, 9, 90061.0, mfu=0.4567)
    assert line == "step 1/2  loss 0.5000  2,346k tokens/s  MFU 45.7%  0.00 GB  ETA 1d 1:01:01"
    assert format_progress(1, 2, math.nan, 0.0, 9, math.inf).endswith("ETA ?")
