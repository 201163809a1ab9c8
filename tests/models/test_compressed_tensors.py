"""Files in vLLM's format: opened by transformers with the package, and read back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import (
    GPT2,
    OPT,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    OPTConfig,
)
from bmforge.models.formats.compressed_tensors import pack_words, unpack_words
from bmforge.models.formats.compressed_write import save_compressed
from bmforge.models.pack import quantize_
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.nn.quantized import QuantizedLinear
from bmforge.provenance import Provenance, ProvenanceSource, read_provenance
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close, assert_equal_trees

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 16,
    "init_std": 0.2,
}
IDS = torch.arange(32).view(2, 16)
WHERE = ["layers.**_proj"]
SCHEMES = {
    "int8-dynamic": PRESETS["int8-dynamic"],
    "int4": PRESETS["int4"],
    "int4-64": QuantSpec(4, 64),
    "int8": PRESETS["int8"],
    "int8-rows": QuantSpec(8, 0, activations="float", scale_dtype="float32"),
    "int4-asym": QuantSpec(4, 32, symmetric=False, scale_dtype="float32"),
    "int8-asym": QuantSpec(8, 64, symmetric=False, scale_dtype="float32"),
    "int4-asym-rows": QuantSpec(4, 0, False, "float", scale_dtype="float32"),
}


def llama(**more: Any) -> Llama:
    config = LlamaConfig(**SIZES, num_kv_heads=2, intermediate_size=128, **more)
    return Llama.from_config(config).eval()


def opt() -> OPT:
    return OPT.from_config(OPTConfig(**SIZES, intermediate_size=128)).eval()


def run(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def twin(plain: Any, model: Any) -> Any:
    """The plain model with the weights that the quantised one stands for."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.copy_(module.dense(torch.float32))
    return plain


QUICK = {
    (llama, "int4-asym"),
    (opt, "int8-asym"),
    (llama, "int8-dynamic"),
    (llama, "int4"),
    (llama, "int8-rows"),
}


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_the_packages(bits: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import (
        pack_to_int32,
        unpack_from_int32,
    )

    low, generator = -(1 << (bits - 1)), torch.Generator().manual_seed(0)
    values = torch.randint(low, -low, (5, 64), generator=generator).to(torch.int8)
    words = pack_words(values, bits)
    assert torch.equal(words, pack_to_int32(values, bits))
    assert torch.equal(unpack_words(words, bits), values)
    assert torch.equal(unpack_from_int32(words, bits, values.shape), values)


@pytest.mark.parametrize(
    ("build", "scheme"),
    [
        pytest.param(build, spec, id=f"{build.__name__}-{name}", marks=marks)
        for build in (llama, opt)
        for name, spec in SCHEMES.items()
        for marks in [() if (build, name) in QUICK else pytest.mark.long]
    ],
)
def test_transformers_opens_it(build: Any, scheme: QuantSpec, tmp_path: Path) -> None:
    """With the bits of the dequantised twin; rows x tokens but for how tokens are rounded."""
    model = quantize_(build(), scheme, where=WHERE)
    save_compressed(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    want = run(twin(build(), model))
    with torch.no_grad():
        got = theirs(input_ids=IDS).logits
    if scheme.group_size or scheme.activations == "float":
        assert_close(got, want, rtol=1e-4, atol=1e-4)
    else:
        ours = (run(model) - want).norm()
        assert 0 < ours < 0.06 * want.norm()
        assert (got - want).norm() < 1.5 * ours


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_read_back(scheme: QuantSpec, tmp_path: Path) -> None:
    model = quantize_(llama(), scheme, where=WHERE)
    save_compressed(model, tmp_path, max_file_bytes=40_000)
    kept = Llama.from_pretrained(tmp_path, quantize="keep")
    mine = {n: m for n, m in kept.named_modules() if isinstance(m, QuantizedLinear)}
    assert set(mine) == {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert_equal_trees(persistent_tensors(kept), persistent_tensors(model))
    assert torch.equal(run(kept), run(model))
    floats = Llama.from_pretrained(tmp_path)
    assert not floats.config.changes
    assert_equal_trees(persistent_tensors(floats), persistent_tensors(twin(llama(), model)))
    with pytest.raises(CheckpointError, match="already contains a model"):
        save_compressed(model, tmp_path)


def test_licenses_travel(tmp_path: Path) -> None:
    """What is known of a model's parts is written beside it, as in every form."""
    model = quantize_(llama(), "int4", where=WHERE)
    model.provenance = Provenance(
        "apache-2.0", (ProvenanceSource("base", "someone/base", "apache-2.0"),)
    )
    save_compressed(model, tmp_path)
    assert read_provenance(tmp_path) == model.provenance
    assert (tmp_path / "README.md").is_file()


def test_what_is_packed_outside_of_blocks_is_written_as_floats(tmp_path: Path) -> None:
    model = quantize_(llama(), "int4")
    save_compressed(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found["lm_head.weight"].dtype == torch.float32
    assert torch.equal(found["lm_head.weight"], model.lm_head.dense(torch.float32))
    assert found["model.layers.0.mlp.up_proj.weight_packed"].shape == (128, 8)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        got = theirs.eval()(input_ids=IDS).logits
    assert_close(got, run(Llama.from_pretrained(tmp_path)), rtol=1e-4, atol=1e-4)


def test_some_layers_only(tmp_path: Path) -> None:
    """Names of what is quantised are no wider than that."""
    model = quantize_(llama(), "int4", where=["layers.1.mlp.*_proj"])
    save_compressed(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    targets = config["quantization_config"]["config_groups"]["group_0"]["targets"]
    assert targets == [rf"re:^model\.layers\.1\.mlp\.{k}_proj$" for k in ("gate", "up", "down")]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        got = theirs.eval()(input_ids=IDS).logits
    assert_close(got, run(twin(llama(), model)), rtol=1e-4, atol=1e-4)


def test_what_the_format_has_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no quantized linear layers"):
        save_compressed(llama(), tmp_path)
    with pytest.raises(ConfigError, match="fused or transposed"):
        save_compressed(quantize_(GPT2.from_config(GPT2Config(**SIZES)), "int4"), tmp_path)
    mixed = quantize_(llama(), "int4", where=["layers.0.**_proj"])
    with pytest.raises(ConfigError, match="several schemes"):
        save_compressed(quantize_(mixed, "int8", where=["layers.1.**_proj"]), tmp_path)
    with pytest.raises(ConfigError, match="not integer zero points"):
        save_compressed(quantize_(llama(), QuantSpec(4, 32, symmetric=False)), tmp_path)
    config = MixtralConfig(
        **SIZES, num_kv_heads=2, intermediate_size=64, num_experts=3, experts_per_token=2
    )
    with pytest.raises(ConfigError, match="experts are stacked"):
        save_compressed(quantize_(Mixtral.from_config(config), "int4"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"config_groups": {}}, "no config_groups"),
        ({"quantization_status": "frozen"}, "quantization_status='frozen'"),
    ],
)
def test_what_is_not_read_is_said(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_compressed(quantize_(llama(), "int4", where=WHERE), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        Llama.from_pretrained(tmp_path)


FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    "group",
    [
        {"weights": {"num_bits": 3}},
        {"weights": {"actorder": "group"}},
        {"input_activations": FP8},
        {"input_activations": {**FP8, "type": "int", "dynamic": False}},
    ],
)
def test_schemes_that_are_not_supported(group: dict[str, Any], tmp_path: Path) -> None:
    save_compressed(quantize_(llama(), "int4", where=WHERE), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    mine = config["quantization_config"]["config_groups"]["group_0"]
    mine["weights"] |= group.get("weights", {})
    mine["input_activations"] = group.get("input_activations")
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="unsupported fields"):
        Llama.from_pretrained(tmp_path)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    save_compressed(quantize_(llama(), "int4", where=WHERE), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_packed"
    save_file({**tensors, name: tensors[name][:, :4].contiguous()}, file)
    with pytest.raises(CheckpointError, match="inconsistent shapes"):
        Llama.from_pretrained(tmp_path)


def test_a_file_of_the_packages_own(tmp_path: Path) -> None:
    """Quantised and written by the package itself, 4 bits by groups, and read here."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    model = llama()
    model.save_pretrained(tmp_path)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    want: dict[str, torch.Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        values = torch.randint(-8, 8, (rows, columns), generator=generator).to(torch.int8)
        scales = (torch.rand(rows, columns // 32, generator=generator) * 0.1).to(torch.bfloat16)
        tensors |= {
            f"{name}_packed": pack_to_int32(values, 4),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor([rows, columns]),
        }
        want[name] = values.float() * scales.float().repeat_interleave(32, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    packed = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": packed}))
    opened = Llama.from_pretrained(tmp_path)
    got = {f"model.{n}".replace(".attn.", ".self_attn."): p for n, p in opened.named_parameters()}
    for name, values in want.items():
        assert torch.equal(got[name], values), name
    kept = Llama.from_pretrained(tmp_path, quantize="keep")
    module: Any = kept.layers["0"].mlp.up_proj
    assert torch.equal(module.dense(torch.float32), want["model.layers.0.mlp.up_proj.weight"])
