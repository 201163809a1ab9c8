"""QLoRA: Loras beside torchao's weights and beside our own integers."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.models import Llama, LlamaConfig
from bmforge.models.changes import Change
from bmforge.models.quantize import quantize_
from bmforge.nn.packing import find_preset
from bmforge.testing import assert_close
from bmforge.tune.delta import Adapter, Delta, Lora, load_delta

IDS = torch.arange(16).view(2, 8)


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=32,
    )
    return Llama.from_config(config).eval()


def stir_(delta: Delta) -> Delta:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in delta.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return delta


def pack_(model: nn.Module) -> list[str]:
    """Let torchao keep the projections as int8; return their names."""
    quantization = pytest.importorskip("torchao.quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(
            model,
            quantization.Int8WeightOnlyConfig(),
            filter_fn=lambda module, name: isinstance(module, nn.Linear) and "_proj" in name,
        )
    found = [n for n, m in model.named_modules() if "torchao" in type_of(m)]
    assert len(found) == 2 * 7
    return found


def type_of(module: nn.Module) -> str:
    return type(getattr(module, "weight", None)).__module__


def plain_twin(model: nn.Module, names: list[str]) -> nn.Module:
    """The same model with what torchao's weights stand for in plain ones."""
    twin = llama()
    own = dict(model.named_modules())
    with torch.no_grad():
        for name in names:
            twin.get_submodule(name).weight.copy_(own[name].weight.dequantize())
    return twin


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_a_lora_beside_weights_of_torchao(tmp_path: Any) -> None:
    """Logits and gradients are those beside plain weights of the same values."""
    model = llama()
    names = pack_(model)
    twin = plain_twin(model, names)
    deltas = [stir_(Lora(one, ["attn.q", "attn.v", "mlp.down"], rank=4)) for one in (model, twin)]
    assert {p.dtype for p in deltas[0].parameters()} == {torch.float32}
    assert_close(model(IDS).logits, twin(IDS).logits, rtol=1e-5, atol=1e-5)
    got, want = gradients(model), gradients(twin)
    assert set(got) == set(want) == {n for n, _ in deltas[0].named_parameters()}
    assert_close(got, want, rtol=1e-4, atol=1e-6)
    changed = model(IDS).logits.detach()
    deltas[0].save(tmp_path)
    again = llama()
    pack_(again)
    load_delta(again, tmp_path)
    assert_close(again(IDS).logits, changed, rtol=1e-6, atol=1e-6)


def test_merging_needs_a_word() -> None:
    """Into a quantised weight only where it may become a plain one; undone to the bit."""
    model = llama()
    pack_(model)
    delta = stir_(Lora(model, ["attn.q"], rank=4))
    before = model(IDS).logits.detach()
    with pytest.raises(ConfigError, match=r"merge\(dequantize=True\)"):
        delta.merge()
    assert torch.equal(model(IDS).logits, before)
    delta.merge(dequantize=True)
    assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-5)
    merged = [n for n, m in model.named_modules() if n.endswith("q_proj")]
    assert all("torchao" not in type_of(model.get_submodule(name)) for name in merged)
    delta.unmerge()
    assert torch.equal(model(IDS).logits, before)
    assert all("torchao" in type_of(model.get_submodule(name)) for name in merged)


@pytest.mark.parametrize("scheme", ["int8", "int4", "rows", "torchao"])
def test_dora_reads_dequantized_weights(scheme: str) -> None:
    """Logits and gradients are those of DoRA on plain weights with the dequantized values."""
    model = llama()
    if scheme == "torchao":
        twin = plain_twin(model, pack_(model))
    else:
        if scheme == "rows":
            model.change_(Change("int8", "layers.*.*.*_proj"))
        else:
            quantize_(model, replace(find_preset(scheme), activations="float"))
        twin = llama()
        names = twin.state_dict().keys()
        floats = {n: t for n, t in model.state_dict().items() if n in names and "_proj" not in n}
        packed = {n: m for n, m in model.named_modules() if hasattr(m, "dense")}
        dense = {f"{n}.weight": m.dense(torch.float32) for n, m in packed.items()}
        twin.load_state_dict({**floats, **dense})
    before = model(IDS).logits.detach()
    deltas = [Lora(one, ["attn.q", "mlp.down"], rank=4, use_dora=True) for one in (model, twin)]
    assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-5)
    for delta in deltas:
        stir_(delta)
    assert_close(model(IDS).logits, twin(IDS).logits, rtol=1e-4, atol=1e-5)
    got, want = gradients(model), gradients(twin)
    assert set(got) == {n for n, _ in deltas[0].named_parameters()}
    assert_close(got, {name: want[name] for name in got}, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_deltas_beside_our_own_integers(scheme: str) -> None:
    """They train, save nothing of the base, and refuse to be merged."""
    model = llama()
    quantize_(model, scheme)
    before = model(IDS).logits.detach()
    lora = Lora(model, ["attn.q", "mlp.down"], rank=4, name="lora")
    adapter = Adapter(model, width=4, name="adapter")
    assert torch.equal(model(IDS).logits, before)
    stir_(lora)
    stir_(adapter)
    found = gradients(model)
    assert set(found) == {n for d in (lora, adapter) for n, _ in d.named_parameters()}
    assert all(grad.abs().sum() > 0 for grad in found.values())
    changed = model(IDS).logits.detach()
    assert torch.equal(copy.deepcopy(model)(IDS).logits, changed)
    with pytest.raises(ConfigError, match="integer weight"):
        lora.merge()
    lora.detach()
    adapter.detach()
    assert torch.equal(model(IDS).logits, before)
