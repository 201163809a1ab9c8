"""BMInf's wrapper and its two parts: the bits of the plain model within one limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import bminf_programs as programs
import pytest
import torch
import transformers
from torch import Tensor, nn

import bmforge.compat.bminf as bminf
from bmforge.compat.bminf.wrap import find_blocks
from bmforge.errors import ConfigError
from bmforge.models import Llama, LlamaConfig
from bmforge.records import find_parallel_record
from bmforge.surgery import find_repeated_blocks
from bmforge.testing import assert_close

IDS = torch.tensor([[5, 6, 7, 8]])


def bytes_of(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    return sum(t.numel() * t.element_size() for t in tensors)


def bytes_here(model: nn.Module) -> int:
    """What weights, buffers and slots take now, each storage once."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        record = find_parallel_record(module)
        for streamer in () if record is None else record.streamers:
            tensors += [slot.memory for slot in streamer._slots]
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(stores.values())


def least(make: Callable[[], nn.Module]) -> int:
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        bminf.wrapper(make(), quantization=False, memory_limit=1)
    found = re.search(r"too small: (\d+)", str(caught.value))
    assert found is not None
    return int(found[1])


def gptj() -> Any:
    torch.manual_seed(0)
    config = transformers.GPTJConfig(
        n_layer=6, n_embd=32, n_head=4, rotary_dim=4, vocab_size=90, n_positions=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=89,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).eval()


class Twice(nn.Module):
    """Another block."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * 2


class Unlike(nn.Module):
    """Lists in lists, blocks of several widths, a list of one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pair = lambda: nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])  # noqa: E731
        self.nested = nn.ModuleList([pair(), pair(), pair()])
        self.mixed = nn.ModuleList([nn.Linear(16, 64), Twice()])
        self.single = nn.ModuleList([nn.Linear(16, 8)])
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.nested:
            for block in inner:  # type: ignore[attr-defined]
                x = block(x + self.shift)
        out: Tensor = self.single[0](self.mixed[1](self.mixed[0](x)))
        return out


def answer(model: Any) -> list[Tensor]:
    with torch.no_grad():
        if isinstance(model, Unlike):
            return [model(torch.randn(3, 16, generator=torch.Generator().manual_seed(1)))]
        if isinstance(model, transformers.BertForMaskedLM):
            return [model(input_ids=IDS).logits]
        options = {"max_new_tokens": 6, "eos_token_id": 95, "pad_token_id": 0}
        return [
            model.generate(IDS, do_sample=False, **options),
            model.generate(IDS, do_sample=False, num_beams=2, **options),
        ]


@pytest.mark.parametrize("make", [gptj, t5, bert, Unlike])
def test_one_limit_and_the_same_bits(make: Callable[[], Any]) -> None:
    """From the smallest limit on to one with which everything stays."""
    plain = make()
    want, whole, low = answer(plain), bytes_of(plain), least(make)
    assert low < whole
    counts = []
    for limit in (low, (low + whole) // 2, 2 * whole):
        model = bminf.wrapper(make(), quantization=False, memory_limit=limit)
        assert bytes_here(model) <= limit + 64 * len(list(model.parameters()))
        for got, expected in zip(answer(model), want, strict=True):
            assert torch.equal(got, expected)
        record = find_parallel_record(model)
        counts.append(sum(len(one.blocks) for one in record.streamers) if record else 0)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    assert counts[-1] == 0


def test_lists_are_callable_and_frozen() -> None:
    model = bminf.wrapper(gptj(), quantization=False)
    blocks = model.transformer.h
    assert isinstance(blocks, bminf.TransformerBlockList)
    assert not any(p.requires_grad for p in blocks.parameters())
    assert model.transformer.wte.weight.requires_grad
    assert len(find_blocks(Unlike())) == 6 + 2 + 1
    assert list(find_repeated_blocks(Unlike())) == [
        f"nested.{i}.{j}" for i in range(3) for j in (0, 1)
    ]


def test_the_notebook() -> None:
    """It draws what the plain model draws."""
    plain = gptj()
    torch.manual_seed(3)
    want = plain.generate(IDS, do_sample=True, temperature=0.9, max_length=20)
    limit = (least(gptj) + bytes_of(gptj())) // 2
    model = gptj()
    torch.manual_seed(3)
    assert torch.equal(programs.generate_in_little(model, limit, IDS), want)


def test_layers_become_int8() -> None:
    """All of them, within a limit; the result is near the plain one's."""
    for make in (gptj, t5, bert, Unlike):
        plain, found = make(), []
        for limit in (None, 0.8 * bytes_of(plain)):
            model = bminf.wrapper(make(), memory_limit=limit)
            kinds = [type(m).__name__ for m in model.modules()]
            assert "Linear" not in kinds
            assert kinds.count("QuantizedLinear") >= 9
            found.append(logits_of(model))
        assert torch.equal(found[0], found[1])
        want = logits_of(plain)
        assert (found[0] - want).norm() < 0.05 * want.norm()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        if isinstance(model, Unlike):
            return answer(model)[0]
        more = {"decoder_input_ids": IDS} if hasattr(model, "decoder") else {}
        out: Tensor = model(input_ids=IDS, **more).logits
        return out


def test_a_model_of_ours() -> None:
    """It remembers that it is quantised."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=4
    )
    model = bminf.wrapper(Llama.from_config(config, seed=1).eval())
    assert [change.kind for change in model.config.changes] == ["quantize"]
    with pytest.raises(ConfigError, match="already quantized"):
        bminf.wrapper(model)


def test_layers_that_cannot_be_int8_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"not quantized: 0 \(the input size 6"):
        bminf.wrapper(model)
    assert type(model[0]) is nn.Linear
    assert isinstance(model[1], bminf.QuantizedLinear)
    with pytest.warns(UserWarning, match="has no linear layers"):
        bminf.wrapper(nn.Embedding(3, 4))
    assert isinstance(bminf.wrapper(nn.Linear(8, 4)), bminf.QuantizedLinear)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 5, 8)])
def test_int8_rows_and_tokens(shape: tuple[int, ...]) -> None:
    """BMInf's formula in float64; the gradient is the dequantised weight's."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 5)
    layer = bminf.QuantizedLinear(linear)
    weight = linear.weight.detach()
    scale = weight.abs().amax(1) / 127
    rows = (weight / scale[:, None]).round()
    assert torch.equal(layer.weight_quant, rows.to(torch.int8))
    assert torch.equal(layer.weight_scale, scale)
    x = torch.randn(shape, requires_grad=True)
    got = layer(x)
    of_token = x.detach().double().abs().amax(-1, keepdim=True) / 127
    tokens = (x.detach().double() / of_token).round()
    want = tokens @ rows.double().t() * of_token * scale.double() + linear.bias.double()
    assert_close(got, want.float(), rtol=1e-5, atol=1e-6)
    got.square().sum().backward()
    assert x.grad is not None
    assert_close(x.grad, (2 * got.detach()) @ (rows * scale[:, None]), rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor, mask: Tensor, factor: float = 1.0) -> Tensor:
        return x + factor * self.down(self.up(x).tanh()) * mask


def make_blocks() -> list[Block]:
    torch.manual_seed(0)
    return [Block(width) for width in (32, 32, 48, 32, 16, 32, 32, 32)]


@pytest.mark.parametrize("shares", [1, 3])
def test_a_list_alone(shares: int) -> None:
    """Calling, iterating and gradients to all that goes in, with the bits of the plain blocks."""
    x = torch.randn(4, 16, requires_grad=True)
    mask = torch.rand(4, 16, requires_grad=True)
    plain = make_blocks()
    want = x
    for block in plain:
        want = block(want, mask, factor=0.5)
    wanted = torch.autograd.grad(want.square().sum(), (x, mask))
    size = bytes_of(plain[2])
    layers = bminf.TransformerBlockList(make_blocks(), [(0, int(2.3 * size))] * shares)
    assert bytes_here(layers) < sum(map(bytes_of, plain))
    got = layers(x, mask, factor=0.5)
    assert torch.equal(got, want)
    for one, other in zip(torch.autograd.grad(got.square().sum(), (x, mask)), wanted, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        y = x
        for block in layers:
            y = block(y, mask, factor=0.5)
        assert torch.equal(y, want)
        assert torch.equal(layers[0](x, mask), plain[0](x, mask))
    assert len(layers) == 8
    assert len(layers[2:5]) == 3


def test_lists_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no blocks"):
        bminf.TransformerBlockList([], [0])
    with pytest.raises(ConfigError, match="is the smallest that works"):
        bminf.TransformerBlockList(make_blocks(), [(0, 100)])
    assert len(bminf.TransformerBlockList(make_blocks(), [0])) == 8
