"""`bmforge compress` killed inside of its phases ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import tomli_w
from real_runs import final_hashes, finish, kill_later, losses, start, wait_for_step, write_config

from bmforge.config import load_toml
from bmforge.models import GPT2
from bmforge.recipes.compress import read_recipe, run_compress
from bmforge.recipes.pretrain import GPT2PretrainConfig
from bmforge.testing import run_distributed

STEPS = {"structure": 9, "weights": 9}
PHASES = ("1-structure", "2-weights")


def write_recipe(folder: Path) -> Path:
    """Gates that close, then zeros and integers with a teacher, saved every third step."""
    given = load_toml(GPT2PretrainConfig, write_config(folder, 9))
    GPT2.from_config(given.model).save_pretrained(folder / "model")
    recipe = {
        "task": "pretrain",
        "steps": STEPS,
        "structure": {
            "intermediate_size": 64,
            "gates": ["features"],
            "gate_steps": 6,
            "warmup_steps": 2,
        },
        "prune": {"steps": 6, "every_steps": 2},
        "quantize": {"scheme": "int8", "training": "fake"},
        "distill": {"teacher": str(folder / "model")},
        "run": {
            "data": {
                "paths": [str(folder / "data")],
                "seq_len": 32,
                "global_batch_size": 4,
                "micro_batch_size": 2,
            },
            "train": {"save_every_steps": 3, "log_every_steps": 1, "optim": {"lr": 0.003}},
        },
    }
    file = folder / "recipe.toml"
    file.write_text(tomli_w.dumps(recipe), encoding="utf-8")
    return file


def command(recipe: Path, out: Path) -> list[str]:
    model = str(recipe.parent / "model")
    given = ["compress", model, "--recipe", str(recipe), "--out", str(out)]
    return [sys.executable, "-m", "bmforge", *given]


def compress_here(recipe: Path, out: Path) -> None:
    run_compress(read_recipe(recipe, str(recipe.parent / "model"), out))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("compress-kill"))


@pytest.fixture(scope="module")
def unkilled(recipe: Path) -> Path:
    out = recipe.parent / "unkilled"
    run_distributed(compress_here, 1, recipe, out)
    return out


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_in_each_phase(recipe: Path, unkilled: Path, tmp_path: Path, seed: int) -> None:
    """Twice in the first phase and twice in the second, and then to the end."""
    out, draw, hits = tmp_path / "small", random.Random(seed), 0
    arguments = command(recipe, out)
    for steps in (5, 2, 9, 4):
        process = start(arguments)
        reached = wait_for_step(process, steps)
        hits += reached and kill_later(process, draw.uniform(0.0, 0.5))
    assert hits >= 2
    status, errors = finish(start(arguments))
    assert status == 0, errors
    for phase in PHASES:
        mine, theirs = (place / "phases" / phase / "run" for place in (out, unkilled))
        assert losses(mine) == losses(theirs)
        assert final_hashes(mine) == final_hashes(theirs)
    for name in ("bmforge_model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (unkilled / name).read_bytes()
