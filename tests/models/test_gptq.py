"""Checkpoints of GPTQ and AWQ against loops that follow the two layouts number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import AutoModel, Llama, LlamaConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def word(numbers: list[int], bits: int) -> int:
    """Pack numbers into a signed 32-bit word, the first one lowest."""
    value = sum(number << (bits * place) for place, number in enumerate(numbers))
    return value - (1 << 32) if value >= 1 << 31 else value


def pack(method: str, bits: int, group: int, offset: int, rows: int, inputs: int) -> Any:
    """Return random packed parts of a layer, and the weight they are, both made by loops."""
    per_word, count = 32 // bits, inputs // group
    integers = torch.randint(0, 1 << bits, (inputs, rows))
    zeros = torch.randint(offset, 1 << bits, (count, rows))
    scales = (torch.rand(count, rows) * 0.1 + 0.01).half()
    weight = torch.empty(rows, inputs)
    for row in range(rows):
        for place in range(inputs):
            of = place // group
            weight[row, place] = (integers[place, row] - zeros[of, row]) * scales[of, row].float()
    order = AWQ_ORDER if method == "awq" else list(range(per_word))

    def along_rows(values: Tensor, take: int) -> Tensor:
        words = [
            [
                word([int(line[first + k]) - take for k in order], bits)
                for first in range(0, rows, per_word)
            ]
            for line in values
        ]
        return torch.tensor(words, dtype=torch.int32)

    if method == "awq":
        packed = along_rows(integers, 0)
    else:
        words = [
            [word([int(integers[first + k, row]) for k in order], bits) for row in range(rows)]
            for first in range(0, inputs, per_word)
        ]
        packed = torch.tensor(words, dtype=torch.int32)
    parts = {"qweight": packed, "qzeros": along_rows(zeros, offset), "scales": scales}
    if method == "gptq":
        parts["g_idx"] = torch.arange(inputs, dtype=torch.int32) // group
    return parts, weight


def write_packed(
    place: Path, method: str, settings: dict[str, Any], offset: int
) -> dict[str, Tensor]:
    """Write a Llama whose blocks' linear layers are packed; return all weights by name."""
    torch.manual_seed(0)
    Llama.from_config(LlamaConfig(**SIZES, num_heads=4)).save_pretrained(place)
    tensors = load_file(place / "model.safetensors")
    stored, whole = {}, {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            rows, inputs = tensor.shape
            group = settings["group_size"] if settings["group_size"] > 0 else inputs
            parts, whole[name] = pack(method, settings["bits"], group, offset, rows, inputs)
            stored |= {name.replace("weight", part): t for part, t in parts.items()}
        else:
            stored[name] = whole[name] = tensor
    save_file(stored, place / "model.safetensors")
    raw = json.loads((place / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": method, **settings}
    (place / "config.json").write_text(json.dumps(raw))
    return whole


@pytest.mark.parametrize(
    ("method", "settings", "offset"),
    [
        ("gptq", {"bits": 4, "group_size": 16, "desc_act": False}, 1),
        ("gptq", {"bits": 8, "group_size": -1, "sym": True}, 1),
        ("gptq", {"bits": 4, "group_size": 8, "checkpoint_format": "gptq_v2"}, 0),
        ("awq", {"bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}, 0),
    ],
    ids=["gptq 4", "gptq 8", "gptq_v2", "awq"],
)
def test_weights_are_those_of_the_loops(tmp_path, method, settings, offset):
    """Opened, and saved again as a plain model."""
    whole = write_packed(tmp_path / "packed", method, settings, offset)
    model = AutoModel.from_pretrained(tmp_path / "packed")
    model.save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(plain[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


GPTQMODEL_META = {"quantizer": ["gptqmodel:5.0.0"], "damp_percent": 0.05, "mse": 0.0, "v2": False}


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("gptq", {"pack_dtype": "int32", "checkpoint_format": "gptq", "meta": GPTQMODEL_META}),
        ("gptq", {"pack_dtype": "int32", "format": "gptq", "checkpoint_format": "gptq"}),
        ("gptq", {"pack_impl": "cpu", "hyb_act": True, "lm_head": False}),
        ("gptq", {"act_group_aware": True, "mse": 2.0, "offload_to_disk": True, "method": "gptq"}),
        ("gptq", {"dynamic": {r"-:model\.layers\.9\..*": {}}}),
        ("gptq", {"model_seqlen": 2048, "use_cuda_fp16": True, "dataset": "c4"}),
        ("awq", {"format": "gemm", "backend": "auto", "modules_to_not_convert": ["lm_head"]}),
    ],
)
def test_fields_of_other_writers(tmp_path, method, fields):
    """What GPTQModel, optimum and transformers write next to the fields of AutoGPTQ."""
    settings = {"bits": 4, "group_size": 16, "sym": True, **fields}
    whole = write_packed(tmp_path, method, settings, int(method == "gptq"))
    got = AutoModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in whole.items():
        if name.endswith("mlp.up_proj.weight"):
            assert torch.equal(got[name.removeprefix("model.")], tensor)


def test_inputs_in_another_order(tmp_path):
    """With desc_act an input is of the group that g_idx names."""
    whole = write_packed(tmp_path, "gptq", {"bits": 4, "group_size": 8, "desc_act": True}, 1)
    file, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(2)
    tensors = load_file(file)
    want = {}
    for name in [n for n in tensors if n.endswith(".g_idx")]:
        stem, groups = name.removesuffix(".g_idx"), tensors[name]
        order = groups[torch.randperm(len(groups), generator=generator)]
        zeros = tensors[f"{stem}.qzeros"]
        unpacked = torch.stack([zeros >> 4 * k & 15 for k in range(8)], -1).flatten(1) + 1
        scales = tensors[f"{stem}.scales"].float()
        # The integers that the loops packed, from their weight and the usual order.
        integers = whole[f"{stem}.weight"].t() / scales[groups] + unpacked[groups]
        want[stem] = ((integers.round() - unpacked[order]) * scales[order]).t()
        tensors[name] = order
    save_file(tensors, file)
    got = AutoModel.from_pretrained(tmp_path).state_dict()
    for stem, weight in want.items():
        ours = stem.removeprefix("model.").replace("self_attn", "attn")
        assert torch.equal(got[f"{ours}.weight"], weight), stem
    with pytest.raises(ConfigError, match="no integer weights that quantized layers support"):
        AutoModel.from_pretrained(tmp_path, quantize="keep")


def test_refused_by_name(tmp_path):
    """Other layouts, and parts that do not match."""
    settings = {"bits": 4, "group_size": 16}
    write_packed(tmp_path, "gptq", settings, 1)
    file, raw = tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())
    for changes, said in (
        ({"pack_dtype": "int16"}, "pack_dtype='int16'"),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, "format='gptq_v2'"),
        ({"dynamic": {r".*\\.1\\..*": {"bits": 8}}}, "dynamic="),
        ({"rotation": "hadamard"}, "rotation='hadamard'"),
        ({"bits": 3}, "bits=3"),
        ({"group_size": 0}, "group_size=0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"new_thing": 4}, "new_thing=4"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv'"),
    ):
        changed = {**raw, "quantization_config": {**raw["quantization_config"], **changes}}
        file.write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=said):
            AutoModel.from_pretrained(tmp_path)
    file.write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    ordered = {**tensors, f"{name}.g_idx": tensors[f"{name}.g_idx"] + 1}
    short = {**tensors, f"{name}.scales": tensors[f"{name}.scales"][:1].clone()}
    gone = {key: tensor for key, tensor in tensors.items() if key != f"{name}.qzeros"}
    for found, said in (
        (ordered, "group indices outside"),
        (short, "inconsistent shapes"),
        (gone, "qzeros.*missing"),
    ):
        save_file(found, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            AutoModel.from_pretrained(tmp_path)
