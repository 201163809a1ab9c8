"""`bmforge migrate`: an old start script becomes a config that `bmforge train` takes."""

from __future__ import annotations

from pathlib import Path

from bmforge.cli.options import MigrateCommand
from bmforge.compat.cpm_pretrain.migrate import migrate_text
from bmforge.errors import ConfigError
from bmforge.files import replace_file

__all__ = ["run_migrate"]


def run_migrate(command: MigrateCommand) -> None:
    """Write the config of a script of CPM-Pretrain, and say what it could not place."""
    source = Path(command.script)
    is_line = " " in command.script.strip()
    if not is_line and not source.is_file():
        raise ConfigError(f"there is no script {command.script!r}.")
    found = migrate_text(command.script if is_line else source.read_text("utf-8", "replace"))
    out = command.out or Path(f"{found.task if is_line else source.stem}.toml")
    if out.exists():
        raise ConfigError(f"{str(out)!r} is there already: name another file with --out.")
    replace_file(out, found.toml())
    print(f"{out}: a run of {found.task}. Start it with\n\n  {found.command.format(config=out)}\n")
    for title, rows in (("not placed", found.unplaced), ("not needed", found.dropped)):
        if rows:
            print(f"{title}:")
            print("".join(f"  {name}: {why}\n" for name, why in rows))
