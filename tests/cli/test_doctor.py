"""`bmforge doctor` against the metadata of the installed packages."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

import bmforge
from bmforge.cli import main
from bmforge.cli.doctor import find_extras
from bmforge.errors import install_command


def test_versions_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["torch"] == torch.__version__
    assert rows["tokenizers"] == importlib.metadata.version("tokenizers")
    assert rows["threads"].startswith(f"{torch.get_num_threads()} of ")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    del rows["memory"]  # what is available changes between the two calls
    assert all(value in text for value in rows.values())


def test_missing_packages_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ['jinja2>=3.1; extra == "chat"', 'no-such-package>=1; extra == "chat"', "numpy"]
    needs += ['bmforge[chat]; extra == "all"', 'ruff; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    (finding,) = find_extras()
    assert (finding.name, finding.value) == ("extra chat", "missing: no-such-package")
    assert finding.advice == install_command("chat")


@pytest.mark.parametrize(
    ("record", "command"),
    [
        ('{"url": "file:///src", "dir_info": {"editable": true}}', 'pip install -e "/src[chat]"'),
        ('{"url": "file:///src", "dir_info": {}}', 'pip install "bmforge[chat] @ file:///src"'),
        (
            '{"url": "https://a/b.git", "vcs_info": {"vcs": "git", "commit_id": "c"}}',
            'pip install "bmforge[chat] @ git+https://a/b.git"',
        ),
        (None, 'pip install "bmforge[chat]"'),
    ],
)
def test_install_command_uses_the_source_of_the_installation(
    monkeypatch: pytest.MonkeyPatch, record: str | None, command: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return record if name == "direct_url.json" else None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert install_command("chat") == command


def test_install_command_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", fail)
    root = Path(bmforge.__file__).parents[1]
    assert install_command("chat") == f'pip install -e "{root}[chat]"'
