"""`bmforge plan` through the entry point, and the line it ends with."""

from __future__ import annotations

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
    assert "2 rows of 64 tokens a step, fp16, on 1 x v100-16gb" in out
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "a100-40g"], "a100-40gb"),
        (["--price", "3"], "--tokens"),
        (["--seq", "100000"], "longer than the 1024 positions"),
        (["--set", "hiden_size=64"], "hidden_size"),
        (["--interconnect", "string"], "Gb/s per GPU"),
        (["--gpu-memory", "0.9001"], "nothing fits"),
    ],
)
def test_refusals(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *options]) == 2
    assert said in capsys.readouterr().err
