"""A run's directory: it belongs to one config, and a run never takes over another one's."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bmforge.config import config_to_dict, save_toml
from bmforge.errors import ConfigError
from bmforge.files import check_place, partial_name, replace_file
from bmforge.logging import get_logger, log_to_file, process_rank
from bmforge.parallel import run_on_first
from bmforge.train.run_lock import LOCK_NAME, hold_run_dir

__all__ = [
    "add_results",
    "check_free",
    "check_run_dir",
    "claim_run_dir",
    "occupy_run_dir",
    "open_run_dir",
]

_FILE, _LOG = "run.toml", "log.txt"


def open_run_dir(run_dir: Path, config: Any, free: frozenset[str]) -> None:
    """Make a run's directory, or check that it is this run's; `claim_run_dir` makes it so.

    All processes call it and all get the same answer.

    Args:
        run_dir: the directory.
        config: the run's config dataclass.
        free: dotted fields, or tables, that may differ from the run that is there: they change
            neither the numbers nor what was learned (layout, cadence of logging, length).

    Raises:
        ConfigError: the directory holds another run, or files that are no run at all.
    """

    def check() -> None:
        check_place(run_dir, "run_dir")
        problem = check_run_dir(run_dir, config, free)
        if problem is not None:
            raise ConfigError(problem)
        run_dir.mkdir(parents=True, exist_ok=True)

    run_on_first(check)


def claim_run_dir(run_dir: Path, config: Any) -> None:
    """Write ``run.toml``, once all else is checked: from here on the directory is this run's."""
    run_on_first(lambda: save_toml(config, run_dir / _FILE))


@contextmanager
def occupy_run_dir(run_dir: Path, config: Any, free: frozenset[str]) -> Iterator[None]:
    """Open a run's directory, hold it against other runs and write the log into it.

    A run that is refused before `claim_run_dir` leaves nothing there. All processes call it.

    Args:
        run_dir, config, free: as in `open_run_dir`.

    Raises:
        ConfigError: as there; or a run that lives holds the directory.
    """
    is_first, is_new = process_rank() == 0, not run_dir.exists()
    open_run_dir(run_dir, config, free)
    try:
        with hold_run_dir(run_dir):
            open_run_dir(run_dir, config, free)  # another run may have begun and ended since
            log = log_to_file(run_dir / _LOG) if is_first else None
            run_on_first(lambda: _say_changes(run_dir, config))
            try:
                yield
            finally:
                if log is not None:
                    get_logger().removeHandler(log)
                    log.close()
                if is_first and not (run_dir / _FILE).exists():
                    (run_dir / _LOG).unlink(missing_ok=True)
    finally:
        if is_first and is_new and run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()


def check_run_dir(run_dir: Path, config: Any, free: frozenset[str]) -> str | None:
    """Return why `config` may not run in `run_dir`, or None."""
    file = run_dir / _FILE
    if not file.exists():
        return check_free(run_dir)
    try:
        before = _flatten(tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return f"{str(file)!r} is damaged ({error}); restore it, or name another run_dir."
    now = _flatten(config_to_dict(config))
    changed = [
        f"{name}: {before.get(name)!r} there, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if _differ(before.get(name), now.get(name)) and not _is_free(name, free)
    ]
    if changed:
        return (
            f"run_dir={str(run_dir)!r} belongs to another run: {'; '.join(changed)}. "
            "Name another run_dir, or set these back to go on with that run."
        )
    return None


def _say_changes(run_dir: Path, config: Any) -> None:
    """Log the free fields that differ from those of the run that is there."""
    file = run_dir / _FILE
    if file.exists():
        before = _flatten(tomllib.loads(file.read_text(encoding="utf-8")))
        now = _flatten(config_to_dict(config))
        if freely := [name for name in now if _differ(before.get(name), now[name])]:
            get_logger().info("changed since the run began: %s", ", ".join(freely))


def check_free(run_dir: Path) -> str | None:
    """Return why no new run can live in `run_dir`, or None."""
    if not run_dir.exists() or _is_free_place(run_dir):
        return None
    if (run_dir / _FILE).exists():
        return f"run_dir={str(run_dir)!r} holds another run. Name an empty or new directory."
    return (
        f"run_dir={str(run_dir)!r} holds files but no {_FILE}, so it is not a run of "
        "bmforge. Name an empty or new directory."
    )


def _differ(one: Any, other: Any) -> bool:
    """Whether two values differ; an empty list is one that an older run.toml does not have."""
    absent: tuple[Any, ...] = (None, [])
    return one != other and not (one in absent and other in absent)


def _is_free_place(run_dir: Path) -> bool:
    """True for an empty directory, or one in which a run was prepared but never begun."""
    # A kill while the config is written leaves a part of it.
    free = {"data", _LOG, partial_name(_FILE)}
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else {_FILE}
    return {name for name in names if LOCK_NAME not in name} <= free


def add_results(run_dir: Path, results: dict[str, dict[str, float]]) -> None:
    """Add figures to ``results.json``: title -> name -> number."""
    file = run_dir / "results.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for title, numbers in results.items():
        known[title] = {**known.get(title, {}), **numbers}
    replace_file(file, json.dumps(known, indent=2) + "\n")


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _is_free(name: str, free: frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:n]) in free for n in range(1, len(parts) + 1))
