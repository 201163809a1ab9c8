"""The container file, checked without a container runtime."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import yaml

from bmforge.cli.parse import find_options
from bmforge.cli.serve_options import ServeCommand
from bmforge.serve.settings import ServeConfig

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the file, as the format's reference describes it."""
    lines = (ROOT / "Containerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    text = re.sub(r"\\\n\s*", " ", text)
    pairs = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, arguments) for name, arguments in pairs]


def test_every_instruction_is_known_and_the_copied_files_exist() -> None:
    allowed = {
        "FROM",
        "RUN",
        "COPY",
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "ENV",
        "WORKDIR",
    }
    steps = instructions()
    assert steps[0][0] == "FROM"
    assert {name for name, _ in steps} <= allowed
    copied = [a for name, arguments in steps if name == "COPY" for a in arguments.split()[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source


def test_the_versions_and_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "Containerfile").read_text()
    version = re.search(r"python:3\.(\d+)", text)
    assert version is not None
    needed = re.search(r">=3\.(\d+)", project["requires-python"])
    assert needed is not None
    assert int(version[1]) >= int(needed[1])
    extras = re.search(r"/src\[(.*?)\]", text)
    assert extras is not None
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    assert "serve" in extras[1].split(",")
    torch = re.search(r"torch==([\d.]+)", text)
    assert torch is not None
    bound = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    assert bound is not None
    numbers = [tuple(map(int, v.split("."))) for v in (torch[1], bound[1])]
    assert numbers[0] >= numbers[1]


def test_the_server_runs_as_a_user_and_is_watched_at_its_own_path() -> None:
    steps = dict(instructions())
    names = [name for name, _ in instructions()]
    assert steps["USER"] not in ("root", "0")
    assert names.index("USER") < names.index("ENTRYPOINT")
    entry = json.loads(steps["ENTRYPOINT"])
    assert entry[:2] == ["bmforge", "serve"]
    options = {f"--{name}" for name, _ in find_options(ServeCommand)}
    assert {word for word in entry if word.startswith("--")} <= options
    port = str(ServeConfig().port)
    assert steps["EXPOSE"] == port
    assert f":{port}/health" in steps["HEALTHCHECK"]


def test_ci_builds_and_runs_the_image() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "container.yml").read_text())
    steps = workflow["jobs"]["image"]["steps"]
    text = "\n".join(step.get("run", "") for step in steps)
    assert "docker build -t bmforge -f Containerfile ." in text
    assert "docker run" in text
    assert "/health" in text
