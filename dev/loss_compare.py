"""Compare the losses of two commits, layouts or runs, and report where they diverge.

    python dev/loss_compare.py runs/a runs/b
    python dev/loss_compare.py zero=3,world=2 tp=2,world=2 --config tiny.toml --steps 20
    python dev/loss_compare.py v0.1 HEAD --config tiny.toml --steps 20

Each side is a run directory, a layout (fields of `Layout`, and `world`, the number of processes),
or a git revision, which runs on one process from a worktree of its own. Sides that are run get the
same config, and run one after the other. The status is 1 where they part by more than `--rtol`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bmforge.errors import BmforgeError, ConfigError
from bmforge.train.report.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
COMPARED = ("loss", "grad_norm")
RTOL = 1e-5
Rows = dict[int, dict[str, Any]]
_LAYOUT = re.compile(r"\w+=[^,=]+(,\w+=[^,=]+)*")


@dataclass(frozen=True)
class Job:
    """Job to run for a side that is not a run directory.

    Args:
        recipe: name of the recipe.
        config: TOML file, as for `bmforge train`.
        steps: number of steps; None is the config's.
        repository: git repository of the revisions, and the code for layouts.
    """

    recipe: str
    config: Path | None
    steps: int | None
    repository: Path = ROOT


@dataclass(frozen=True)
class Parting:
    """Divergence of one quantity of two runs.

    Args:
        name: name of the quantity.
        exact: first step at which the values differ; None if they never do.
        beyond: first step at which they differ by more than the tolerance.
        largest: largest relative difference; infinite if only one is finite.
    """

    name: str
    exact: int | None
    beyond: int | None
    largest: float


def relative_difference(a: float | None, b: float | None) -> float:
    """Return |a - b| relative to the larger of the two; None stands for a non-finite number."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def find_parting(name: str, a: Rows, b: Rows, rtol: float) -> Parting:
    """Compare one quantity at the common steps."""
    common = sorted(a.keys() & b.keys())
    off = {step: relative_difference(a[step].get(name), b[step].get(name)) for step in common}
    return Parting(
        name,
        exact=next((step for step in common if off[step] > 0), None),
        beyond=next((step for step in common if off[step] > rtol), None),
        largest=max(off.values()),
    )


def compare(a: Rows, b: Rows, rtol: float = RTOL) -> list[Parting]:
    """Compare loss and gradient norm of two runs.

    Raises:
        ConfigError: they have no step in common.
    """
    if not a.keys() & b.keys():
        raise ConfigError(f"no step in common: A has {_span(a)}, B has {_span(b)}.")
    return [find_parting(name, a, b, rtol) for name in COMPARED]


def describe(a: Rows, b: Rows, partings: Sequence[Parting], rtol: float) -> str:
    """Return a line per quantity, and the values of the steps around the first divergence."""
    titles = ("", "first differs", f"first beyond {rtol:g}", "largest relative difference")
    lines = [f"A has {_span(a)}, B has {_span(b)}", ""]
    table: list[Sequence[str]] = [titles]
    for p in partings:
        table.append((p.name, _at(p.exact), _at(p.beyond), f"{p.largest:.3g}"))
    lines += _align(table)
    beyond = [p.beyond for p in partings if p.beyond is not None]
    exact = [p.exact for p in partings if p.exact is not None]
    first = min(beyond or exact, default=None)
    if first is None:
        return "\n".join([*lines, "", "The runs are the same in every digit."])
    table = [("step", *(f"{name} {side}" for name in COMPARED for side in "AB"))]
    for step in [s for s in sorted(a.keys() & b.keys()) if abs(s - first) <= 2]:
        numbers = [rows[step].get(name) for name in COMPARED for rows in (a, b)]
        table.append((str(step), *("not finite" if x is None else f"{x:.9g}" for x in numbers)))
    return "\n".join([*lines, "", *_align(table)])


def _span(rows: Rows) -> str:
    return f"steps {min(rows)} to {max(rows)}" if rows else "no steps"


def _at(step: int | None) -> str:
    return "never" if step is None else f"step {step}"


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table]


def kind_of(side: str, job: Job) -> Literal["run", "layout", "revision"]:
    """Return the kind of a side, before anything is run.

    Raises:
        ConfigError: it is none of the three, or there is no config to run it with.
    """
    if (Path(side) / "metrics.jsonl").is_file():
        return "run"
    is_layout = _LAYOUT.fullmatch(side) is not None
    if not is_layout:
        git = ["git", "-C", str(job.repository), "rev-parse", "--verify", "--quiet"]
        if _run([*git, f"{side}^{{commit}}"]).returncode != 0:
            raise ConfigError(
                f"{side!r} is no directory with a metrics.jsonl, no layout such as "
                f"zero=3,world=2, and no revision of {job.repository}."
            )
    if job.config is None:
        raise ConfigError(f"{side!r} is run with a config; give --config FILE.")
    return "layout" if is_layout else "revision"


def read_side(side: str, job: Job, scratch: Path) -> Rows:
    """Return the metrics of a side by step, after running it if necessary."""
    kind = kind_of(side, job)
    run_dir = Path(side) if kind == "run" else scratch / "run"
    if kind == "layout":
        run_layout(side, job, run_dir)
    elif kind == "revision":
        with worktree(side, job.repository, scratch / "code") as code:
            _train(job, run_dir, code, {}, 1)
    return {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl")}


def run_layout(side: str, job: Job, run_dir: Path) -> None:
    """Run the job on a layout."""
    fields = dict(item.split("=") for item in side.split(","))
    world = fields.pop("world", "1")
    if not world.isdigit() or int(world) < 1:
        raise ConfigError(f"world={world} in {side!r} must be a number of processes.")
    _train(job, run_dir, job.repository, fields, int(world))


@contextmanager
def worktree(revision: str, repository: Path, path: Path) -> Iterator[Path]:
    """Check a revision out to a temporary worktree."""
    git = ["git", "-C", str(repository), "worktree"]
    added = _run([*git, "add", "--detach", str(path), revision])
    if added.returncode != 0:
        raise ConfigError(f"git worktree add failed for {revision!r}: {added.stderr.strip()}")
    try:
        yield path
    finally:
        _run([*git, "remove", "--force", str(path)])


def _train(job: Job, run_dir: Path, code: Path, layout: Mapping[str, str], world: int) -> None:
    """Run `bmforge train` with the package in a directory."""
    start = [sys.executable, "-m"]
    if world > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m"]
    options = ["--config", str(job.config), "--run-dir", str(run_dir), "--export", "False"]
    options += [] if job.steps is None else ["--train.steps", str(job.steps)]
    for name, value in layout.items():
        options += [f"--layout.{name.replace('_', '-')}", value]
    # Import the package of `code`, not one in the current directory.
    env = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    done = _run([*start, "bmforge", "train", job.recipe, *options], env)
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise ConfigError(f"the run in {run_dir} ended with status {done.returncode}:\n{last}")


def _run(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two sides; return 0 if they agree within the tolerance, else 1 (2: an error)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", help="run directory, layout or revision")
    parser.add_argument("b", help="run directory, layout or revision to compare with")
    parser.add_argument("--config", type=Path, help="TOML file of the run")
    parser.add_argument("--recipe", default="gpt2-pretrain", help="recipe that the file configures")
    parser.add_argument("--steps", type=int, help="number of steps (default: the config's)")
    parser.add_argument("--rtol", type=float, default=RTOL, help="relative tolerance (%(default)s)")
    given = parser.parse_args(arguments)
    job = Job(given.recipe, given.config, given.steps)
    try:
        for side in (given.a, given.b):
            kind_of(side, job)
        with tempfile.TemporaryDirectory(prefix="loss-compare-") as scratch:
            folders = [Path(scratch) / side for side in "ab"]
            for folder in folders:
                folder.mkdir()
            a = read_side(given.a, job, folders[0])
            b = read_side(given.b, job, folders[1])
        partings = compare(a, b, given.rtol)
    except BmforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(a, b, partings, given.rtol))
    return int(any(parting.beyond is not None for parting in partings))


if __name__ == "__main__":
    sys.exit(main())
