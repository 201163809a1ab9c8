"""Which adapters a call uses is a value of that call: a generated sequence leaves no trace."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig
from bmforge.testing import assert_close
from bmforge.tune.delta import (
    IA3,
    Adapter,
    Lora,
    ParallelAdapter,
    list_deltas,
    select_adapters,
    use_deltas,
)
from bmforge.tune.delta.selection import check_names, choosing_deltas

IDS = torch.arange(24).view(3, 8)
NAMES = st.lists(st.sampled_from(["a", "b", "c", None, "__base__"]), min_size=3, max_size=3)
KINDS = {
    "lora": lambda m, n: Lora(m, ["attn.q", "mlp.down"], name=n, rank=2),
    "dora": lambda m, n: Lora(m, ["attn.v"], name=n, rank=2, use_dora=True),
    "ia3": lambda m, n: IA3(m, name=n),
    "adapter": lambda m, n: Adapter(m, name=n, width=3),
    "parallel": lambda m, n: ParallelAdapter(m, name=n, width=3),
    "pairs": lambda m, n: ParallelAdapter(m, [("mlp.up", "mlp.down")], name=n, width=3),
}


def make_model(kinds: list[str], seed: int = 0) -> Any:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2
    )
    model = Llama.from_config(config, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, kind in zip("abc", kinds, strict=True):
        with torch.no_grad():
            for tensor in KINDS[kind](model, name).parameters():
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.3)
    return model


def state_of(model: nn.Module) -> list[tuple[str, str, int]]:
    """Return every attribute of every module, tensors by their memory and number of writes."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("config", "_deltas"):
                found.append((name, key, id(value)))
        for key, tensor in module._parameters.items():
            found.append((name, key, -1 if tensor is None else tensor._version))
    return found


def check_no_trace(kinds: list[str], rows: list[str | None], action: str) -> None:
    model: Any = make_model(kinds)
    hidden = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain, block = model(IDS).logits, model.layers["0"](hidden)
        before = state_of(model)
        if action == "call":
            model(IDS, adapter_names=rows)
        elif action == "block":
            with select_adapters(model, rows):
                model(IDS)
        elif action == "generate":
            generate(model, IDS, max_new_tokens=2, adapter_names=rows)
        elif action == "names":
            with choosing_deltas(model, check_names(model, [r for r in rows if r in set("abc")])):
                model(IDS)
        elif action == "wrong name":
            with pytest.raises(ConfigError, match="no adapter"):
                model(IDS, adapter_names=[*rows[1:], "z"])
        else:
            with pytest.raises(ZeroDivisionError):
                run_and_fail(model, rows)
        assert state_of(model) == before
        assert torch.equal(model(IDS).logits, plain)
        assert torch.equal(model.layers["0"](hidden), block)


def run_and_fail(model: Any, rows: list[str | None]) -> None:
    handle = model.layers["1"].register_forward_hook(lambda *_: 1 // 0)
    try:
        model(IDS, adapter_names=rows)
    finally:
        handle.remove()


def check_per_sample(kinds: list[str], rows: list[str | None]) -> None:
    """Compare each sample, and the gradients, with a model that has one adapter enabled."""
    model = make_model(kinds)
    got = model(IDS, adapter_names=rows).logits
    if got.requires_grad:
        got.square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    other = make_model(kinds)
    total = torch.zeros(())
    for number, name in enumerate(rows):
        use_deltas(other, [name] if name in list_deltas(other) else [])
        want = other(IDS[number : number + 1]).logits
        assert_close(got[number : number + 1], want, rtol=1e-4, atol=1e-5)
        total = total + want.square().sum()
    if total.requires_grad:
        total.backward()
    for name, parameter in other.named_parameters():
        if parameter.grad is not None:
            assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert_close(model(IDS, adapter_names=rows).logits, got.detach(), rtol=1e-4, atol=1e-5)


ACTIONS = st.sampled_from(["call", "block", "generate", "names", "wrong name", "error"])
TRIPLES = st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(kinds=TRIPLES, rows=NAMES, action=ACTIONS)
def test_a_call_leaves_no_trace(kinds: list[str], rows: list[str | None], action: str) -> None:
    check_no_trace(kinds, rows, action)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(kinds=TRIPLES, rows=NAMES)
def test_each_sample_has_its_adapter(kinds: list[str], rows: list[str | None]) -> None:
    check_per_sample(kinds, rows)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(kinds=TRIPLES, rows=NAMES, action=ACTIONS)
def test_many_calls_leave_no_trace(kinds: list[str], rows: list[str | None], action: str) -> None:
    check_no_trace(kinds, rows, action)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(kinds=TRIPLES, rows=NAMES)
def test_many_samples_have_their_adapters(kinds: list[str], rows: list[str | None]) -> None:
    check_per_sample(kinds, rows)


def test_merging_after_a_call_without_the_adapter_keeps_it() -> None:
    config = GPT2Config(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=32)
    model: Any = GPT2.from_config(config).eval()
    delta = Lora(model, rank=2)
    with torch.no_grad():
        for parameter in delta.parameters():
            parameter.normal_(std=0.3)
        want = model(IDS).logits
        generate(model, IDS, max_new_tokens=2, adapter_names=[None] * 3)
        delta.merge()
        assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-5)


def test_generation_takes_the_name_of_the_base() -> None:
    model = make_model(["lora", "ia3", "lora"])
    text = generate(model, IDS, max_new_tokens=3, adapter_names=["a", "__base__", "c"])
    assert torch.equal(text, generate(model, IDS, max_new_tokens=3, adapter_names=["a", None, "c"]))


def test_a_selection_is_of_its_thread_and_its_model() -> None:
    model, other = make_model(["lora"] * 3), make_model(["lora"] * 3)
    want = model(IDS).logits
    found: list[torch.Tensor] = []
    with select_adapters(model, [None] * 3):
        assert torch.equal(other(IDS).logits, want)
        assert torch.equal(copy.deepcopy(model)(IDS).logits, want)
        thread = threading.Thread(target=lambda: found.append(model(IDS).logits))
        thread.start()
        thread.join()
        assert not torch.equal(model(IDS).logits, want)
    assert torch.equal(found[0], want)
