"""Measures one GPU in at most ten minutes: writes a page and a JSONL file.

    python -m benchmarks.gpu.run [--output docs/results/DATE-gpu.md] [--only 'decode-*']
        [--budget-s 590]
    python -m benchmarks.gpu.run --rehearse

Every row runs in its own process with a time limit. The process is forked after the import of torch
and bmforge, so that the imports take no time on the device. A row is written to the JSONL file and
to the page as soon as it ends. A row that fails, runs out of time or does not fit into memory
reports so, and the next row runs. `--rehearse` runs every row on the CPU with tiny sizes, to test
the script; its figures mean nothing. `rows.py` lists the rows, and the other modules measure them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import ROWS, SECTIONS, Row

MARK = "ROW "
# Time that a process needs before it measures anything.
SHORTEST_S = 5.0
# Modules that are imported before rows are forked, and after --rehearse has set the environment.
# `benchmarks.harness` imports torch, so functions import it too.
PRELOADED = ("decoding", "engines", "exactness", "training", "transfers")
# A rehearsed row takes seconds of processor time; a busy machine makes minutes of them.
REHEARSAL_S = 280.0


def run_row(row: Row, rehearse: bool, limit_s: float) -> dict[str, Any]:
    """Run a row in a process; return its record, with the values that it reached.

    Args:
        row: row to run.
        rehearse: run with tiny sizes on the CPU.
        limit_s: time limit in seconds.
    """
    start = time.perf_counter()
    code, out, errors = run_forked(lambda: measure(row, rehearse), limit_s)
    values, status = read_output(out.splitlines())
    if not status and code is None:
        status = f"out of time after {limit_s:.0f} s"
    elif not status:
        last = " ".join(errors.strip().splitlines()[-1:])
        status = f"failed with exit code {code}: {last[:200]}"
    record = {"row": row.name, "section": row.section, "status": status}
    return record | {"seconds": round(time.perf_counter() - start, 1), "values": values}


def run_forked(run: Callable[[], None], limit_s: float) -> tuple[int | None, str, str]:
    """Run a function in a forked process; return its exit code, output and errors.

    The exit code is None if it ran out of time. Processes that it started are killed.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = os.fork()
        if not process:
            os.setsid()
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            code = 1
            try:
                run()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # exit handlers of process groups can wait for missing ranks
        code = wait_for(process, limit_s)
        with contextlib.suppress(ProcessLookupError):  # no child process is left
            os.killpg(process, signal.SIGKILL)
        out.seek(0)
        errors.seek(0)
        return code, out.read(), errors.read()


def wait_for(process: int, limit_s: float) -> int | None:
    """Return the exit code of a child process; None if it is killed after the time limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def read_output(lines: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the merged values of a row's output, and its status; "" if it did not end."""
    values: dict[str, Any] = {}
    for line in lines:
        if line.startswith(MARK):
            values |= json.loads(line.removeprefix(MARK))
    return values, values.pop("status", "")


def print_values(values: dict[str, Any]) -> None:
    """Print values for `read_output`, at once."""
    print(MARK + json.dumps(values), flush=True)


def measure(row: Row, rehearse: bool) -> None:
    """Run a row in this process and print its values as they come."""
    import torch

    from benchmarks.gpu.measure import SkippedRowError

    module, _, function = row.function.partition(":")
    run = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    try:
        for values in run(**row.arguments(rehearse)):
            print_values(values)
        print_values({"status": "ok"})
    except SkippedRowError as reason:
        print_values({"status": f"skipped: {reason}"})
    except torch.OutOfMemoryError:
        print_values({"status": "out of memory"})


def text_of(column: str, value: Any) -> str:
    """Return a table cell."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        is_share = column.endswith(("share", "MFU"))
        return f"{value:.1%}" if is_share else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def page(records: Sequence[dict[str, Any]], title: str, head: str) -> str:
    """Return the page of all records so far, with one table per section."""
    from benchmarks.harness import table

    parts = [f"# {title}", head]
    for section, note in SECTIONS.items():
        rows = [record for record in records if record["section"] == section]
        if not rows:
            continue
        columns = list(dict.fromkeys(name for record in rows for name in record["values"]))
        cells = [
            [
                record["row"],
                *(
                    text_of(name, record["values"][name]) if name in record["values"] else ""
                    for name in columns
                ),
                record["status"].replace("|", "/"),
            ]
            for record in rows
        ]
        parts += [f"## {section}", note, table(["row", *columns, "status"], cells)]
    return "\n\n".join(parts) + "\n"


def head_of(arguments: argparse.Namespace) -> str:
    """Return the command, machine, versions and date."""
    from benchmarks.harness import header

    text = header(1, ("torch",))
    if arguments.rehearse:
        text += "\n- a rehearsal on the CPU with tiny sizes: these figures mean nothing"
    return text


def run_all(rows: Sequence[Row], arguments: argparse.Namespace) -> int:
    """Run rows until the budget is spent; return the number of rows that failed."""
    page_path: Path = arguments.output
    page_path.parent.mkdir(parents=True, exist_ok=True)
    start, records = time.perf_counter(), []
    title = f"One GPU, {time.strftime('%Y-%m-%d')}"
    head = run_forked(lambda: print(head_of(arguments)), 60.0)[1].strip()
    with page_path.with_suffix(".jsonl").open("x", encoding="utf-8") as lines:
        for row in rows:
            left_s = arguments.budget_s - (time.perf_counter() - start)
            limit_s = REHEARSAL_S if arguments.rehearse else row.limit_s
            if left_s < SHORTEST_S:
                status = f"not run: the budget of {arguments.budget_s:.0f} s is spent"
                record = {"row": row.name, "section": row.section, "status": status, "values": {}}
            else:
                record = run_row(row, arguments.rehearse, min(limit_s, left_s))
            records.append(record)
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            page_path.write_text(page(records, title, head), encoding="utf-8")
            print(f"{row.name}: {record['status']} ({record.get('seconds', 0)} s)", flush=True)
    print(f"{page_path} and {page_path.with_suffix('.jsonl').name} are written")
    return sum(not record["status"].startswith(("ok", "skipped")) for record in records)


def default_output(rehearse: bool) -> Path:
    """Return the page's path: docs/results, or a new temporary folder for a rehearsal."""
    if rehearse:
        return Path(tempfile.mkdtemp(prefix="bmforge-gpu-")) / "rehearsal.md"
    results = Path(__file__).parents[2] / "docs" / "results"
    return results / f"{time.strftime('%Y-%m-%d')}-gpu.md"


def main() -> int:
    """Run the selected rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="page to write, a new file")
    parser.add_argument("--only", nargs="+", default=["*"], help="globs of row names")
    parser.add_argument("--budget-s", type=float, help="time limit of all rows (default: 590)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if any(fnmatch(row.name, glob) for glob in arguments.only)]
    if not rows:
        parser.error(f"--only {' '.join(arguments.only)} matches no row.")
    arguments.output = arguments.output or default_output(arguments.rehearse)
    if arguments.budget_s is None:
        arguments.budget_s = 3600.0 if arguments.rehearse else 590.0
    outputs = (arguments.output, arguments.output.with_suffix(".jsonl"))
    if any(path.exists() for path in outputs):
        parser.error(f"{arguments.output} exists already. Choose another --output.")
    if arguments.rehearse:
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        os.environ |= {**hidden, "TRITON_INTERPRET": "1"}  # Triton reads it when it is imported
    elif run_forked(require_accelerator, 60.0)[0] != 0:
        parser.error("this machine has no accelerator. --rehearse runs tiny sizes on the CPU.")
    for name in PRELOADED:
        importlib.import_module(f"benchmarks.gpu.{name}")
    return int(run_all(rows, arguments) > 0)


def require_accelerator() -> None:
    """Raise `RuntimeError` without an accelerator; a process that asks cannot fork users of it."""
    import torch

    if not torch.accelerator.is_available():
        raise RuntimeError("no accelerator")


if __name__ == "__main__":
    sys.exit(main())
