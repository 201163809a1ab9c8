"""`bmforge migrate`: converts an old launch script or config to a config for `bmforge train`."""

from __future__ import annotations

from pathlib import Path

from bmforge.cli.options import MigrateCommand
from bmforge.compat.cpm_pretrain.arguments import Migrated
from bmforge.compat.cpm_pretrain.migrate import migrate_text
from bmforge.compat.openprompt.configs import read_config
from bmforge.errors import ConfigError
from bmforge.files import check_place, replace_file

__all__ = ["run_migrate"]


def run_migrate(command: MigrateCommand) -> None:
    """Convert an old script or config, and report its options that have no equivalent."""
    if command.out is not None:
        check_place(command.out, "out", is_file=True)
    source = Path(command.script)
    is_line = " " in command.script.strip()
    if not is_line and not source.is_file():
        raise ConfigError(f"the script {command.script!r} does not exist. Check its path.")
    if source.suffix in (".yaml", ".yml") and not is_line:
        out = command.out or Path(f"{source.stem}.toml")
        migrated = read_config(source, out.parent)
    else:
        migrated = migrate_text(command.script if is_line else source.read_text("utf-8", "replace"))
        out = command.out or Path(f"{migrated.task if is_line else source.stem}.toml")
    _write(out, migrated)
    print(
        f"{out}: a run of {migrated.task}. Start it with\n\n  "
        f"{migrated.command.format(config=out)}\n"
    )
    for title, rows in (("not migrated", migrated.unplaced), ("not needed", migrated.dropped)):
        if rows:
            print(f"{title}:")
            print("".join(f"  {name}: {why}\n" for name, why in rows))


def _write(out: Path, migrated: Migrated) -> None:
    """Write the config and the files that belong to it; existing files are not overwritten."""
    places = [out, *(out.parent / name for name in migrated.files)]
    for path in places:
        if path.exists():
            raise ConfigError(f"{str(path)!r} already exists. Choose another file with --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in zip(places, (migrated.toml(), *migrated.files.values()), strict=True):
        replace_file(path, text)
