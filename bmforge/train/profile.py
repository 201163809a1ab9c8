"""Profiler trace of a few training steps, with a table of the slowest operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from bmforge.errors import ConfigError
from bmforge.logging import get_logger

__all__ = ["SKIPPED_STEPS", "trace_steps"]

# The first steps allocate, compile and fill caches; the last of them warms up the profiler.
SKIPPED_STEPS = 3
_ROWS = 40


@contextmanager
def trace_steps(
    steps: int, run_dir: Path | None, rank: int, device: torch.device
) -> Iterator[Callable[[], None]]:
    """Context manager that profiles the steps after the third; call the yielded function per step.

    Writes ``run_dir/profile/trace-rankR.json``, for Perfetto or Chrome, and
    ``operators-rankR.txt``, a table of the operators that took the most time. Steps are counted
    from the start of this process, also in a resumed run.

    Args:
        steps: number of steps to trace; 0 to disable tracing.
        run_dir: directory of the run.
        rank: rank of this process, used in the file names.
        device: compute device of the model.

    Raises:
        ConfigError: tracing is enabled but there is no run directory.
    """
    if steps == 0:
        yield lambda: None
        return
    if run_dir is None:
        raise ConfigError(
            f"train.profile_steps={steps} needs a directory for the trace, but the Trainer has no "
            "run_dir. Pass run_dir to the Trainer."
        )
    written: list[Path] = []
    is_host = device.type == "cpu"
    profiler = profile(
        activities={ProfilerActivity.CPU} if is_host else supported_activities(),
        schedule=schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda done: written.append(_write(done, run_dir / "profile", rank, device)),
    )
    with profiler:
        yield profiler.step
    if not written:
        get_logger().warning(
            (
                "no trace was written, because train.profile_steps=%d traces the steps after the "
                "first %d, and the run ended before them."
            ),
            steps,
            SKIPPED_STEPS,
        )


def _write(done: profile, folder: Path, rank: int, device: torch.device) -> Path:
    """Write the trace and the table; return the trace's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trace-rank{rank}.json"
    done.export_chrome_trace(str(path))
    where = "cpu" if device.type == "cpu" else "device"
    table = done.key_averages().table(sort_by=f"self_{where}_time_total", row_limit=_ROWS)
    (folder / f"operators-rank{rank}.txt").write_text(table + "\n", encoding="utf-8")
    get_logger().info("trace: %s (open it at https://ui.perfetto.dev)", path)
    return path
