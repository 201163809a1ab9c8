"""Runs that train a delta: exported alone or merged, killed and gone on with, on layouts."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import peft
import pytest
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from small_runs import settings, write_start

from bmforge.cli import main
from bmforge.errors import ConfigError
from bmforge.models import GPT2, AutoModel, GPT2Config, init_weights_
from bmforge.parallel import Layout
from bmforge.recipes.adapters import AdapterConfig, set_rates
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.testing import assert_close, run_distributed
from bmforge.train import build_optimizers
from bmforge.tune.delta import Lora, load_delta

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
IDS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start"), SIZES)


def command(start: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        *("train", "pretrain", "--run-dir", str(run_dir), "--data.paths", str(start / "tokens")),
        *("--data.seq-len", "16", "--data.global-batch-size", "2", "--train.optim.lr", "0.01"),
        *("--model", str(start / "model"), "--adapter.kind", "lora", "--adapter.rank", "2"),
        *("--adapter.target-modules", "attn.q", "attn.v"),
        *more,
    ]


def test_a_delta_is_trained_and_exported(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(command(start, run, "--train.steps", "2")) == 0
    model = GPT2.from_pretrained(start / "model")
    before = model(IDS).logits
    delta = load_delta(model, run / "export")
    assert isinstance(delta, Lora)
    assert {part.down.shape[0] for _, _, part in delta.held} == {2}
    assert not torch.equal(model(IDS).logits, before)
    assert all(part.up.abs().sum() > 0 for _, _, part in delta.held)
    told = tomllib.loads((run / "run.toml").read_text())
    assert told["adapter"]["kind"] == "lora"
    step = max((run / "checkpoints").glob("step-*"))
    kept = sum(f.stat().st_size for f in step.iterdir() if f.suffix == ".safetensors")
    trained = delta.count_parameters()
    assert kept < 3 * 4 * trained + 30_000  # two states of the optimizer, and no frozen weight
    capsys.readouterr()
    assert main(["info", str(run / "export")]) == 0
    assert "# Lora for" in capsys.readouterr().out
    assert main(command(start, run, "--train.steps", "3")) == 0  # goes on
    other = command(start, run, "--train.steps", "4", "--adapter.alpha", "3")
    assert main(other) != 0


def test_merged_exports_are_models(start: Path, tmp_path: Path) -> None:
    for run, more in (("alone", ()), ("merged", ("--adapter.merge",))):
        assert main(command(start, tmp_path / run, "--train.steps", "2", *more)) == 0
    base = GPT2.from_pretrained(start / "model")
    load_delta(base, tmp_path / "alone" / "export")
    merged = AutoModel.from_pretrained(tmp_path / "merged" / "export")
    assert not merged.config.changes
    assert_close(merged(IDS).logits, base(IDS).logits, rtol=1e-4, atol=1e-5)


def run_on(start: Path, run_dir: Path, layout: Layout, merge: bool) -> int:
    config = GPT2PretrainConfig(
        run_dir=run_dir,
        init_from=str(start / "model"),
        model_changes=(),
        model=GPT2Config(**SIZES),
        adapter=AdapterConfig(
            kind="lora", rank=2, target_modules=("attn.q", "mlp.down"), merge=merge
        ),
        layout=layout,
        data=CorpusConfig(
            paths=(str(start / "tokens"),), seq_len=16, global_batch_size=4, micro_batch_size=1
        ),
        train=settings(2),
    )
    return pretrain(config).step


@pytest.mark.long
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout()])
def test_layouts_export_what_one_process_does(
    start: Path, tmp_path: Path, layout: Layout, merge: bool
) -> None:
    assert run_distributed(run_on, 1, start, tmp_path / "one", Layout(), merge) == [2]
    assert run_distributed(run_on, 2, start, tmp_path / "two", layout, merge) == [2, 2]
    exports = [tmp_path / run / "export" for run in ("two", "one")]
    if merge:
        got, want = (AutoModel.from_pretrained(export).state_dict() for export in exports)
    else:
        got, want = (load_file(export / "adapter_model.safetensors") for export in exports)
    assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_what_has_no_effect_is_said(start: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter\.rank has no effect without"):
        AdapterConfig(rank=3)
    with pytest.raises(ConfigError, match="Did you mean 'lora'"):
        AdapterConfig(kind="lroa")
    config = json.dumps({"kind": "int8", "where": ["layers.*.mlp.up_proj"]})
    given = command(start, tmp_path / "x", "--train.steps", "1", "--changes", config)
    assert main([*given, "--adapter.merge"]) == 0  # beside a packed layer, not on it


def test_b_has_a_rate_of_its_own() -> None:
    """LoRA+: the rates of A and B, and of what is trained whole, are PEFT's."""
    hf_config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)
    base = transformers.GPT2LMHeadModel(hf_config)
    theirs = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"]))
    wanted = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=4.0)
    named = {id(p): name for name, p in theirs.named_parameters()}
    rates = {
        named[id(p)].split(".")[-3]: group["lr"]
        for group in wanted.param_groups
        for p in group["params"]
    }
    model = GPT2.from_config(GPT2Config(**SIZES))
    Lora(model, ["attn.q", "attn.v"], rank=2, modules_to_save=["embed_positions"])
    train = set_rates(settings(1), AdapterConfig(kind="lora", lr_ratio=4.0), model)
    (optimizer,) = build_optimizers(model, train.optim)
    found = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    assert {n: lr for n, lr in found.items() if "default" not in n} == {
        "embed_positions.weight": 0.01,
    }
    for name, rate in found.items():
        if "default" in name:
            assert rate == rates["lora_B" if name.endswith(".up") else "lora_A"]
    assert set_rates(settings(1), AdapterConfig(kind="lora"), model) == settings(1)
    with pytest.raises(ConfigError, match="lora"):
        AdapterConfig(kind="adapter", lr_ratio=2.0)


def test_weights_that_stream_leave_the_delta_where_it_is(start: Path, tmp_path: Path) -> None:
    """With its blocks coming and going a run learns what it learns without."""
    for name, more in (("here", ()), ("away", ("--offload.weights", "--offload.fraction", "1"))):
        assert main(command(start, tmp_path / name, "--train.steps", "3", *more)) == 0
    exports = [tmp_path / run / "export" for run in ("away", "here")]
    got, want = (load_file(export / "adapter_model.safetensors") for export in exports)
    assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_checkpoints_leave_the_base_where_it_is(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on reads it again; one that has changed, or is gone, is an error."""
    shutil.copytree(start / "model", tmp_path / "model")
    run = tmp_path / "run"
    given = [*command(start, run), "--train.steps"]
    given[given.index("--model") + 1] = str(tmp_path / "model")
    assert main([*given, "1"]) == 0
    step = run / "checkpoints" / "step-00000001"
    base = json.loads((step / "manifest.json").read_bytes())["base"]
    assert base["source"] == str(tmp_path / "model")
    assert not (run / "checkpoints" / "frozen").exists()
    other = init_weights_(GPT2.from_config(GPT2Config(**SIZES)), 5)
    other.save_pretrained(tmp_path / "model", overwrite=True)
    capsys.readouterr()
    assert main([*given, "2"]) != 0
    assert "restore its original weights" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "model")
    assert main([*given, "2"]) != 0
    assert str(tmp_path / "model") in capsys.readouterr().err
    shutil.copytree(start / "model", tmp_path / "model")
    assert main([*given, "2"]) == 0


def test_a_drawn_base_is_kept(start: Path, tmp_path: Path) -> None:
    """No file has it; it lies beside the checkpoints once."""
    sizes = [f"--model.{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    given = [*command(start, tmp_path / "run"), "--train.steps", "2", "--train.save-every-steps=1"]
    given[given.index("--model") : given.index("--model") + 2] = ["--model", "gpt2", *sizes]
    assert main(given) == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    manifest = json.loads((checkpoints / "step-00000002" / "manifest.json").read_bytes())
    assert "base" not in manifest
    assert "model/embed.weight" in manifest["tensors"]
    assert len(list((checkpoints / "frozen").iterdir())) == 1


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_bit_for_bit(start: Path, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        given = [*command(start, tmp_path / name), "--train.save-every-steps", "1"]
        given += ["--adapter.dropout", "0.1", "--train.steps", "60"]
        if name == "killed":
            process = subprocess.Popen([sys.executable, "-m", "bmforge", *given])
            while not (tmp_path / name / "checkpoints" / "step-00000003").exists():
                assert process.poll() is None
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            assert not (tmp_path / name / "export").exists()
        assert main(given) == 0
    exports = [tmp_path / run / "export" for run in ("killed", "whole")]
    got, want = (load_file(export / "adapter_model.safetensors") for export in exports)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def go_on(start: Path, run_dir: Path, layout: Layout, steps: int) -> int:
    config = GPT2PretrainConfig(
        run_dir=run_dir,
        init_from=str(start / "model"),
        model_changes=(),
        model=GPT2Config(**SIZES),
        adapter=AdapterConfig(kind="lora", rank=2),
        layout=layout,
        data=CorpusConfig(
            paths=(str(start / "tokens"),), seq_len=16, global_batch_size=4, micro_batch_size=1
        ),
        train=settings(steps),
    )
    return pretrain(config).step


@pytest.mark.long
def test_another_layout_goes_on(start: Path, tmp_path: Path) -> None:
    assert run_distributed(go_on, 2, start, tmp_path / "two", Layout(tp=2), 2) == [2, 2]
    assert run_distributed(go_on, 2, start, tmp_path / "two", Layout(pp=2), 4) == [4, 4]
    assert run_distributed(go_on, 1, start, tmp_path / "one", Layout(), 4) == [4]
    exports = [tmp_path / run / "export" for run in ("two", "one")]
    got, want = (load_file(export / "adapter_model.safetensors") for export in exports)
    assert_close(got, want, rtol=1e-4, atol=1e-5)
