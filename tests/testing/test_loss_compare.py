"""`dev/loss_compare.py` finds where two runs part: of directories, revisions and layouts."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bmforge.data import TokenStoreWriter
from bmforge.errors import ConfigError

SCRIPT = Path(__file__).resolve().parents[2] / "dev" / "loss_compare.py"
# A package whose training writes what its commit says; enough to see which code was run.
PACKAGE = """
import json, pathlib, sys
run_dir = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
steps = int(sys.argv[sys.argv.index("--train.steps") + 1])
run_dir.mkdir(parents=True)
rows = [{{"step": s, "loss": 4.0 - s * {slope}, "grad_norm": 1.0}} for s in range(1, steps + 1)]
(run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


def load_script():
    spec = importlib.util.spec_from_file_location("loss_compare", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


lc = load_script()


def write_run(folder: Path, losses: list[float | None], norms: list[float | None]) -> str:
    folder.mkdir()
    numbers = enumerate(zip(losses, norms, strict=True), 1)
    rows = [{"step": s, "loss": loss, "grad_norm": norm} for s, (loss, norm) in numbers]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_two_run_directories(tmp_path, capsys):
    a = write_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    b = write_run(tmp_path / "b", [4.0, 3.0 + 3e-6, 2.0, 1.5], [1.0, 1.0, 1.0, 1.0 - 1e-7])
    assert lc.main([a, b]) == 1
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    loss, norm = told[3:5]
    assert loss == ["loss", "step", "2", "step", "4", f"{0.5 / 1.5:.3g}"]
    assert norm == ["grad_norm", "step", "4", "never", "1e-07"]
    # The steps around the first that is beyond the tolerance.
    assert told[-1] == ["4", "1", "1.5", "1", "0.9999999"]
    assert lc.main([a, b, "--rtol", "0.4"]) == 0
    assert lc.main([a, a]) == 0
    assert "the same in every digit" in capsys.readouterr().out


def test_numbers_that_are_not_finite():
    assert lc.relative_difference(None, None) == 0.0
    assert lc.relative_difference(None, 1.0) == math.inf
    (loss, _) = lc.compare({1: {"loss": None}}, {1: {"loss": 2.0}})
    assert (loss.exact, loss.beyond) == (1, 1)


def test_only_common_steps_count(tmp_path):
    a = {step: {"loss": 1.0} for step in (1, 2, 3)}
    b = {step: {"loss": 1.0 if step < 4 else 9.0} for step in (3, 4)}
    assert [p.exact for p in lc.compare(a, b)] == [None, None]
    with pytest.raises(ConfigError, match="steps 1 to 3, B has no steps"):
        lc.compare(a, {})


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_two_revisions(tmp_path):
    repository = tmp_path / "repository"
    package = repository / "bmforge"
    package.mkdir(parents=True)
    git(repository, "init", "--initial-branch=main")
    for slope in (0.5, 0.25):
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(PACKAGE.format(slope=slope))
        git(repository, "add", ".")
        git(repository, "commit", "-m", f"slope {slope}")
    job = lc.Job("any", tmp_path / "any.toml", steps=3, repository=repository)
    losses = []
    for number, revision in enumerate(("main~1", "main")):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        rows = lc.read_side(revision, job, scratch)
        losses.append([row["loss"] for row in rows.values()])
    assert losses == [[3.5, 3.0, 2.5], [3.75, 3.5, 3.25]]
    listed = subprocess.run(
        ["git", "-C", str(repository), "worktree", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(listed.stdout.splitlines()) == 1


def test_what_cannot_be_run_is_said(tmp_path, capsys):
    assert lc.main([str(tmp_path), "no-such-thing"]) == 2
    assert "no revision of" in capsys.readouterr().err
    assert lc.main(["zero=3", "zero=2"]) == 2
    assert "--config FILE" in capsys.readouterr().err
    assert lc.main(["world=none", "zero=2", "--config", "any.toml"]) == 2
    assert "world=none" in capsys.readouterr().err


@pytest.mark.long
def test_two_layouts(tmp_path, capsys):
    """Two processes sum in another order than one, and differ by no more."""
    generator = np.random.default_rng(7)
    with TokenStoreWriter(tmp_path / "tokens", vocab_size=29) as writer:
        for length in generator.integers(3, 30, 40).tolist():
            writer.add_item([*generator.integers(1, 29, length).tolist(), 0])
            writer.end_document()
    config = tmp_path / "tiny.toml"
    config.write_text(
        f'[data]\npaths = ["{tmp_path / "tokens"}"]\nseq_len = 10\nglobal_batch_size = 8\n'
        "micro_batch_size = 4\n[train]\nsave_every_steps = 100\n[model]\nvocab_size = 29\n"
        "hidden_size = 20\nnum_layers = 2\nnum_heads = 2\nmax_seq_len = 16\n"
    )
    status = lc.main(["world=1", "zero=3,world=2", "--config", str(config), "--steps", "4"])
    told = capsys.readouterr()
    assert status == 0, told
    assert "A has steps 1 to 4, B has steps 1 to 4" in told.out
