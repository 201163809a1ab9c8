"""Whole models with their tokenizers into GGUF files and back, by the command line too."""

from __future__ import annotations

import json
import sys
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
from bmforge.surgery import persistent_tensors
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
    assert "is there already" in capsys.readouterr().err
    assert main(["convert", str(directory), str(tmp_path / "b"), "--type", "f16"]) != 0
    assert "does not end in .gguf" in capsys.readouterr().err
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
    with pytest.raises(ConfigError, match="the model 61 rows"):
        export_gguf(small, tmp_path / "d.gguf", tokenizer=tokenizer)


def test_a_file_in_pieces_or_gone(tmp_path, directory):
    with pytest.raises(ConfigError, match="is neither a directory"):
        export_gguf(tmp_path / "none", tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="does not exist"):
        AutoModel.from_pretrained(tmp_path / "none.gguf")
    path = export_gguf(directory, tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(CheckpointError, match="ends at byte"):
        AutoModel.from_pretrained(path)
    with pytest.raises(CheckpointError, match="ends at byte"):
        AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_packed_weights_are_written(family, tmp_path):
    """As q8_0 they are the same integers; q4_0 would round them again."""
    model = quantize_(build_model(family), "int8")
    path = export_gguf(model, tmp_path / "a.gguf", "q8_0")
    again = quantize_(AutoModel.from_pretrained(path), "int8")
    mine, theirs = persistent_tensors(model), persistent_tensors(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine if n.endswith(("packed", "scales")))
    with pytest.raises(ConfigError, match="round again"):
        export_gguf(model, tmp_path / "b.gguf", "q4_0")
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]
