"""What layers of a quantised model lose, against sums made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers

from bmforge.errors import DataError
from bmforge.models import GPT2, AutoModel, GPT2Config, Mixtral, MixtralConfig
from bmforge.models.quantize import quantize_directory
from bmforge.nn.quantized import QuantizedLinear
from bmforge.recipes.quantized_layers import measure_layers

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
TEXT = " ".join(f"w{(5 * n) % 90}" for n in range(12))


def save(model: Any, folder: Path) -> tuple[str, str, str]:
    """Write a model with a tokenizer of words, what int4 makes of it, and a text."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save_pretrained(folder / "plain")
    tokenizer.save(str(folder / "plain/tokenizer.json"))
    (folder / "plain/tokenizer_config.json").write_text(json.dumps({"unk_token": "w0"}))
    (folder / "text.txt").write_text(TEXT)
    quantize_directory(folder / "plain", folder / "int4", "int4")
    return str(folder / "plain"), str(folder / "int4"), str(folder / "text.txt")


def test_errors_are_those_of_each_layer_alone(tmp_path: Path) -> None:
    """Of what it gets in the quantised model; a head that is tied to the embedding has none."""
    plain = GPT2.from_config(GPT2Config(**SIZES, max_seq_len=16), seed=3)
    source, target, text = save(plain, tmp_path)
    found = dict(measure_layers(source, target, (text,)))

    packed = AutoModel.from_pretrained(target).eval()
    inputs: dict[str, torch.Tensor] = {}
    for name, module in packed.named_modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_hook(
                lambda _, args, __, name=name: inputs.__setitem__(name, args[0])
            )
    with torch.no_grad():
        packed(input_ids=torch.tensor([[(5 * n) % 90 for n in range(12)]]))
        assert set(found) == {*inputs, "embed"}
        for name, x in inputs.items():
            exact = plain.get_submodule(name)(x)
            error = (packed.get_submodule(name)(x) - exact).norm() / exact.norm()
            assert found[name] == pytest.approx(float(error), rel=1e-5), name
    assert [*found.values()] == sorted(found.values(), reverse=True)


def test_experts_and_heads_have_errors_too(tmp_path: Path) -> None:
    """Each stack of experts counts for what was sent to it, the head for all rows."""
    config = MixtralConfig(**SIZES, intermediate_size=64, num_kv_heads=2, num_experts=4)
    plain = Mixtral.from_config(config, seed=3)
    source, target, text = save(plain, tmp_path)
    found = dict(measure_layers(source, target, (text,)))
    assert {"layers.0.mlp.experts", "layers.1.mlp.experts", "lm_head", "embed"} <= set(found)
    assert all(0 < error < 0.2 for error in found.values())
    ids = torch.tensor([[(5 * n) % 90 for n in range(12)]])
    table = AutoModel.from_pretrained(target).get_submodule("embed")(ids)
    exact = F.embedding(ids, plain.embed.weight)
    off = float(((table - exact).norm() / exact.norm()).detach())
    assert found["embed"] == pytest.approx(off, rel=1e-5)


def test_texts_without_tokens_are_refused(tmp_path: Path) -> None:
    source, target, text = save(GPT2.from_config(GPT2Config(**SIZES, max_seq_len=16)), tmp_path)
    Path(text).write_text("")
    with pytest.raises(DataError, match=r"no token|empty|no document"):
        measure_layers(source, target, (text,))
