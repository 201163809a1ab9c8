"""Activation offload: the same bits, and copies that come in time (events, not clocks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmforge.memory.activations import apply_activation_offload_
from bmforge.memory.copies import make_copy_engine
from bmforge.memory.recompute import apply_recompute_
from bmforge.models import T5, GPT2Config, Llama, LlamaConfig, T5Config, init_weights_
from bmforge.models.gpt2 import GPT2
from bmforge.parallel import Layout, init_distributed, parallelize
from bmforge.testing import assert_equal_trees, run_distributed

LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=64,
)
MODELS = {
    "llama": (Llama, LLAMA),
    "gpt2": (
        GPT2,
        GPT2Config(vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, max_seq_len=64),
    ),
    "t5": (
        T5,
        T5Config(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64),
    ),
}


def gradients(name: str, *, offloads: bool, recompute: bool = False, keep_last: int = 1) -> Any:
    """Loss and gradients of two micro-batches; with what the copy engine did."""
    family, config = MODELS[name]
    model = init_weights_(family.from_config(config), seed=0)
    blocks = [module for n, module in model.named_modules() if n.split(".")[-2:-1] == ["layers"]]
    engine = make_copy_engine(torch.device("cpu"), records=True)
    if recompute:
        apply_recompute_(blocks)
    if offloads:
        apply_activation_offload_(blocks, engine, keep_last=keep_last, smallest_elements=64)
    ids = torch.randint(0, 64, (2, 2, 24), generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in ids:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.detach())
    found = {n: p.grad for n, p in model.named_parameters()}
    return {**found, "losses": torch.stack(losses)}, engine.events


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_same_bits(name: str, recompute: bool) -> None:
    want, _ = gradients(name, offloads=False, recompute=recompute)
    got, events = gradients(name, offloads=True, recompute=recompute)
    assert_equal_trees(got, want)
    assert any(event.label.startswith("out") for event in events)
    assert any(event.label.startswith("in") for event in events)


def test_copies_come_one_block_ahead() -> None:
    """A block's tensors are asked back before the block behind it waits for its own."""
    _, events = gradients("llama", offloads=True)
    half = len(events) // 2  # the first micro-batch
    place = {(e.kind, e.label): i for i, e in reversed(list(enumerate(events[:half])))}
    for number in (2, 1):
        behind = place["awaited", f"in block {number}, tensor 0"]
        ahead = place["submitted", f"in block {number - 1}, tensor 0"]
        assert ahead < behind
    # The last block's stay; the others' leave before the block after the next one begins.
    assert not any("block 3" in event.label for event in events)
    assert place["awaited", "out block 0, tensor 0"] < place["submitted", "out block 2, tensor 0"]


def test_buffers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second micro-batch takes no new host memory."""
    made: list[int] = []
    kind = type(make_copy_engine(torch.device("cpu")))
    original = kind.new_host
    monkeypatch.setattr(
        kind,
        "new_host",
        lambda self, shape, dtype: (made.append(1), original(self, shape, dtype))[1],
    )
    _, events = gradients("llama", offloads=True)
    sent = sum(event.kind == "submitted" and event.label.startswith("out") for event in events)
    assert sent % 2 == 0
    assert len(made) == sent // 2


def test_evaluation_sends_nothing() -> None:
    model = init_weights_(Llama.from_config(LLAMA), seed=0)
    engine = make_copy_engine(torch.device("cpu"), records=True)
    apply_activation_offload_(list(model.layers.children()), engine, smallest_elements=64)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    assert not engine.events


def test_a_change_in_place_is_found() -> None:
    """Without hooks autograd would tell; here the copy would be of other values."""

    class Spoils(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = x.exp()
            out = kept * 2.0
            kept.mul_(3.0)
            return out

    blocks = [Spoils(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)]
    engine = make_copy_engine(torch.device("cpu"))
    apply_activation_offload_(blocks, engine, smallest_elements=1)
    x = torch.randn(8, 16, requires_grad=True)
    with pytest.raises(AssertionError, match="modified in place"):
        blocks[1](blocks[0](x))


def train(layout: Layout, offloads: bool, recompute: bool) -> Any:
    init_distributed()
    model = Llama.from_config(LLAMA, device="meta")
    parallelize(model, layout, recompute=recompute, offload_activations=offloads)
    init_weights_(model, seed=0)
    ids = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {n: p.grad.to_local() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (Layout(zero=3), False),
        pytest.param(Layout(zero=3), True, marks=pytest.mark.long),
        pytest.param(Layout(zero=2), False, marks=pytest.mark.long),
        pytest.param(Layout(tp=2), False, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_layouts(layout: Layout, recompute: bool) -> None:
    want = run_distributed(train, 2, layout, False, recompute)
    got = run_distributed(train, 2, layout, True, recompute)
    for mine, theirs in zip(got, want, strict=True):
        assert_equal_trees(mine, theirs)
