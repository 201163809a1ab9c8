"""Run directories: a directory belongs to one config; no run overwrites another run's files."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bmforge.config import config_to_dict, plain_value, save_toml
from bmforge.errors import ConfigError, suggest
from bmforge.files import check_place, partial_name, replace_file
from bmforge.logging import get_logger, log_to_file, process_rank
from bmforge.parallel import run_on_first
from bmforge.recipes.adapters import adapter_defaults
from bmforge.recipes.renamed_fields import rename_fields
from bmforge.train.run_lock import LOCK_NAME, hold_run_dir

__all__ = [
    "add_results",
    "check_free",
    "check_new_run",
    "check_overridden",
    "check_run",
    "check_run_dir",
    "write_run_config",
    "lock_run_dir",
    "open_run_dir",
    "overridden_fields",
    "record_overrides",
]

_FILE, _LOG = "run.toml", "log.txt"
# Fields and tables that a run can change on purpose while keeping its optimizer state and step.
_OVERRIDABLE = ("train.", "data.", "loss_scale.")


def open_run_dir(run_dir: Path, config: Any, free: frozenset[str]) -> None:
    """Create a run directory, or check that an existing directory belongs to this run.

    Later, `write_run_config` marks the directory as this run's. All processes call this function
    and get the same result.

    Args:
        run_dir: directory to create or to check.
        config: the run's config dataclass.
        free: names of fields or tables that may differ from the existing run, because they do not
            affect the steps already trained (layout, logging interval, length).

    Raises:
        ConfigError: the directory contains another run or unrelated files.
    """

    def open_it() -> None:
        check_run(run_dir, config, free)
        run_dir.mkdir(parents=True, exist_ok=True)

    run_on_first(open_it)


def check_run(run_dir: Path, config: Any, free: frozenset[str]) -> None:
    """Raise `ConfigError` if `config` may not run in `run_dir`; see `open_run_dir`."""
    check_place(run_dir, "run_dir")
    problem = check_run_dir(run_dir, config, free)
    if problem is not None:
        raise ConfigError(problem)


def write_run_config(run_dir: Path, config: Any, *, new_only: bool = False) -> bool:
    """Write ``run.toml``, after all checks, which marks the directory as this run's.

    Args:
        run_dir: directory of the run.
        config: the run's config dataclass.
        new_only: leave an existing ``run.toml`` unchanged.

    Returns:
        True on the first process if the run is new.
    """

    def write() -> bool:
        is_new = not (run_dir / _FILE).exists()
        if is_new or not new_only:
            save_toml(config, run_dir / _FILE)  # leaves a file with the same content as it is
            os.utime(run_dir / _FILE)  # tells `_log_undo` that the run has begun
        return is_new

    return run_on_first(write) or False


@contextmanager
def lock_run_dir(run_dir: Path, config: Any, free: frozenset[str]) -> Iterator[None]:
    """Context manager that opens and locks a run directory, and writes the log to it.

    If the run is refused before `write_run_config`, no files and no new directories are left, and
    no new lines in the log of an existing run. All processes call it.

    Args:
        run_dir, config, free: arguments of `open_run_dir`.

    Raises:
        ConfigError: a live run has locked the directory; also for the reasons given in
            `open_run_dir`.
    """
    is_first = process_rank() == 0
    new = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    open_run_dir(run_dir, config, free)
    try:
        with hold_run_dir(run_dir):
            open_run_dir(
                run_dir, config, free
            )  # another run may have used it before the lock was taken
            undo_log = _log_undo(run_dir) if is_first else None
            log = log_to_file(run_dir / _LOG) if is_first else None
            run_on_first(lambda: _log_changes(run_dir, config))
            try:
                yield
            finally:
                if log is not None:
                    get_logger().removeHandler(log)
                    log.close()
                if undo_log is not None:
                    undo_log()
    finally:
        for folder in new if is_first else ():
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _log_undo(run_dir: Path) -> Callable[[], None]:
    """Return a function that removes the new log lines if the run never claimed the directory."""
    record, log = run_dir / _FILE, run_dir / _LOG
    written, size = _write_stamp(record), log.stat().st_size if log.exists() else 0

    def undo() -> None:
        if _write_stamp(record) != written or not log.exists():
            return
        if size:
            os.truncate(log, size)
        else:
            log.unlink()

    return undo


def _write_stamp(file: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is replaced or touched; None without the file."""
    if not file.exists():
        return None
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def check_run_dir(run_dir: Path, config: Any, free: frozenset[str]) -> str | None:
    """Return the reason why `config` may not run in `run_dir`; None if it may.

    Fields that are missing in the run.toml of an earlier version count as having their default
    value. Fields and tables in the config's `override` may differ.
    """
    file = run_dir / _FILE
    if not file.exists():
        return check_free(run_dir)
    try:
        changed = _find_changes(file, config)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return f"{str(file)!r} is damaged ({error}). Restore it, or choose another run_dir."
    allowed = free | overridden_fields(config) | {"override"}
    differences = [
        f"{name}: {before!r} in that run, now {now!r}"
        for name, (before, now) in changed.items()
        if not _is_free(name, allowed)
    ]
    if differences:
        names = [name for name in changed if not _is_free(name, allowed)]
        hint = ""
        if all(name.startswith(_OVERRIDABLE) for name in names) and hasattr(config, "override"):
            hint = f", or change them with --override {' '.join(names)}"
        return (
            f"run_dir={str(run_dir)!r} contains another run ({'; '.join(differences)}). "
            f"Choose another run_dir, or restore these values to continue that run{hint}."
        )
    return None


def record_overrides(run_dir: Path, config: Any) -> Any:
    """Add an entry ``field=old->new`` to `override` for every overridden field of a config.

    Entries of earlier overrides are kept, so that run.toml documents the history of the run.
    """
    file = run_dir / _FILE
    if not file.exists() or not hasattr(config, "override"):
        return config
    names = overridden_fields(config)
    earlier = tomllib.loads(file.read_text(encoding="utf-8")).get("override", [])
    new = [
        f"{name}={before!r}->{now!r}"
        for name, (before, now) in _find_changes(file, config).items()
        if _is_free(name, names)
    ]
    changed = {entry.partition("=")[0] for entry in new}
    plain = [n for n in sorted(names) if not any(_is_free(c, frozenset({n})) for c in changed)]
    for entry in new:
        get_logger().info("overridden: %s", entry)
    return dataclasses.replace(config, override=tuple(dict.fromkeys([*earlier, *new, *plain])))


def check_overridden(config: Any) -> None:
    """Raise `ConfigError` if `override` names no field or table of the config."""
    fields = [name.split(".") for name in _flatten(config_to_dict(config))]
    names = {".".join(parts[:n]) for parts in fields for n in range(1, len(parts) + 1)}
    for name in sorted(overridden_fields(config) - names):
        raise ConfigError(
            f"override={name!r} is not a field of this run.{suggest(name, names)} --print-config "
            "shows all fields."
        )


def overridden_fields(config: Any) -> frozenset[str]:
    """Return the names of the fields and tables that a config overrides.

    Entries of the form field=old->new, which are read from run.toml, are ignored.
    """
    return frozenset(
        entry.replace("-", "_") for entry in getattr(config, "override", ()) if "=" not in entry
    )


def _find_changes(file: Path, config: Any) -> dict[str, tuple[Any, Any]]:
    """Return a dict from the name of each differing field to (value in run.toml, current value)."""
    before = _flatten(rename_fields(tomllib.loads(file.read_text(encoding="utf-8"))))
    # Earlier versions omitted the default size of an adapter, which is read as None.
    sizes = adapter_defaults(before.get("adapter.kind"))
    before = {f"adapter.{name}": size for name, size in sizes.items()} | before
    now, defaults = _flatten(config_to_dict(config)), _flatten(_default_values(config))
    names = sorted(before.keys() | now.keys())
    values = {name: (before.get(name, defaults.get(name)), now.get(name)) for name in names}
    return {name: pair for name, pair in values.items() if _differ(*pair)}


def _default_values(config: Any) -> dict[str, Any]:
    """Return the default values of a config, with nested configs as nested dicts."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out[field.name] = _default_values(value)
        elif field.default is not dataclasses.MISSING:
            out[field.name] = plain_value(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            out[field.name] = plain_value(field.default_factory())
    return out


def _log_changes(run_dir: Path, config: Any) -> None:
    """Log the fields that differ from the existing run, and those missing in its run.toml.

    The `derived_fields` of a config follow from other fields, so they are not logged.
    """
    file = run_dir / _FILE
    if not file.exists():
        return
    before = _flatten(rename_fields(tomllib.loads(file.read_text(encoding="utf-8"))))
    unsettled = {"override", *getattr(config, "derived_fields", ())}
    if getattr(config, "epochs", None) is not None:
        unsettled.add("train.steps")  # computed from the epochs after the data is loaded
    if changed := [name for name in _find_changes(file, config) if name not in unsettled]:
        get_logger().info("changed since the start of the run: %s", ", ".join(changed))
    defaults = _flatten(_default_values(config))
    now = _flatten(config_to_dict(config))
    if new := [f"{name}={now[name]!r}" for name in now if name not in before and name in defaults]:
        get_logger().info(
            "%s of an earlier version lacks fields; their defaults are used: %s",
            _FILE,
            ", ".join(new),
        )


def check_new_run(run_dir: Path, name: str = "run_dir") -> None:
    """Check the directory of a run before anything is read; `check_run_dir` compares configs later.

    Args:
        run_dir: directory for a new run, or of a run to resume.
        name: name of the option that sets the directory, for messages.

    Raises:
        ConfigError: the directory cannot be created, or contains unrelated files.
    """
    check_place(run_dir, name)
    problem = None if (run_dir / _FILE).exists() else check_free(run_dir)
    if problem is not None:
        raise ConfigError(problem)


def check_free(run_dir: Path) -> str | None:
    """Return the reason why no new run can start in `run_dir`; None if one can."""
    if not run_dir.exists() or _is_free_place(run_dir):
        return None
    if (run_dir / _FILE).exists():
        return f"run_dir={str(run_dir)!r} contains another run. Choose an empty or new directory."
    return (
        f"run_dir={str(run_dir)!r} contains files but no {_FILE}, so it is not a run of "
        "bmforge. Choose an empty or new directory."
    )


def _differ(first: Any, other: Any) -> bool:
    """Return True if two values differ; None and an empty list count as equal."""
    absent: tuple[Any, ...] = (None, [])
    return first != other and not (first in absent and other in absent)


def _is_free_place(run_dir: Path) -> bool:
    """Return True if a directory is empty, or contains only files of a run that did not start."""
    # A process that is killed while it writes the config leaves a partial file.
    free = {"data", _LOG, partial_name(_FILE)}
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else {_FILE}
    return {name for name in names if LOCK_NAME not in name} <= free


def add_results(run_dir: Path, results: dict[str, dict[str, float]]) -> None:
    """Add metrics (a dict from title to a dict from name to value) to ``results.json``."""
    file = run_dir / "results.json"
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for title, numbers in results.items():
        recorded[title] = {**recorded.get(title, {}), **numbers}
    replace_file(file, json.dumps(recorded, indent=2) + "\n")


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
