"""Steps on a simulated accelerator; `test_accelerator_usage.py` runs this in a process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.compress import quantize
from bmforge.infer import generate
from bmforge.infer.engine.batch_choice import Draw, choose_batch
from bmforge.infer.engine.packed_step import PackedStep
from bmforge.infer.engine.step_tables import StepRow
from bmforge.infer.options import GenerationConfig
from bmforge.models import Llama, LlamaConfig
from bmforge.nn.attention import Attention
from bmforge.nn.mlp import MLP
from bmforge.nn.packed_linear import QuantizedLinear
from bmforge.testing.fake_accelerator import FakeAccelerator

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
    "intermediate_size": 128, "max_seq_len": 128,
}  # fmt: skip
KINDS = ("fp32", "bf16", "int4", "int8")
# Kernels of a decoding step in each layer; they may only fall.
MOST_KERNELS = {"fp32": 14, "bf16": 14, "int4": 12, "int8": 12}
MOST_OUTSIDE = 21


@pytest.fixture(scope="module")
def accelerator() -> FakeAccelerator:
    return FakeAccelerator()


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the paths of devices with Triton; torch then computes what its kernels would."""
    monkeypatch.setattr("bmforge.nn.packed_linear.load_triton", lambda _: True)


def build(kind: str, layers: int = 2) -> Llama:
    model = Llama.from_config(LlamaConfig(**SIZES, num_layers=layers), seed=1).eval()
    if kind.startswith("int"):
        return quantize(model, kind)
    return model.to(torch.bfloat16) if kind == "bf16" else model


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 90, (3 + n % 30,), generator=generator).tolist() for n in range(count)]


def spoil_pages(step: PackedStep) -> None:
    """Fill the cache with NaN: places that were never written must not count."""
    for number, layer in enumerate(step.model.layers.values()):
        attention: Any = layer.attn
        pair = step.cache.hold(number, 2, attention.head_dim)
        for memory in step.cache.scales(number) or pair:
            memory.fill_(float("nan"))


def decode(step: PackedStep, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Read all but the last token of each text, then return the logits of a decoding step."""
    pages = [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(len(texts))]
    spoil_pages(step)
    first = [StepRow(own, 0, len(t) - 1) for own, t in zip(pages, texts, strict=True)]
    step.run(first, [t[:-1] for t in texts], [1] * len(texts))
    usage: Any = getattr(step.model, "usage", None)
    if usage is not None:
        usage.clear()
    last = [StepRow(own, len(t) - 1, len(t)) for own, t in zip(pages, texts, strict=True)]
    return step.run(last, [t[-1:] for t in texts], [1] * len(texts))


def decode_on(
    accelerator: FakeAccelerator, model: Llama, texts: Sequence[Sequence[int]], cache: Any = None
) -> list[Tensor]:
    """`decode` with a copy of a model on the accelerator; only the last step is counted."""
    there: Any = accelerator.send_model_(copy.deepcopy(model))
    there.usage = accelerator.usage
    with accelerator, torch.no_grad():
        step = PackedStep(there, 3 * len(texts), cache)
        step.cut()
        return decode(step, texts)


@pytest.mark.parametrize("cache", [None, torch.int8], ids=["cache", "int8 cache"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoding_step_has_the_logits_of_the_host(
    accelerator: FakeAccelerator, kind: str, cache: Any
) -> None:
    model, texts = build(kind), prompts(4)
    with torch.no_grad():
        step = PackedStep(model, 12, cache)
        step.cut()
        want = decode(step, texts)
    got = decode_on(accelerator, model, texts, cache)
    limit = 2e-5 if kind == "fp32" else 5e-2  # rounding of activations to int8 amplifies
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left.host, right, rtol=limit, atol=limit)


class DoubledMLP(MLP):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x * 2)


class DoubledAttention(Attention):
    def forward(self, x: Any, *others: Any) -> Tensor:
        return super().forward(x * 2, *others)


def test_sublayers_with_their_own_forward_get_tensors(accelerator: FakeAccelerator) -> None:
    """A subclass computes with hidden states, which it could not if they were quantized."""
    model, texts = build("int4"), prompts(4)
    for layer in model.layers.values():
        layer.attn.__class__, layer.mlp.__class__ = DoubledAttention, DoubledMLP
    with torch.no_grad():
        step = PackedStep(model, 12)
        step.cut()
        want = decode(step, texts)
    for left, right in zip(decode_on(accelerator, model, texts), want, strict=True):
        torch.testing.assert_close(left.host, right, rtol=5e-2, atol=5e-2)


def test_hooks_on_all_modules_see_every_projection(accelerator: FakeAccelerator) -> None:
    seen: list[int] = []

    def count(module: Any, *_: Any) -> None:
        seen.append(type(module) is QuantizedLinear)

    handle = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        decode_on(accelerator, build("int4"), prompts(1))
    finally:
        handle.remove()
    assert sum(seen) == 2 * 2 * 7  # two steps, two layers


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_waits_of_a_step_are_constant(accelerator: FakeAccelerator, kind: str) -> None:
    """One pinned copy, whatever rows and layers; nothing waits."""
    kernels = {}
    for layers, rows in ((2, 1), (2, 16), (4, 16)):
        decode_on(accelerator, build(kind, layers), prompts(rows))
        usage = accelerator.usage
        assert sum(usage.pinned.values()) == 1, usage.pinned
        assert not usage.pageable, usage.pageable
        assert not usage.waits, usage.waits
        kernels[layers, rows] = sum(usage.kernels.values())
    assert kernels[2, 1] == kernels[2, 16]
    by_layer = (kernels[4, 16] - kernels[2, 16]) / 2
    assert by_layer <= MOST_KERNELS[kind]
    assert kernels[2, 16] - 2 * by_layer <= MOST_OUTSIDE


def decode_beside_a_prompt(step: PackedStep, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Read the first text while the others, already read, get their next token."""
    pages = [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(len(texts))]
    spoil_pages(step)
    others = list(zip(pages, texts, strict=True))[1:]
    step.run([StepRow(p, 0, len(t) - 1) for p, t in others], [t[:-1] for _, t in others],
             [1] * len(others))  # fmt: skip
    usage: Any = getattr(step.model, "usage", None)
    if usage is not None:
        usage.clear()
    rows = [StepRow(p, len(t) - 1, len(t)) for p, t in others]
    rows.insert(1, StepRow(pages[0], 0, len(texts[0])))
    tokens = [t[-1:] for _, t in others]
    tokens.insert(1, texts[0])
    return step.run(rows, tokens, [1] * len(rows))


def test_tokens_beside_a_prompt_share_their_kernels(accelerator: FakeAccelerator) -> None:
    model = build("fp32")
    kernels = []
    for count in (3, 9):
        texts = [list(range(5, 45)), *prompts(count)]
        steps = []
        for each in (model, accelerator.send_model_(copy.deepcopy(model))):
            each.usage = accelerator.usage
            with accelerator, torch.no_grad():
                step = PackedStep(each, 3 * len(texts))
                step.cut()
                steps.append(decode_beside_a_prompt(step, texts))
        for want, got in zip(*steps, strict=True):
            torch.testing.assert_close(got.host, want, rtol=2e-5, atol=2e-5)
        kernels.append(sum(accelerator.usage.kernels.values()))
        assert not accelerator.usage.waits
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20},
     {"do_sample": True, "min_p": 0.1, "logprobs": 0}],
    ids=str,
)  # fmt: skip
def test_tokens_of_all_rows_are_chosen_with_one_wait(
    accelerator: FakeAccelerator, options: dict[str, Any], rows: int
) -> None:
    config = GenerationConfig(**options)
    scores = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1))
    numbers = torch.rand(rows, generator=torch.Generator().manual_seed(2)).tolist()

    def draws(logits: Tensor) -> list[Draw]:
        return [Draw(config, n, row) for n, row in zip(numbers, logits, strict=True)]

    want = choose_batch(draws(scores))
    accelerator.usage.clear()
    with accelerator, torch.no_grad():
        got = choose_batch(draws(accelerator.send(scores)))
    usage = accelerator.usage
    assert got == want
    assert sum(usage.waits.values()) == 1, usage.waits
    assert not usage.pageable, usage.pageable
    assert sum(usage.pinned.values()) == bool(config.do_sample), usage.pinned


@pytest.mark.parametrize("kind", KINDS)
def test_generated_text_is_that_of_the_host(accelerator: FakeAccelerator, kind: str) -> None:
    model = build(kind)
    ids = torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    want = generate(model, ids, max_new_tokens=4)
    there = accelerator.send_model_(model)
    with accelerator, torch.no_grad():
        got: Any = generate(there, accelerator.send(ids), max_new_tokens=4)
    assert torch.equal(got.host, want)


def test_mixing_the_host_and_the_accelerator_is_an_error(accelerator: FakeAccelerator) -> None:
    with accelerator, pytest.raises(RuntimeError, match="on different devices"):
        accelerator.send(torch.ones(2)) + torch.ones(2)


def test_waits_and_copies_are_counted(accelerator: FakeAccelerator) -> None:
    accelerator.usage.clear()
    with accelerator:
        x = torch.ones(3).to(accelerator.device)
        y = torch.ones(3).pin_memory().to(accelerator.device, non_blocking=True)
        total = float((x + y).sum())
    assert total == 6
    usage = accelerator.usage
    counts = [sum(c.values()) for c in (usage.pageable, usage.pinned, usage.waits, usage.kernels)]
    assert counts[:3] == [1, 1, 1]
    assert usage.kernels["add"] == usage.kernels["sum"] == 1
