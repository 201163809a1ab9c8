"""Whole models with their tokenizers into GGUF files and back, by the command line too."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
from tokenizers import pre_tokenizers as pre

from bmforge.cli.main import main
from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import AutoModel
from bmforge.models.formats.gguf_export import export_gguf
from bmforge.models.pack import quantize_
from bmforge.nn.packed_store import PackedStore
from bmforge.nn.packing import QuantSpec
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close
from bmforge.tokenizers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from gguf_models import GGUF_MODELS, build_model

TEXT = ["the cat sat on the mat", "that is that, and this is this"]


@pytest.fixture
def directory(tmp_path) -> Path:
    """A GPT-2 with 300 rows and its tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken("<end>")])
    model = type(build_model("gpt2")).from_config(GGUF_MODELS["gpt2"].replace(vocab_size=300))
    out = tmp_path / "model"
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (out / "chat_template.jinja").write_text("{{ messages }}")
    return out


def test_directory_there_and_back(directory, tmp_path):
    """Weights, tokenizer and chat template, in Hugging Face's form again."""
    path = export_gguf(directory, tmp_path / "a.gguf", "f32")
    assert main(["convert", str(path), str(tmp_path / "again")]) == 0
    first, again = (AutoModel.from_pretrained(d) for d in (directory, tmp_path / "again"))
    unsaid = {"raw": {}, "dropout": 0.0, "attn_dropout": 0.0, "init_std": 0.02}
    assert first.config.replace(**unsaid) == again.config.replace(**unsaid)
    mine, theirs = persistent_tensors(first), persistent_tensors(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    one, other = (AutoTokenizer.from_pretrained(d) for d in (directory, tmp_path / "again"))
    for text in TEXT:
        assert one.encode(text) == other.encode(text)
    assert one.special_ids == other.special_ids


def test_command_line(directory, tmp_path, capsys):
    """Convert, describe, generate: the same text from the file as from the directory."""
    out = tmp_path / "a.gguf"
    assert main(["convert", str(directory), str(out), "--type", "f16"]) == 0
    assert main(["info", str(out)]) == 0
    said = capsys.readouterr().out
    assert "GPT2" in said
    assert "num_layers" in said
    texts = []
    for place in (directory, out):
        assert main(["generate", str(place), "--prompt", "the cat", "--max-new-tokens", "9"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("the cat")
    assert texts[0] == texts[1]
    assert main(["convert", str(directory), str(out)]) != 0
    assert "already exists" in capsys.readouterr().err
    assert main(["convert", str(directory), str(tmp_path / "b"), "--type", "f16"]) != 0
    assert "is not a .gguf file" in capsys.readouterr().err
    assert main(["convert", str(directory), str(tmp_path / "b.gguf"), "--dtype", "bf16"]) != 0
    assert "dtype has no effect" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "model"]


def test_a_model_of_ours_with_and_without_its_tokenizer(directory, tmp_path):
    model, tokenizer = (
        AutoModel.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    path = export_gguf(model, tmp_path / "a.gguf", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(path).encode(TEXT[0]) == tokenizer.encode(TEXT[0])
    bare = export_gguf(model, tmp_path / "b.gguf")
    assert AutoModel.from_pretrained(bare).config.num_layers == 2
    export_gguf(path, tmp_path / "c.gguf", "q8_0")
    again, once = (AutoModel.from_pretrained(tmp_path / f"{n}.gguf") for n in "ca")
    assert torch.equal(again.embed.weight, once.embed.weight)
    small = type(model).from_config(GGUF_MODELS["gpt2"])
    with pytest.raises(ConfigError, match="the model has 61 embedding rows"):
        export_gguf(small, tmp_path / "d.gguf", tokenizer=tokenizer)


def test_a_tokenizer_without_merges_is_refused(directory, tmp_path):
    """llama.cpp requires the list of merges, which GGUF cannot store empty."""
    path = directory / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings["model"]["merges"] = []
    path.write_text(json.dumps(settings))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="a byte-level BPE tokenizer without merges"):
        export_gguf(directory, tmp_path / "a.gguf")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_in_pieces_or_gone(tmp_path, directory):
    with pytest.raises(ConfigError, match="no such directory"):
        export_gguf(tmp_path / "none", tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="does not exist"):
        AutoModel.from_pretrained(tmp_path / "none.gguf")
    path = export_gguf(directory, tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(CheckpointError, match="ends at byte"):
        AutoModel.from_pretrained(path)
    with pytest.raises(CheckpointError, match="ends at byte"):
        AutoTokenizer.from_pretrained(path)


FAMILIES = ("llama", "mixtral", "gpt2")
SCHEMES = {
    "int8": QuantSpec(8, 32),
    "int8 rows": QuantSpec(8, 0),
    "int8 fp32": QuantSpec(8, 0, scale_dtype="float32"),
    "int4": QuantSpec(4, 32),
    "int8-asym": QuantSpec(8, 32, symmetric=False),
    "int8 of 16": QuantSpec(8, 16),
}


@pytest.mark.parametrize(("family", "scheme"), list(product(FAMILIES, SCHEMES)))
def test_integers_are_not_rounded_again(family, scheme, tmp_path, caplog):
    """Q8_0 holds integers of GPTQ, whose largest one need not be 127, or a warning counts them."""
    spec = SCHEMES[scheme]
    model = quantize_(build_model(family), spec)
    for name, tensor in model.named_parameters():
        if name.endswith("packed") and spec.bits == 8:
            tensor.data.copy_((tensor.view(torch.int8) // 3).view(torch.uint8))
    with caplog.at_level("WARNING", logger="bmforge"):
        path = export_gguf(model, tmp_path / "a.gguf", "q8_0")
    stores = {n: m for n, m in model.named_modules() if isinstance(m, PackedStore)}
    if scheme in ("int8-asym", "int8 of 16"):
        assert f"{len(stores)} of {len(stores)} quantized layers, such as" in caplog.text
        return
    assert "quantized again" not in caplog.text
    opened = AutoModel.from_pretrained(path)
    again = dict(opened.named_parameters(remove_duplicate=False))  # with tied heads
    rtol = 2**-11 if spec.scale_dtype == "float32" else 0.0
    for name, store in stores.items():
        keys = [k for k in ("up_proj", "gate_proj", "down_proj") if f"{name}.{k}" in again]
        for key in keys or ["weight"]:
            assert_close(
                again[f"{name}.{key}"], store.plain(key), rtol=rtol, atol=1e-8 * bool(rtol)
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_written(family, tmp_path):
    """As q8_0 they are the same integers; q4_0 would round them again."""
    model = quantize_(build_model(family), "int8")
    path = export_gguf(model, tmp_path / "a.gguf", "q8_0")
    again = quantize_(AutoModel.from_pretrained(path), "int8")
    mine, theirs = persistent_tensors(model), persistent_tensors(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine if n.endswith(("packed", "scales")))
    with pytest.raises(ConfigError, match="quantize again"):
        export_gguf(model, tmp_path / "b.gguf", "q4_0")
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]
