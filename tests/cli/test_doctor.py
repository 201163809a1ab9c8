"""`bmforge doctor` against the metadata of the installed packages."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

from bmforge.cli import main
from bmforge.cli.doctor import find_extras


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
    assert finding.advice == 'pip install "bmforge[chat]"'
