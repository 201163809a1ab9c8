"""`bmforge convert` through the entry point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bmforge.cli import main
from bmforge.models import GPT2, AutoModel, GPT2Config
from bmforge.testing.tolerance import assert_equal_trees

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from cli_calls import assert_refused, bmforge


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tiny GPT-2."""
    config = GPT2Config(vocab_size=60, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=24)
    GPT2.from_config(config).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def save_old(directory: Path) -> dict[str, torch.Tensor]:
    """Write a ModelCenter Llama of one layer; return its tensors."""
    generator = torch.Generator().manual_seed(0)
    block, width, ff = "encoder.layers.0.", 16, 24
    shapes = {
        "input_embedding.weight": (40, width),
        "output_projection.weight": (40, width),
        "encoder.output_layernorm.weight": (width,),
        f"{block}self_att.layernorm_before_attention.weight": (width,),
        f"{block}ffn.layernorm_before_ffn.weight": (width,),
        f"{block}self_att.self_attention.attention_out.weight": (width, width),
        f"{block}ffn.ffn.w_in.w_0.weight": (ff, width),
        f"{block}ffn.ffn.w_in.w_1.weight": (ff, width),
        f"{block}ffn.ffn.w_out.weight": (width, ff),
    }
    for part in "qkv":
        shapes[f"{block}self_att.self_attention.project_{part}.weight"] = (width, width)
    tensors = {n: torch.randn(shape, generator=generator).half() for n, shape in shapes.items()}
    directory.mkdir()
    torch.save(tensors, directory / "pytorch_model.pt")
    (directory / "config.json").write_text(
        '{"vocab_size": 40, "dim_model": 16, "num_heads": 2, "dim_head": 8, "dim_ff": 24,'
        ' "num_layers": 1}'
    )
    return tensors


def test_hugging_face(small: Path, tmp_path: Path) -> None:
    """Another dtype, several files; weights rounded once."""
    options = ("--dtype", "bf16", "--max-file-gb", "0.000005")
    (said,) = bmforge("convert", small, tmp_path / "new", *options)
    assert said.status == 0, said
    assert "GPT2" in said.err
    assert "bfloat16" in said.err
    assert len(list((tmp_path / "new").glob("model-*.safetensors"))) > 1
    got = AutoModel.from_pretrained(tmp_path / "new", dtype=torch.bfloat16)
    want = GPT2.from_pretrained(small).to(torch.bfloat16)
    assert_equal_trees(got.state_dict(), want.state_dict())


def test_model_center(tmp_path: Path) -> None:
    """The family is told from the names, or said; fp16 stays fp16."""
    tensors = save_old(tmp_path / "old")
    for number, options in enumerate([(), ("--family", "Llama")]):
        out = tmp_path / str(number)
        (said,) = bmforge("convert", tmp_path / "old", out, *options)
        assert said.status == 0, said
        got = load_file(out / "model.safetensors")
        assert torch.equal(
            got["model.layers.0.mlp.gate_proj.weight"],
            tensors["encoder.layers.0.ffn.ffn.w_in.w_0.weight"],
        )


def test_refusals(small: Path, tmp_path: Path) -> None:
    """Nothing is overwritten, and every mistake is a sentence."""
    assert_refused(bmforge("convert", small, small), "contains a model")
    new = tmp_path / "new"
    assert_refused(bmforge("convert", tmp_path / "none", new), "none")
    assert_refused(bmforge("convert", small, new, "--max-file-gb", "0"), "max_file_gb")
    save_old(tmp_path / "old")
    assert_refused(bmforge("convert", tmp_path / "old", new, "--family", "Lama"), "Lama", "Llama")
    assert not new.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["quantize", "src", "dir"],
        ["quantize", "src", "--out", "dir"],
        ["quantize", "src", "--scheme", "int8", "--out=dir"],
        ["quantize", "--scheme", "int8", "src", "--out", "dir"],
        ["convert", "src", "--out", "dir"],
        ["convert", "--type", "q8_0", "src", "--out", "dir.gguf"],
    ],
)
def test_the_target_is_also_given_as_out(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []

    def keep(command: Any) -> None:
        calls.append((command.source, command.target.name.removesuffix(".gguf")))

    monkeypatch.setattr("bmforge.cli.quantize.run_quantize", keep)
    monkeypatch.setattr("bmforge.cli.convert.run_convert", keep)
    assert main(words) == 0
    assert calls == [("src", "dir")]


def test_a_target_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "src", "dir", "--out", "other"]) == 2
    assert "dir" in capsys.readouterr().err
