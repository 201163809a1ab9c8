"""`bmforge compress` on several processes: every phase ends where one process ends."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tomli_w
import torch
from small_runs import wait_for_all, write_start

from bmforge.cli import main
from bmforge.compress import CompressReport
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.nn.packed_store import PackedStore
from bmforge.recipes.compress import read_recipe, run_compress
from bmforge.testing import assert_close, run_distributed
from bmforge.train import read_metrics

pytestmark = pytest.mark.long
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_seq_len": 32}
PARTS: dict[str, dict[str, Any]] = {
    "sizes": {"structure": {"intermediate_size": 128, "num_heads": 2, "num_kv_heads": 2}},
    "gates": {
        "structure": {
            "gates": ["heads", "dims", "features", "hidden"],
            "gate_steps": 3,
            "warmup_steps": 1,
            "intermediate_size": 128,
            "head_dim": 8,
            "hidden_size": 48,
        }
    },
    "zeros": {"prune": {"pattern": "2:4"}},
    "integers": {"quantize": {"scheme": "int8", "training": "fake"}},
    "experts": {"moefy": {"num_experts": 4, "share": 0.5, "epochs": 2}},
}
LAYOUTS = {
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "tp2": {"tp": 2},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_start(tmp_path_factory.mktemp("start"), SIZES)
    torch.manual_seed(5)
    model = Llama.from_config(LlamaConfig(**SIZES, num_kv_heads=2, intermediate_size=256))
    model.eval().save_pretrained(folder / "llama")
    words = {f"w{number}": number for number in range(SIZES["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "llama" / "tokenizer.json"))
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, SIZES["vocab_size"], (1200,), generator=generator).tolist()
    (folder / "texts.txt").write_text(" ".join(f"w{number}" for number in ids))
    return folder


def small(file: Path, model: Path, out: Path) -> list[float]:
    """Run a recipe on this process; return the losses of all phases."""
    run_compress(read_recipe(file, str(model), out))
    wait_for_all()
    runs = sorted(out.glob("phases/*/run/metrics.jsonl"))
    return [row["loss"] for path in runs for row in read_metrics(path)]


def write(start: Path, folder: Path, parts: dict[str, Any], layout: dict[str, int]) -> Path:
    data = {"paths": [str(start / "tokens")], "seq_len": 16, "global_batch_size": 4}
    data["micro_batch_size"] = 1
    phases = {"structure": "structure", "moefy": "experts", "prune": "weights"}
    phases["quantize"] = "weights"
    recipe = {
        **parts,
        "task": "pretrain",
        "steps": {phases[part]: 4 for part in parts if part in phases},
        "distill": {"teacher": str(start / "llama")},
        "calibration": {"texts": [str(start / "texts.txt")], "rows": 16, "seq_len": 16},
        "evaluate": {"prepared": [str(start / "tokens")]},
        "run": {
            "data": data,
            "layout": layout,
            "train": {"precision": "fp32", "optim": {"lr": 1e-4}},
        },
    }
    file = folder / f"{'-'.join(layout) or 'alone'}.toml"
    file.write_text(tomli_w.dumps(recipe))
    return file


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("part", PARTS)
def test_a_recipe_on_two_processes(
    part: str, layout: dict[str, int], start: Path, tmp_path: Path
) -> None:
    alone = write(start, tmp_path, PARTS[part], {})
    cut = write(start, tmp_path, PARTS[part], layout)
    want = run_distributed(small, 1, alone, start / "llama", tmp_path / "alone")[0]
    for found in run_distributed(small, 2, cut, start / "llama", tmp_path / "cut"):
        assert found == pytest.approx(want, rel=1e-4)
    assert len(want) == 4
    mine, theirs = (AutoModel.from_pretrained(tmp_path / name) for name in ("cut", "alone"))
    reports = [CompressReport.load(tmp_path / name) for name in ("cut", "alone")]
    for one, other in zip(*(report.phases for report in reports), strict=True):
        assert one.sizes == other.sizes
        assert one.quality == pytest.approx(other.quality, rel=1e-4)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        found, wanted = (model.eval()(input_ids=ids).logits for model in (mine, theirs))
    if part == "integers":  # a weight may be rounded to the next one
        assert (found - wanted).norm() < 0.01 * wanted.norm()
        return
    assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-3, atol=1e-4)


def run_command(arguments: list[str]) -> int:
    """The command as torchrun starts it on every process."""
    code = main(arguments)
    wait_for_all()
    return code


def test_phases_with_and_without_steps(start: Path, tmp_path: Path) -> None:
    """Structure is trained on two processes, GPTQ done by one; run again, nothing is done twice."""
    parts: dict[str, Any] = {
        **PARTS["sizes"],
        "quantize": {"scheme": "int8", "method": "gptq"},
        "speed": True,
    }
    file, out = write(start, tmp_path, parts, {"zero": 3}), tmp_path / "small"
    text = tomli_w.dumps({**tomllib.loads(file.read_text()), "steps": {"structure": 2}})
    file.write_text(text)
    arguments = ["compress", str(start / "llama"), "--recipe", str(file), "--out", str(out)]
    assert run_distributed(run_command, 2, arguments) == [0, 0]
    model = AutoModel.from_pretrained(out)
    assert isinstance(model.layers["0"].mlp.up_proj, PackedStore)
    assert model.layers["0"].spec.mlp.intermediate_size == 128
    assert (out / "tokenizer.json").read_text() == (start / "llama/tokenizer.json").read_text()
    report = CompressReport.load(out)
    assert [phase.name for phase in report.phases] == ["structure", "weights"]
    assert report.phases[-1].speed["decode, tokens/s"] > 0
    log = (out / "phases" / "1-structure" / "run" / "metrics.jsonl").read_text()
    assert run_distributed(run_command, 2, arguments) == [0, 0]
    assert (out / "phases" / "1-structure" / "run" / "metrics.jsonl").read_text() == log
