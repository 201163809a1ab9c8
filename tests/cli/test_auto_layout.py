"""`--layout auto`: what the planner chooses is what the run gets, on every process."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.cli import auto_layout
from bmforge.cli.auto_layout import find_cluster_here
from bmforge.cli.train import run_train
from bmforge.errors import ConfigError

SMALL = """
train.precision = "fp32"
[model]
vocab_size = 512
hidden_size = 64
num_layers = 3
num_heads = 2
max_seq_len = 64
[data]
seq_len = 64
global_batch_size = 8
"""


@pytest.fixture
def settings(tmp_path: Path) -> str:
    (tmp_path / "small.toml").write_text(SMALL)
    return str(tmp_path / "small.toml")


def test_the_choice_is_in_the_config(settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gpt2-pretrain", "--config", settings, "--layout", "auto", "--print-config"]
    run_train(arguments)
    chosen = tomllib.loads(capsys.readouterr().out)
    # One process, a model that fits: nothing is cut, recomputed or offloaded.
    assert chosen["layout"]["tp"] == chosen["layout"]["pp"] == 1
    assert chosen["recompute"] is False
    assert chosen["offload"]["fraction"] == 0.0
    assert 8 % chosen["data"]["micro_batch_size"] == 0
    assert chosen["model"]["num_layers"] == 3


def test_this_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = find_cluster_here(2)
    assert cluster.count == cluster.per_node == 2
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert 0.1 * physical < cluster.device.memory_gib < 0.5 * physical
    assert cluster.device.full_tflops > 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert find_cluster_here(2).per_node == 1


def test_an_accelerator_is_found_by_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def mem_get_info(device: Any) -> tuple[int, int]:
            return 0, 39 << 30

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(auto_layout, "device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    found = auto_layout._find_accelerator(torch.device("meta"))
    assert found.name == "a100-40gb"
    assert found.memory_gib == 39
    for called, name in (("NVIDIA A10", "a10"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4")):
        monkeypatch.setattr(auto_layout, "device_name", lambda device, called=called: called)
        assert auto_layout._find_accelerator(torch.device("meta")).name == name
    monkeypatch.setattr(auto_layout, "device_name", lambda device: "Fancy 1")
    with pytest.raises(ConfigError, match="has no data about the GPU 'Fancy 1'"):
        auto_layout._find_accelerator(torch.device("meta"))


def test_other_words_are_refused(settings: str) -> None:
    with pytest.raises(ConfigError, match=r"is not supported \(supported: auto\)"):
        run_train(["gpt2-pretrain", "--config", settings, "--layout", "best"])


@pytest.mark.long
def test_processes_agree(settings: str) -> None:
    """Two processes under torchrun print the same config, which one of them has planned."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "bmforge", "train", "gpt2-pretrain"]
    command += ["--config", settings, "--layout", "auto", "--print-config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("zero = ")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
