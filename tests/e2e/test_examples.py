"""The examples run alone and on two processes, with the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import environment, write_config

from bmforge.parallel import Layout
from bmforge.testing import assert_close, run_distributed
from bmforge.train import read_metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import own_part  # noqa: E402
import train_hugging_face  # noqa: E402
import train_own_module  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("examples")
    write_config(folder, 1)
    return str(folder / "data")


def run_script(name: str, run_dir: Path, *options: str) -> list[float]:
    """The losses in metrics.jsonl of an example run as a script."""
    arguments = [sys.executable, str(EXAMPLES / name), "--run-dir", str(run_dir), *options]
    done = subprocess.run(
        arguments, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl")]


def test_own_module(tmp_path: Path) -> None:
    alone = run_script("train_own_module.py", tmp_path / "alone", "--steps", "6")
    assert alone[-1] < alone[0]
    for losses in run_distributed(train_own_module.main, 2, 6):
        assert losses == pytest.approx(alone, rel=1e-5)
    folder = str(tmp_path / "two")
    run_distributed(train_own_module.main, 2, 6, folder)
    assert run_distributed(train_own_module.main, 2, 6, folder) == [[], []]


def test_hugging_face_script(tmp_path: Path, data: str) -> None:
    losses = run_script("train_hugging_face.py", tmp_path / "run", "--data", data, "--steps", "4")
    assert losses[-1] < losses[0]
    wanted = run_distributed(train_hugging_face.main, 1, data, "gpt2", 4)[0]
    assert losses == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hugging_face_on_two_processes_is_the_same(data: str, family: str) -> None:
    alone = run_distributed(train_hugging_face.main, 1, data, family, 6)[0]
    for losses in run_distributed(train_hugging_face.main, 2, data, family, 6):
        assert losses == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, Layout(tp=2)),
        (2, Layout(tp=2, sequence_parallel=True)),
        (2, Layout(pp=2)),
        (2, Layout(cp=2)),
        (4, Layout(tp=2, zero=3)),
    ],
    ids=str,
)
def test_own_part_on_any_layout(world: int, layout: Layout, tmp_path: Path) -> None:
    """The gate trains, is saved and opened the same on every layout."""
    (alone,) = run_distributed(own_part.main, 1, Layout(), 4, str(tmp_path / "alone"))
    assert alone["losses"][-1] < alone["losses"][0]
    gates = [name for name in alone["again"] if name.endswith("mlp.gate.weight")]
    assert len(gates) == own_part.CONFIG.num_layers
    assert not any(bool((alone["again"][name] == 1).all()) for name in gates)
    for got in run_distributed(own_part.main, world, layout, 4, str(tmp_path / "many")):
        assert_close(got["again"], alone["again"])


def test_own_part_script() -> None:
    """It prints the losses."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_part.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (alone,) = run_distributed(own_part.main, 1, Layout(), 4)
    assert json.loads(done.stdout) == pytest.approx(alone["losses"], rel=1e-9)


def test_own_rule(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        lines = (f"line {n} of {number}, by the river {n * number}" for n in range(40))
        (texts / f"{number}.txt").write_text("\n".join(lines))
    (texts / "offer.txt").write_text("Buy now!!!! All of it!")
    script = [sys.executable, str(EXAMPLES / "own_rule.py"), str(texts), str(tmp_path / "out")]
    said = subprocess.run(script, env=environment(), capture_output=True, text=True, check=True)
    assert said.stdout == "dropped by mine.shouts: 1 documents\n"
