"""Integer weights of a checkpoint are kept, with the values that reading as floats gives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bmforge.cli.open_model import with_file_scheme
from bmforge.errors import ConfigError
from bmforge.gguf_header import BLOCKS
from bmforge.infer import Engine, EngineConfig, generate
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.models.formats.gguf_blocks import SPECS
from bmforge.models.formats.gguf_export import export_gguf
from bmforge.models.quantize import quantize_directory
from bmforge.nn.quantized import MatrixStore, QuantizedExperts
from bmforge.settings import MemoryOptions
from bmforge.surgery import persistent_tensors

sys.path.insert(0, str(Path(__file__).parent))

import test_gptq
from gguf_models import build_model
from test_gguf import random_blocks

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_layers": 2, "num_heads": 4
}  # fmt: skip


def dense_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor by the name it has in the plain model, as floats."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, MatrixStore):
            found[f"{name}.weight"] = module.dense(torch.float32)
        elif isinstance(module, QuantizedExperts):
            for key in module.stack_sizes():
                found[f"{name}.{key}"] = module.dense(key, torch.float32)
    rest = persistent_tensors(model).items()
    return found | {n: t.float() for n, t in rest if t.is_floating_point()}


def check(kept: Any, plain: Any) -> int:
    """All values are the plain model's; return how many matrices are packed."""
    got, want = dense_tensors(kept), persistent_tensors(plain)
    assert want.keys() <= got.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    return sum(isinstance(module, MatrixStore | QuantizedExperts) for module in kept.modules())


def rewrite(path: Path, kinds: dict[str, str]) -> None:
    """Store tensors of a file as random blocks of other kinds, with gguf's own writer."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    for number, tensor in enumerate(reader.tensors):
        kind = next((k for end, k in kinds.items() if tensor.name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(tensor.name, np.array(tensor.data))
            continue
        columns, rows = (int(n) for n in tensor.shape)
        stored = random_blocks(kind, rows, columns // BLOCKS[kind][0], seed=number)
        writer.add_tensor(tensor.name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("kind", SPECS)
def test_every_kind_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    """Random blocks, also such as no quantiser writes; query and key are in another order there."""
    model = Llama.from_config(LlamaConfig(**SIZES), seed=1)
    path = export_gguf(model, tmp_path / "a.gguf", "f16")
    rewrite(path, {"attn_q.weight": kind, "ffn_down.weight": kind, "token_embd.weight": kind})
    kept = AutoModel.from_pretrained(path, quantize="keep")
    assert check(kept, AutoModel.from_pretrained(path)) == 5
    assert kept.layers["0"].attn.q_proj.spec == SPECS[kind]
    assert not isinstance(kept.layers["0"].attn.k_proj, MatrixStore)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize(
    "family", ["llama", "llama, scaled, tied, with biases", "mixtral", "qwen3moe", "gpt2", "t5"]
)
def test_families(tmp_path: Path, family: str, kind: str) -> None:
    """Written with llama.cpp's types, saved again, and in a budget."""
    path = export_gguf(build_model(family), tmp_path / "a.gguf", kind)
    kept, plain = AutoModel.from_pretrained(path, quantize="keep"), AutoModel.from_pretrained(path)
    assert check(kept, plain) >= 4
    out = quantize_directory(path, tmp_path / "packed", "keep")
    again = AutoModel.from_pretrained(out)
    ids = torch.arange(5, 11)[None]
    want = generate(kept, ids, max_new_tokens=4)
    assert torch.equal(generate(again, ids, max_new_tokens=4), want)
    with Engine(path, quantize="keep", config=EngineConfig(max_tokens=16)) as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=4), want)


@pytest.mark.parametrize(
    ("method", "bits", "group", "middle"),
    [
        ("gptq", 4, 32, False),
        ("gptq", 4, 32, True),
        ("gptq", 4, -1, False),
        ("gptq", 8, 32, False),
        ("awq", 4, 32, False),
    ],
)
def test_gptq_and_awq(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    bits: int,
    group: int,
    middle: bool,
) -> None:
    """The integers, and where zeros differ from the middle minima in fp32."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    monkeypatch.setattr(test_gptq, "SIZES", sizes)
    test_gptq.write_packed(
        tmp_path, method, {"bits": bits, "group_size": group}, int(method == "gptq")
    )
    if middle:  # stored less one
        tensors = load_file(tmp_path / "model.safetensors")
        zeros = {n: torch.full_like(t, 0x77777777) for n, t in tensors.items() if "qzeros" in n}
        save_file(tensors | zeros, tmp_path / "model.safetensors")
    assert with_file_scheme(MemoryOptions(), tmp_path).quantize == "keep"
    kept = AutoModel.from_pretrained(tmp_path, quantize="keep")
    assert check(kept, AutoModel.from_pretrained(tmp_path)) == 14
    spec = kept.layers["0"].attn.q_proj.spec
    assert (spec.bits, spec.group_size, spec.symmetric) == (bits, max(0, group), middle)
    out = quantize_directory(tmp_path, tmp_path / "packed", "keep")
    ids = torch.arange(5, 11)[None]
    assert torch.equal(AutoModel.from_pretrained(out)(ids).logits, kept(ids).logits)


def test_what_holds_no_integers(tmp_path: Path) -> None:
    Llama.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no integer weights that quantized layers support"):
        AutoModel.from_pretrained(tmp_path, quantize="keep")
