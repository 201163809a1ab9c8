"""Runs with offloading: the figures and the export of the run without it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SIZES, settings, write_counting

from bmforge.errors import ConfigError
from bmforge.models import GPT2
from bmforge.models.gpt2 import GPT2Config
from bmforge.parallel import OffloadConfig
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.pretrain import GPT2PretrainConfig
from bmforge.recipes.registry import RECIPES
from bmforge.testing import assert_equal_trees
from bmforge.train import OptimConfig, read_metrics


@pytest.fixture
def config(tmp_path: Path) -> Any:
    store = str(write_counting(tmp_path / "tokens", 3, end=1))
    data = CorpusConfig(
        paths=(store,),
        validation=store,
        eos_id=1,
        seq_len=12,
        global_batch_size=8,
        micro_batch_size=4,
    )
    model = GPT2Config(vocab_size=48, max_seq_len=16, **{**SIZES, "num_layers": 3})
    return GPT2PretrainConfig(model=model, data=data, train=settings(3))


def run(config: Any, folder: Path, offload: OffloadConfig) -> tuple[Any, Any, Any]:
    """Losses and norms, the evaluation, and the exported weights."""
    config = dataclasses.replace(config, run_dir=folder, offload=offload)
    RECIPES["gpt2-pretrain"].run(config)
    rows = [(r["loss"], r["grad_norm"]) for r in read_metrics(folder / "metrics.jsonl")]
    results = json.loads((folder / "results.json").read_text())
    weights = GPT2.from_pretrained(folder / "export").state_dict()
    return rows, results, weights


@pytest.mark.parametrize(
    "offload",
    [
        OffloadConfig(1.0, target="disk", weights=True),
        OffloadConfig(0.5, gradients="leave", activations=True),
    ],
    ids=["all streams", "half"],
)
def test_a_run_says_the_same(config: Any, tmp_path: Path, offload: OffloadConfig) -> None:
    want = run(config, tmp_path / "plain", OffloadConfig())
    got = run(config, tmp_path / "offloaded", offload)
    assert got[0] == want[0]
    assert got[1] == want[1]
    assert_equal_trees(got[2], want[2])


def test_what_does_not_fit_is_said_first(config: Any, tmp_path: Path) -> None:
    """Before a step is taken, with what to do."""
    sgd = dataclasses.replace(config.train, optim=OptimConfig(name="sgd", weight_decay=0.0))
    with pytest.raises(ConfigError, match="cannot be offloaded"):
        run(dataclasses.replace(config, train=sgd), tmp_path / "sgd", OffloadConfig(1.0))
    half = dataclasses.replace(config.train, precision="bf16")
    streams = OffloadConfig(1.0, weights=True)
    with pytest.raises(ConfigError, match="one process and precision=fp32"):
        run(dataclasses.replace(config, train=half), tmp_path / "half", streams)
    gone = OffloadConfig(1.0, target="disk", directory=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        run(config, tmp_path / "gone", gone)
    for name in ("sgd", "half", "gone"):
        assert not (tmp_path / name / "checkpoints").exists()
    assert torch.is_grad_enabled()
