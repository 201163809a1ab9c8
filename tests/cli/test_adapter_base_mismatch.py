"""An adapter is refused on a base model with other weights, however that base is opened."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bmforge.cli import main
from bmforge.cli.open_model import opened_model
from bmforge.data import TokenStoreWriter
from bmforge.errors import CheckpointError
from bmforge.models import GPT2, AutoModel, GPT2Config, Llama, LlamaConfig
from bmforge.models.quantize import quantize_
from bmforge.recipes.adapter_dirs import merge_adapter
from bmforge.recipes.export import describe_base
from bmforge.settings import MemoryOptions
from bmforge.tune.delta import Lora

IDS = torch.arange(6)[None]
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_layers": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a base, a model of the same shapes, a foreign one, and adapters of the base."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "other")):
        config = LlamaConfig(intermediate_size=96, **SIZES)
        Llama.from_config(config, seed=seed).save_pretrained(folder / name)
    GPT2.from_config(GPT2Config(**SIZES)).save_pretrained(folder / "gpt2")
    for name, scheme in (("adapter", None), ("qlora", "int8")):
        model = AutoModel.from_pretrained(folder / "base")
        if scheme is not None:
            quantize_(model, scheme)
        delta = Lora(model)
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(number)
            parameter.data = torch.randn(parameter.shape, generator=generator) / 8
        delta.save(folder / name)
        describe_base(folder / name, str(folder / "base"), model.traits.attention)
    return folder


@pytest.mark.parametrize(
    ("scheme", "budget"),
    [
        (None, None),
        ("int8", None),
        pytest.param(None, "1GiB", marks=pytest.mark.long),
        pytest.param("int8", "1GiB", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("adapter", ["adapter", "qlora"])
@pytest.mark.parametrize("is_allowed", [False, True])
@pytest.mark.parametrize("base", ["base", "other"])
def test_opened_models(
    models: Path, scheme: str, budget: str, adapter: str, is_allowed: bool, base: str
) -> None:
    """Only an adapter of a plain base has a fingerprint; it is compared with that of the files."""
    is_refused = base == "other" and adapter == "adapter" and not is_allowed
    memory = MemoryOptions(quantize=scheme, device_budget=budget)
    raises = pytest.raises(CheckpointError, match="trained on another base model")
    opening = opened_model(models / base, memory, 1, [str(models / adapter)], is_allowed)
    with raises if is_refused else nullcontext() as error, opening as model:
        assert model(IDS).logits.shape == (1, 6, 64)
    if is_refused:
        assert repr(str(models / "base")) in str(error.value)


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_adapter_directories_whose_base_has_changed(
    models: Path, tmp_path: Path, scheme: str | None
) -> None:
    delta = tmp_path / "adapter"
    delta.mkdir()
    for file in (models / "adapter").iterdir():
        (delta / file.name).write_bytes(file.read_bytes())
    AutoModel.from_pretrained(delta, quantize=scheme)
    describe_base(delta, str(models / "other"), "text")
    with pytest.raises(CheckpointError, match="trained on another base model"):
        AutoModel.from_pretrained(delta, quantize=scheme)
    AutoModel.from_pretrained(delta, quantize=scheme, allow_other_base=True)


def test_merging_into_another_base(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["merge", str(models / "adapter"), "--base", str(models / "other"), "--out"]
    assert main([*words, str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert str(models / "base") in said
    assert "--allow-other-base" in said
    assert not (tmp_path / "out").exists()
    assert main([*words, str(tmp_path / "out"), "--allow-other-base"]) == 0
    # Of an adapter that was trained on a quantized base, the 16-bit base cannot be compared.
    merged = merge_adapter(models / "qlora", tmp_path / "16", base=models / "base")
    with opened_model(models / "base", MemoryOptions(), 1, [str(models / "qlora")]) as model:
        assert_close(AutoModel.from_pretrained(merged)(IDS).logits, model(IDS).logits)


def test_a_foreign_architecture_names_the_base(models: Path, tmp_path: Path) -> None:
    """An adapter without a fingerprint, such as PEFT's, says for which model it was trained."""
    with pytest.raises(CheckpointError, match="does not have") as error:
        merge_adapter(models / "qlora", tmp_path / "out", base=models / "gpt2")
    assert repr(str(models / "base")) in str(error.value)


def test_evaluating_and_showing_an_adapter_on_another_base(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """The perplexity is that of the logits; `tree` shows no weights, so it compares none."""
    delta, ids = tmp_path / "adapter", list(range(17))
    shutil.copytree(models / "adapter", delta)
    describe_base(delta, str(models / "other"), "text")
    with TokenStoreWriter(tmp_path / "tokens", vocab_size=64) as writer:
        writer.add_item(ids)
        writer.end_document()
    words = ["evaluate", str(delta), "--prepared", str(tmp_path / "tokens"), "--seq-len", "17"]
    words += ["--out", str(tmp_path / "out.json")]
    assert main(words) == 2
    assert "--allow-other-base" in capsys.readouterr().err
    assert main([*words, "--allow-other-base"]) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    memory = MemoryOptions()
    with opened_model(models / "other", memory, 1, [str(delta)], True) as model, torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).exp().item()
    assert list(results["perplexity"].values()) == [pytest.approx(want, rel=1e-5)]
    caplog.clear()
    assert main(["tree", str(delta)]) == 0
    assert not caplog.records
    assert "LowRank" in capsys.readouterr().out
