"""No cached key or value outlives a change of weights, whoever writes them.

The reference is a fresh engine over the changed model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bmforge.infer import Engine, GenerationConfig, Request
from bmforge.infer.engine.changes import Changes
from bmforge.models import Llama, LlamaConfig

PROMPT = torch.randint(4, 90, (50,), generator=torch.Generator().manual_seed(0)).tolist()


def _model() -> Llama:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=96,
        init_std=0.3,
    )
    return Llama.from_config(config, seed=1)


def _train(make: Callable[[Any], Any]) -> Callable[[Llama], None]:
    def write(model: Llama) -> None:
        optimizer = make(model.requires_grad_(True).parameters())
        ids = torch.tensor([PROMPT])
        model.train()(ids, labels=ids).loss.backward()
        optimizer.step()
        model.eval()

    return write


@torch.no_grad()
def _in_place(model: Llama) -> None:
    model.layers["0"].attn.k_proj.weight.add_(0.1)


def _data(model: Llama) -> None:
    model.layers["0"].attn.k_proj.weight.data.add_(0.1)


def _numpy(model: Llama) -> None:
    array: Any = model.layers["1"].mlp.up_proj.weight.detach().numpy()
    array *= 1.5


def _one_element(model: Llama) -> None:
    model.requires_grad_(False).layers["0"].attn.v_proj.weight.data[3, 5] += 2.0


def _swap_neurons(model: Llama) -> None:
    weight = model.layers["0"].mlp.up_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]


@torch.no_grad()
def _copy(model: Llama) -> None:
    weight = model.layers["0"].attn.q_proj.weight
    weight.copy_(weight * 0.5)


def _data_copy(model: Llama) -> None:
    weight = model.layers["1"].attn.k_proj.weight
    weight.data.copy_(weight.data.roll(1, 0))


def _new_data(model: Llama) -> None:
    weight = model.layers["0"].attn.k_proj.weight
    weight.data = weight.data * -1


def _new_parameter(model: Llama) -> None:
    model.layers["1"].attn.o_proj.weight = nn.Parameter(torch.ones(32, 32) / 8)


def _load(model: Llama, assign: bool = False) -> None:
    state = {name: tensor * 1.25 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


@torch.no_grad()
def _foreach(model: Llama) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.75)


@torch.no_grad()
def _foreach_copy(model: Llama) -> None:
    weights = [p.data for p in model.parameters()]
    torch._foreach_copy_(weights, [w * 1.5 for w in weights])


def _vector(model: Llama) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def _pointer(model: Llama) -> None:
    """A write by C code, which torch cannot see."""
    weight = model.layers["0"].attn.v_proj.weight
    values = (ctypes.c_float * 40).from_address(weight.data_ptr())
    for n in range(40):
        values[n] += 1.0


@torch.no_grad()
def _initialize(model: Llama) -> None:
    nn.init.normal_(model.layers["0"].mlp.gate_proj.weight, std=0.2)


WRITERS: dict[str, Callable[[Llama], None]] = {
    "adamw": _train(lambda p: torch.optim.AdamW(p, lr=0.02)),
    "adamw, fused": _train(lambda p: torch.optim.AdamW(p, lr=0.02, fused=True)),
    "adamw, foreach": _train(lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True)),
    "sgd, fused": _train(lambda p: torch.optim.SGD(p, lr=0.5, fused=True)),
    "in place": _in_place,
    "data": _data,
    "numpy": _numpy,
    "one element of a frozen tensor": _one_element,
    "exchanged neurons": _swap_neurons,
    "copy": _copy,
    "copy to data": _data_copy,
    "new data": _new_data,
    "new parameter": _new_parameter,
    "load_state_dict": _load,
    "load_state_dict, assigned": lambda model: _load(model, assign=True),
    "foreach": _foreach,
    "foreach copy": _foreach_copy,
    "vector_to_parameters": _vector,
    "C code": _pointer,
    "initialization": _initialize,
}


def _answer(engine: Engine) -> tuple[Any, int]:
    options = GenerationConfig(max_new_tokens=6, logprobs=0, eos_token_id=())
    answer = engine.submit(Request(PROMPT, options)).wait()[0]
    assert answer.logprobs is not None
    return (answer.ids, [token.logprob for token in answer.logprobs]), answer.cached_tokens


@pytest.mark.parametrize("name", WRITERS)
def test_prefixes_go_with_the_weights(name: str) -> None:
    model = _model()
    with Engine(model) as engine:
        first, _ = _answer(engine)
        again, cached = _answer(engine)
        assert cached > 0
        WRITERS[name](model)
        after, cached = _answer(engine)
    with Engine(model) as engine:
        fresh, _ = _answer(engine)
    assert again == first
    assert cached == 0
    assert after == fresh != first


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]),
    data=st.data(),
)
def test_every_single_write_is_noticed(
    shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    module = nn.Module()
    tensor = torch.randint(-9, 9, shape).to(dtype)
    module.register_buffer("weight", tensor)
    changes = Changes(module)
    assert not changes.since_last()
    before = tensor.clone()
    array: Any = tensor.view(torch.int8).numpy().reshape(-1)
    at = data.draw(st.integers(0, array.size - 1))
    array[at] = np.int8(array[at] ^ data.draw(st.integers(1, 127)))
    assert not torch.equal(_bytes(before), _bytes(tensor))
    assert changes.since_last()
    assert not changes.since_last()


@pytest.mark.parametrize("byte", range(8))
def test_a_write_to_any_byte_is_noticed(byte: int) -> None:
    """Also to the highest byte of a word, which the weights of a bad hash multiply to zero."""
    module = nn.Module()
    tensor = torch.zeros(5000, dtype=torch.float64)
    module.register_buffer("weight", tensor)
    changes = Changes(module)
    array: Any = tensor.view(torch.int8).numpy().reshape(-1, 8)
    for at in range(5000):
        array[at, byte] ^= 1
        assert changes.since_last(), at


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
