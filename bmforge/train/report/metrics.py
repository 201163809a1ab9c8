"""Metrics of a run during training: metrics.jsonl, TensorBoard and the progress line.

A row of ``metrics.jsonl`` is one JSON object with ``step`` (completed optimizer steps) and any of
``loss lr grad_norm tokens_per_s mfu tokens memory_bytes`` (training), ``val_loss`` (validation) and
``skipped`` (reason why the step was not applied), and the metrics of the objective, in validation
with the prefix ``val_``. A number that is not finite is written as null.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bmforge.errors import DataError, MissingDependencyError, install_command
from bmforge.files import replace_file
from bmforge.host_memory import peak_resident_bytes, resident_bytes
from bmforge.logging import get_logger

__all__ = [
    "MetricsWriter",
    "Row",
    "Throughput",
    "WandbSink",
    "format_progress",
    "measure_memory",
    "read_metrics",
    "validation_row",
]

Row = dict[str, Any]
Sink = Callable[[int, Mapping[str, Any]], None]


def read_metrics(path: str | Path) -> list[Row]:
    """Return the rows of a metrics.jsonl; an incomplete last line (of a killed run) is ignored.

    Raises:
        DataError: a line other than the last is not a JSON object with a step.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for number, line in enumerate(lines[: last + 1]):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("the line is not a JSON object with an integer 'step'")
        except ValueError as error:
            if number == last:
                break
            raise DataError(
                f"line {number + 1} of {path} is not a row of metrics ({error}). Remove the line, "
                "or restore the file."
            ) from error
        rows.append(row)
    return rows


class MetricsWriter:
    """Appends rows to ``run_dir/metrics.jsonl`` and sends them to sinks; one per run, on rank 0.

    Args:
        run_dir: directory of the run, created if missing.
        resume_step: step from which a run resumes; later rows are dropped, so that curves have no
            duplicate steps. If None, a new file is started.
        tensorboard: also write ``run_dir/tensorboard`` if TensorBoard is installed.
        sinks: functions to call with (step, values) for every row, such as a `WandbSink`.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int | None = None,
        tensorboard: bool = True,
        sinks: Sequence[Sink] = (),
    ) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        _truncate(self.path, resume_step)
        # Unbuffered: a row is in the file when `write` returns.
        self._file = self.path.open("ab", buffering=0)
        self._sinks = tuple(sinks)
        self._board = _open_board(run_dir, resume_step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one row without buffering; on a full disk the row is dropped with a warning."""
        row = {"step": int(step), **{name: _plain(value) for name, value in values.items()}}
        try:
            self._append((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())
            self._show(row)
        except OSError as error:
            get_logger().warning("the metrics of step %d could not be written: %s", step, error)
        for sink in self._sinks:
            sink(step, row)

    def _append(self, line: bytes) -> None:
        """Write a complete line or nothing, because an incomplete line would corrupt the file."""
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            self._file.truncate(end)
            raise

    def _show(self, row: Row) -> None:
        """Send a row's numbers to TensorBoard; disable TensorBoard after the first failure."""
        board, self._board = self._board, None
        if board is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    board.add_scalar(name, value, row["step"])
            self._board = board

    def close(self) -> None:
        """Close the files; later writes raise an error."""
        self._file.close()
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                get_logger().warning("the TensorBoard log is incomplete: %s", error)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _truncate(path: Path, resume_step: int | None) -> None:
    """Drop the rows after `resume_step` by writing a temporary file and renaming it."""
    if not path.exists():
        return
    rows = [] if resume_step is None else read_metrics(path)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w", encoding="utf-8") as file:
        for row in rows:
            if resume_step is not None and row["step"] <= resume_step:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _plain(value: Any) -> Any:
    """Return a JSON number (None for NaN and infinity), or text unchanged."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _open_board(run_dir: Path, resume_step: int | None) -> Any:
    """Create a TensorBoard writer; if the package is missing, log this and return None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        get_logger().info(
            "no TensorBoard log is written, because the package tensorboard is not installed. "
            "Install it with: %s",
            install_command("report"),
        )
        return None
    purge = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)


class WandbSink:
    """Sends every row to Weights & Biases; pass it to `MetricsWriter` in ``sinks``.

    Args:
        project: name of the Weights & Biases project.
        run_dir: directory of the run; its name is the run's name, and a random id is stored in
            ``run_dir/wandb_id``, so that a resumed run continues the same W&B run.
        config: settings to show in W&B.

    Raises:
        MissingDependencyError: wandb is not installed.
    """

    def __init__(
        self, project: str, run_dir: str | Path, config: Mapping[str, Any] | None = None
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingDependencyError("wandb", "wandb", "Weights & Biases logging") from error
        id_file = Path(run_dir) / "wandb_id"
        if not id_file.exists():
            replace_file(id_file, secrets.token_hex(8))
        self._run = wandb.init(
            project=project,
            name=Path(run_dir).resolve().name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(run_dir),
            config=dict(config or {}),
        )

    def __call__(self, step: int, values: Mapping[str, Any]) -> None:
        """Send one row of metrics to W&B."""
        self._run.log({k: v for k, v in values.items() if k != "step"}, step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


class Throughput:
    """Tokens per second over recent steps, and MFU if the peak FLOPS are known.

    Call `start` before and `stop` after each step; the time between steps (evaluation, saving) is
    not counted.

    Args:
        flops_per_token: FLOPs per token of the whole model's forward and backward passes; None if
            unknown.
        peak_flops: peak FLOP/s of all devices together; None if unknown.
        window_steps: number of steps to average over.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        window_steps: int = 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque(maxlen=window_steps)
        self._started = clock()

    def start(self) -> None:
        """Start timing a step."""
        self._started = self._clock()

    def stop(self, tokens: int) -> None:
        """Stop timing a step in which all processes together processed `tokens` tokens."""
        now = self._clock()
        self._steps.append((tokens, now - self._started))
        self._started = now

    @property
    def step_s(self) -> float:
        """Mean seconds per step in the window (0 before the first step)."""
        return sum(s for _, s in self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second in the window (0 before the first step)."""
        seconds = sum(s for _, s in self._steps)
        return sum(t for t, _ in self._steps) / seconds if seconds > 0 else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, 0 to 1; None if the FLOPs or the peak are unknown."""
        if not self._flops_per_token or not self._peak_flops:
            return None
        return self.tokens_per_s * self._flops_per_token / self._peak_flops


def validation_row(result: Any) -> Row:
    """Return the metrics row of an `EvalResult`: ``val_loss``, and each metric as ``val_NAME``."""
    return {"val_loss": result.loss, **{f"val_{n}": v for n, v in result.metrics.items()}}


def measure_memory(device_memory: Callable[[], int | None] | None = None) -> dict[str, int]:
    """Return a dict with this process's current and peak resident set size in bytes.

    Args:
        device_memory: function that returns the used accelerator memory in bytes, such as
            `bmforge.device.device_memory_bytes`, or None without an accelerator; the value is added
            as ``device_memory_bytes``.
    """
    peak = peak_resident_bytes()
    now = resident_bytes() or peak
    memory = {"memory_bytes": now, "memory_peak_bytes": max(peak, now)}
    on_device = None if device_memory is None else device_memory()
    if on_device is not None:
        memory["device_memory_bytes"] = on_device
    return memory


def format_progress(
    step: int,
    total_steps: int,
    loss: float,
    tokens_per_s: float,
    memory_bytes: int,
    eta_s: float,
    mfu: float | None = None,
) -> str:
    """Format the progress line: step, loss, tokens/s, MFU if known, memory and remaining time."""
    rate = f"{tokens_per_s:,.0f}" if tokens_per_s < 100_000 else f"{tokens_per_s / 1000:,.0f}k"
    parts = [f"step {step}/{total_steps}", f"loss {loss:.4f}", f"{rate} tokens/s"]
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}")
    parts += [f"{memory_bytes / 1e9:.2f} GB", f"ETA {_duration(eta_s)}"]
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, preceded by days if there are any."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock
