"""The fingerprint of a model from its files is that of the loaded model, for every family."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.models import AutoModel
from bmforge.models.file_fingerprint import fingerprint_of_files
from bmforge.models.formats.gguf_export import export_gguf
from bmforge.models.hub import FAMILIES
from bmforge.models.quantize import quantize_
from bmforge.tune.delta.fingerprint import fingerprint_of

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 256,
    "pad_token_id": 0,
    "experts_per_token": 1,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_seq_len": 32,
    "num_experts": 2,
    "expert_size": 64,
    "shared_size": 64,
    "image_size": 16,
    "patch_size": 8,
    "rotary_dim": 16,
    "base_hidden_size": 64,
    "embed_size": 64,
    "expert_groups": 1,
    "top_groups": 1,
    "num_dense": 0,
    **{"kv_rank": 16, "q_rank": 0, "plain_dim": 24, "rope_dim": 8, "value_dim": 32},
}


def save_small(family: Any, directory: Path, seed: int = 0) -> Any:
    """Save a small random model of a family."""
    kind = family.config_class
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    config = kind(**{name: size for name, size in SIZES.items() if name in names})
    family.from_config(config, seed=seed).save_pretrained(directory)


# Families whose files have transposed, fused, interleaved or stacked tensors, or two stacks.
SEVERAL = ("Bloom", "GPT2", "Qwen3Moe", "T5")


@pytest.mark.parametrize(
    "family",
    [name if name in SEVERAL else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES],
)
def test_files_have_the_fingerprint_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    save_small(FAMILIES[family], tmp_path / "a", seed=1)
    save_small(FAMILIES[family], tmp_path / "b", seed=2)
    model: Any = AutoModel.from_pretrained(tmp_path / "a")
    excluded = [next(name for name, _ in model.named_parameters())]
    for but in ((), excluded):
        expected = fingerprint_of(model, but)
        assert expected is not None
        assert fingerprint_of_files(model, tmp_path / "a", but) == expected
        assert fingerprint_of_files(model, tmp_path / "b", but) != expected
    AutoModel.from_pretrained(tmp_path / "a").to(torch.bfloat16).save_pretrained(tmp_path / "c")
    assert fingerprint_of_files(model, tmp_path / "c") == expected_of(tmp_path / "c")


def expected_of(directory: Path) -> str | None:
    return fingerprint_of(AutoModel.from_pretrained(directory))


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("int8", "f32"),
        ("int4", "q8_0"),
        pytest.param("int4", "f16", marks=pytest.mark.long),
        pytest.param("int8", "q8_0", marks=pytest.mark.long),
    ],
)
def test_files_of_quantized_models(scheme: str, kind: str, tmp_path: Path) -> None:
    """Quantizing while loading changes nothing; files with integers have no fingerprint."""
    save_small(FAMILIES["Llama"], tmp_path / "a")
    file = tmp_path / "model.gguf"
    export_gguf(tmp_path / "a", file, kind)
    expected = None if kind == "q8_0" else expected_of(file)
    for source in (tmp_path / "a", file):
        model: Any = AutoModel.from_pretrained(source, quantize=scheme)
        assert fingerprint_of(model) is None
        want = expected if source == file else expected_of(source)
        assert fingerprint_of_files(model, source) == want
    quantize_(AutoModel.from_pretrained(tmp_path / "a"), scheme).save_pretrained(tmp_path / "b")
    packed: Any = AutoModel.from_pretrained(tmp_path / "b")
    assert fingerprint_of_files(packed, tmp_path / "b") is None
