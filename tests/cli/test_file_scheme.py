"""The quantization scheme that inference commands choose for a model's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bmforge.cli.open_model import opened_model, with_file_scheme
from bmforge.models import Llama, LlamaConfig
from bmforge.models.formats.gguf_export import export_gguf
from bmforge.models.quantize import quantize_
from bmforge.nn.quantized import QuantizedLinear
from bmforge.settings import MemoryOptions


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a Llama whose rows are divisible into blocks of 32."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2
    )
    Llama.from_config(config, seed=1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
@pytest.mark.parametrize("scheme", [None, "none", "keep", "int8"])
def test_scheme_of_gguf_files(directory, tmp_path, kind, scheme) -> None:
    """Integers are kept unless another scheme is given; a file without any stays as it is."""
    file = tmp_path / "model.gguf"
    export_gguf(directory, file, kind)
    has_integers = kind != "f16"
    expected = {None: "keep" if has_integers else None, "none": None}.get(scheme, scheme)
    memory = with_file_scheme(MemoryOptions(quantize=scheme), file)
    assert memory.quantize == expected
    if expected == "keep" and not has_integers:
        return
    with opened_model(file, MemoryOptions(quantize=scheme), deltas=()) as model:
        packed = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert bool(packed) == (expected is not None)


def test_scheme_of_directories(directory, tmp_path) -> None:
    """Plain directories and those that bmforge quantized have no scheme to choose."""
    assert with_file_scheme(MemoryOptions(), directory).quantize is None
    model = Llama.from_pretrained(directory)
    quantize_(model, "int8")
    model.save_pretrained(tmp_path)
    assert with_file_scheme(MemoryOptions(), tmp_path).quantize is None


def test_the_backend_keeps_its_own_weights(directory, tmp_path) -> None:
    """transformers reads a file in its own way."""
    export_gguf(directory, tmp_path / "model.gguf", "q8_0")
    memory = MemoryOptions(backend="transformers")
    assert with_file_scheme(memory, tmp_path / "model.gguf").quantize is None
