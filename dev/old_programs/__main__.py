"""Write the table of upstream programs: imports that resolve, and programs that run.

    python dev/old_programs CHECKOUTS WORK [--repository NAME] [--program GLOB]

CHECKOUTS is a folder with git checkouts of the repositories in `programs.toml`; WORK receives
their rewritten copies, tiny models, the logs of the runs, and `outcomes.json`. The table of runs
has the newest outcome of each program, also from earlier calls.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from imports import check_repository
from inputs import write_data, write_models
from rewrite import apply_edits, copy_repository
from runs import run_program

import bmforge.compat.bmtrain  # noqa: F401  (imported once, before the programs are forked)


class Outcome(NamedTuple):
    """Outcome of one run.

    Args:
        repository: name of the repository.
        program: path of the program in the repository.
        label: name of the data or config, if the program is run with several.
        processes: number of processes.
        text: "unchanged", "with edits: REASONS", "fails: ERROR" or "not run: REASON".
    """

    repository: str
    program: str
    label: str
    processes: str
    text: str


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h, %cs"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def import_rows(config: dict[str, Any], checkouts: Path) -> Iterator[str]:
    """Yield the lines of the table of imports, then the errors."""
    titles = ("repository", "commit", "programs", "resolve", "name a replacement", "fail")
    yield f"| {' | '.join(titles)} | not valid Python |"
    yield "|---|---|---|---|---|---|---|"
    errors: list[str] = []
    for name, repository in config["repositories"].items():
        folder = checkouts / name
        result = check_repository(folder, repository["packages"], repository["own"])
        counts = [len(x) for x in (result.resolved, result.replaced, result.failed)]
        cells = [name, commit_of(folder), sum(counts), *counts, len(result.unreadable)]
        yield f"| {' | '.join(map(str, cells))} |"
        for program, lines in (result.replaced | result.failed).items():
            errors += [f"- {name}/{program}: {line}" for line in dict.fromkeys(lines)]
        errors += [f"- {name}/{program}: not valid Python" for program in result.unreadable]
    yield ""
    yield from errors


def hub_edits(config: dict[str, Any], models: Path) -> list[dict[str, str]]:
    """Return edits that replace quoted names of the hub by local folders."""
    return [
        {"find": rf"""f?(["']){name}\1""", "replace": f'"{models / local}"'}
        for name, local in ((n.replace(".", r"\."), m) for n, m in config["hub"].items())
    ]


def run_programs(config: dict[str, Any], options: argparse.Namespace) -> Iterator[Outcome]:
    """Run the listed programs and yield their outcomes."""
    models = options.work / "models"
    if not models.exists():
        write_models(models)
        write_data(options.work / "data")
    edits = [*config["edits"], *hub_edits(config, models)]
    done: set[Path] = set()
    for run in config["runs"]:
        name = run["repository"]
        if options.repository not in ("", name):
            continue
        copy, repository = options.work / name, config["repositories"][name]
        if copy not in done:
            shutil.rmtree(copy, ignore_errors=True)
            copy_repository(
                options.checkouts / name, copy, repository["packages"], edits, repository["own"]
            )
            done.add(copy)
        for program in sorted(copy.glob(run["programs"])):
            relative = str(program.relative_to(copy))
            if fnmatch(relative, options.program) and relative not in run.get("except", ()):
                yield from run_on_processes(run, program, relative, options)


def run_on_processes(
    run: dict[str, Any], program: Path, relative: str, options: argparse.Namespace
) -> Iterator[Outcome]:
    """Run one program on each number of processes."""
    work, repository = options.work, run["repository"]
    if run.get("skip"):
        yield Outcome(repository, relative, "", "-", f"not run: {run['skip']}")
        return
    own = [
        {**edit, "replace": edit["replace"].replace("{work}", str(work))}
        for edit in run.get("edits", [])
    ]
    if own:
        program.write_text(apply_edits(program.read_text("utf-8"), own), encoding="utf-8")
    reasons = "; ".join(dict.fromkeys(edit["why"] for edit in own))
    success = f"with edits: {reasons}" if own else "unchanged"
    typed = run.get("typed", "")
    success += f", with `{typed}` typed on the terminal" if typed else ""
    arguments = [a.replace("{work}", str(work)) for a in run.get("arguments", [])]
    names = [Path(a).name for a in arguments if a.endswith(".json") and "/configs/" in a]
    label = " ".join([run.get("label", ""), *names]).strip()
    for processes in run.get("processes", [1]):
        folder = work / repository / run["folder"] if "folder" in run else program.parent
        error = run_program(program, arguments, processes, folder, options.timeout, typed)
        text = f"fails: {error.replace('|', '/')[:300]}" if error else success
        yield Outcome(repository, relative, label, str(processes), text)


def write_table(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield the lines of the table; programs of a repository with equal outcomes share a row."""
    rows: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for repository, program, label, processes, text in outcomes:
        rows.setdefault((repository, text), {}).setdefault((program, label), []).append(processes)
    yield "| repository | programs (processes) | outcome |\n|---|---|---|"
    for (repository, text), row in rows.items():
        parts: dict[str, dict[str, list[str]]] = {}
        for (program, label), counts in row.items():
            part = parts.setdefault(" and ".join(sorted(counts)), {})
            part.setdefault(program, []).append(label)
        cells = []
        for numbers, programs in parts.items():
            labels = {name: ", ".join(filter(None, own)) for name, own in programs.items()}
            names = [f"`{name}`" + (f" ({own})" if own else "") for name, own in labels.items()]
            cells.append(f"{', '.join(names)} ({numbers})")
        yield f"| {repository} | {'; '.join(cells)} | {text} |"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--repository", default="", help="run programs of this repository only")
    parser.add_argument("--program", default="*", help="run programs that match this glob only")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each program")
    parser.add_argument("--part", choices=["imports", "runs"], help="write one table only")
    options = parser.parse_args()
    options.work = options.work.resolve()
    config = tomllib.loads((Path(__file__).parent / "programs.toml").read_text("utf-8"))
    if options.part != "runs":
        for line in import_rows(config, options.checkouts):
            print(line, flush=True)
    if options.part != "imports":
        file = options.work / "outcomes.json"
        known = [Outcome(*row) for row in json.loads(file.read_text())] if file.exists() else []
        newest = {outcome[:4]: outcome for outcome in known}
        for outcome in run_programs(config, options):
            print(*outcome, sep=" | ", file=sys.stderr, flush=True)
            newest[outcome[:4]] = outcome
            file.write_text(json.dumps([*newest.values()], indent=1))
        order = list(config["repositories"])
        for line in write_table(sorted(newest.values(), key=lambda o: order.index(o.repository))):
            print(line, flush=True)


if __name__ == "__main__":
    main()
