"""Files of every family in vLLM's format open in transformers with our logits, or are refused."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bmforge.compress.matrices import default_matrix_names
from bmforge.errors import ConfigError
from bmforge.models.families import FAMILIES
from bmforge.models.formats.compressed_write import save_compressed
from bmforge.models.pack import quantize_
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.nn.quantized import QuantizedLinear
from bmforge.testing import assert_close, assert_equal_trees

SIZES = {
    **{"vocab_size": 90, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "head_dim": 16},
    **{"intermediate_size": 256, "max_seq_len": 64, "init_std": 0.2},
    **{"image_size": 8, "patch_size": 4, "num_experts": 4, "experts_per_token": 2},
    **{"attention_window": 8, "rotary_dim": 16, "patch_size": 4, "local_attention": 8},
    **{"expert_groups": 1, "top_groups": 1, "num_dense": 1, "expert_size": 32, "pad_token_id": 0},
}
LATENT = {"kv_rank": 32, "q_rank": 0, "plain_dim": 8, "rope_dim": 8, "value_dim": 16}
SCHEMES = {
    "int4": PRESETS["int4"],
    "int4-asym": QuantSpec(4, 32, symmetric=False, scale_dtype="float32"),
    "int8": PRESETS["int8"],
    "int8-dynamic": PRESETS["int8-dynamic"],
    "int8-rows": QuantSpec(8, 0, activations="float", scale_dtype="float32"),
}
CLASSES = [FAMILIES[name] for name in sorted(FAMILIES)]
QUICK = {
    ("Llama", "int4-asym"),
    ("T5", "int4"),
    ("ViT", "int4"),
    ("ViT", "int8-dynamic"),
    ("Bert", "int8-rows"),
}
QUICK |= {("GPT2", "int4"), ("Mixtral", "int4"), ("CPMBee", "int8"), ("Qwen", "int4")}


def build(family: Any) -> Any:
    fields = inspect.signature(family.config_class).parameters
    sizes = {name: size for name, size in SIZES.items() if name in fields}
    if "num_key_value_heads" in family.config_class.hf_names.values():
        sizes["num_kv_heads"] = 2
    if "kv_rank" in fields:  # keys and values of latent attention have the heads of queries
        sizes.pop("num_kv_heads", None)
        sizes |= LATENT
    return family.from_config(family.config_class(**sizes)).eval()


def inputs(config: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(6, 80, (2, 16), generator=torch.Generator().manual_seed(1))
    if hasattr(config, "image_size"):
        size = (2, 3, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(size, generator=torch.Generator().manual_seed(1))}
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7].contiguous()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        pytest.param(
            family,
            scheme,
            id=f"{family.__name__}-{scheme}",
            marks=() if (family.__name__, scheme) in QUICK else pytest.mark.long,
        )
        for family in CLASSES
        for scheme in SCHEMES
    ],
)
def test_opens_in_transformers_or_is_refused(family: Any, scheme: str, tmp_path: Path) -> None:
    plain, model = build(family), build(family)
    quantize_(model, SCHEMES[scheme], where=default_matrix_names(model))
    try:
        save_compressed(model, tmp_path / "small")
    except ConfigError as error:
        assert "compressed-tensors does not support this model" in str(error)  # noqa: PT017
        assert not (tmp_path / "small").exists()
        return
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.copy_(module.dense(torch.float32))
    raw = json.loads((tmp_path / "small" / "config.json").read_text())
    if family.__name__ == "MiniCPM":  # vLLM has a class for it
        assert_equal_trees(
            family.from_pretrained(tmp_path / "small").state_dict(), plain.state_dict()
        )
        return
    opened = getattr(transformers, raw["architectures"][0])
    theirs = opened.from_pretrained(tmp_path / "small", dtype=torch.float32).eval()
    batch = inputs(theirs.config)
    with torch.no_grad():
        got, want = theirs(**batch), plain(**batch)
    if scheme == "int8-dynamic":
        with torch.no_grad():
            want = model(**batch)
    key = "logits" if "logits" in got else "last_hidden_state"
    if scheme == "int8-dynamic":  # the package rounds tokens by 1 / 127.5 of their maximum
        assert (got[key] - getattr(want, key)).norm() < 0.05 * got[key].norm()
        return
    assert_close(got[key], getattr(want, key), rtol=1e-5, atol=1e-5 * float(got[key].abs().max()))
