"""`bmforge plan` through the entry point, and the line it ends with."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bmforge.cli import main

SIZES = "--set hidden_size=64 num_heads=4 num_layers=4 vocab_size=512"
SMALL = f"plan gpt2 {SIZES} --gpus 1 --seq 64 --batch 2 --gpu v100-16gb".split()


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_plan_from_model_to_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "memory.svg"
    cost = ["--tokens", "1e9", "--price", "2.5", "--currency", "EUR", "--plot", str(picture)]
    assert main([*SMALL, *cost]) == 0
    out = capsys.readouterr().out
    assert "2 sequences of 64 tokens per step, fp16, on 1 x v100-16gb" in out
    assert list((tmp_path / "cache" / "bmforge" / "plan").glob("*.json"))
    found = re.search(r"1e\+09 tokens: .* hours .*, ([\d,]+) GPU-hours, ([\d,]+) EUR", out)
    assert found is not None
    hours, price = (int(text.replace(",", "")) for text in found.groups())
    assert price == pytest.approx(2.5 * hours, abs=2.5)
    bars = ET.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) > 6
    line = next(text for text in out.splitlines() if text.startswith("torchrun"))
    words = shlex.split(line)
    assert words[:3] == ["torchrun", "--nproc-per-node", "1"]
    assert main([*words[words.index("bmforge") + 1 :], "--print-config"]) == 0
    config = tomllib.loads(capsys.readouterr().out)
    assert config["data"]["global_batch_size"] == 2
    assert (config["model"]["hidden_size"], config["model"]["num_layers"]) == (64, 4)


def test_json_has_the_figures_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of the table, in bytes; the smallest row; standard output is JSON alone."""
    qlora = ["--adapter", "lora", "--base-dtype", "int4", "--tokens", "1e6", "--price", "2"]
    small = "plan llama-3.2-1b --set hidden_size=64 num_heads=4 num_kv_heads=2 num_layers=4 "
    small += "vocab_size=512 intermediate_size=96 --gpus 1 --seq 64 --batch 4 --gpu v100-16gb"
    assert main([*small.split(), *qlora]) == 0
    out = capsys.readouterr().out
    assert "-m bmforge train conversations --model" in out
    assert "--adapter lora --base-dtype int4" in out
    assert main([*small.split(), *qlora, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    table = [line for line in out.splitlines() if re.match(r"zero=\d ", line)]
    assert len(table) == min(12, len(plan["rows"]))
    for line, row in zip(table, plan["rows"], strict=False):
        cells = line.split()
        rows, recompute, _, gib = next(
            cells[n : n + 4] for n, cell in enumerate(cells) if cell.isdecimal()
        )
        assert int(rows) == row["micro_batch_rows"]
        assert (recompute == "yes") == row["recompute"]
        assert float(gib) == pytest.approx(row["memory_bytes"] / 2**30, abs=0.051)
        assert sum(row["memory_parts_bytes"].values()) == pytest.approx(row["memory_bytes"], abs=9)
        assert row["cost"] == pytest.approx(row["hours"] * 2)
    least = plan["least_memory"]
    assert (least["micro_batch_rows"], least["recompute"], least["fits"]) == (1, True, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("base", "block_bytes", "limit_gib"),
    # 0.5 bytes for each int4 weight of the blocks, with scales.
    [(["--base-dtype", "int4"], 0.5 + 4 / 64, 8), (["--precision", "bf16"], 2, 20)],
)
def test_lora_of_8b_fits(
    base: list[str], block_bytes: float, limit_gib: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row of 2,048 tokens with recompute, without offloading."""
    plan = ["plan", "qwen3-8b", "--gpus", "1", "--gpu", "4090", "--seq", "2048", "--batch", "8"]
    plan += ["--json", "--no-offload"]
    assert main([*plan, "--adapter", "lora", *base]) == 0
    least = json.loads(capsys.readouterr().out)["least_memory"]
    # 6.9e9 weights of blocks; 2 bytes for each weight of embedding and head.
    weights = 6.9e9 * block_bytes + 2 * 2 * 151936 * 4096
    assert 0.95 * weights < least["memory_bytes"] <= limit_gib * 2**30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "a100-40g"], "a100-40gb"),
        (["--price", "3"], "--tokens"),
        (["--seq", "100000"], "more than the 1024 positions"),
        (["--set", "hiden_size=64"], "hidden_size"),
        (["--interconnect", "string"], "Gb/s per GPU"),
        (["--gpu-memory", "0.9001"], "no layout fits"),
    ],
)
def test_refusals(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *options]) == 2
    assert said in capsys.readouterr().err
