"""Streaming and offload wait for their copies, whenever the device makes them.

An adversarial copy engine makes every copy at the last moment that its ticket allows, and fills the
target with NaN until then; or at the first moment. On a GPU, code that reads too early is mostly
right by luck. The engine tests the order of the program, not the streams themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.memory import packed
from bmforge.memory.activations import apply_activation_offload_
from bmforge.memory.copies import CopyEngine, CopyHandle
from bmforge.memory.streaming import stream_blocks_
from bmforge.models import Llama, LlamaConfig

LAYERS = 5
IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


class AdversarialTicket(CopyHandle):
    """A ticket whose copy is made when it is waited for."""

    def __init__(self, label: str, note: Any, flush: Callable[[CopyHandle], None]) -> None:
        super().__init__(label, note)
        self._flush = flush

    def wait(self) -> None:
        self._flush(self)
        super().wait()

    def wait_on_host(self) -> None:
        self._flush(self)
        super().wait_on_host()


class AdversarialCopies(CopyEngine):
    """Copies at the last legal moment, or at once; `hazards` lists sources that changed before.

    Args:
        is_late: copy at the last moment.
        waits: make copies when they are waited for; without it a late copy is never made.
    """

    def __init__(self, is_late: bool, waits: bool = True) -> None:
        super().__init__("adversarial")
        self.is_late, self.waits = is_late, waits
        self.hazards: list[str] = []
        self._pending: list[tuple[CopyHandle, Tensor, Tensor, Tensor]] = []
        self._lock = threading.RLock()

    def mark(self) -> None:
        return None

    def new_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    @torch.no_grad()
    def copy_(
        self, target: Tensor, source: Tensor, label: str = "", *, after: torch.Event | None = None
    ) -> CopyHandle:
        ticket = AdversarialTicket(label, self.note, self._flush if self.waits else lambda _: None)
        with self._lock:
            if self.is_late:
                target.fill_(0xFF if target.dtype == torch.uint8 else float("nan"))
                self._pending.append((ticket, target, source, source.clone()))
            else:
                target.copy_(source)
        ticket.finish()
        return ticket

    @torch.no_grad()
    def _flush(self, ticket: CopyHandle) -> None:
        """Make the pending copies up to that of a ticket, in order."""
        with self._lock:
            while any(pending is ticket for pending, *_ in self._pending):
                done, target, source, before = self._pending.pop(0)
                if not torch.equal(_bytes(source), _bytes(before)):
                    self.hazards.append(f"{done.label}: the source changed before the copy")
                target.copy_(source)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def build() -> Llama:
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=64, num_layers=LAYERS, max_seq_len=64, **sizes)
    return Llama.from_config(config, seed=0)


def loss_of(model: Llama) -> Tensor:
    return model(input_ids=IDS).logits.log_softmax(-1)[..., 3].mean()


def input_gradient(model: Llama) -> Tensor:
    """Return the gradient of the loss with respect to an offset of the embeddings."""
    offset = torch.zeros(1, requires_grad=True)
    hook = model.embed.register_forward_hook(lambda module, inputs, out: out + offset)
    loss_of(model).backward()
    hook.remove()
    assert offset.grad is not None
    return offset.grad


def run_streamed(engine: AdversarialCopies, on_host: bool, trains: bool) -> list[Tensor]:
    """Return logits or gradients of three passes of a model whose blocks are streamed."""
    model = build().requires_grad_(False)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    blocks = [f"layers.{number}" for number in range(LAYERS)]
    streamer = stream_blocks_(
        model,
        lambda name, tensor: tensor.copy_(values[name]),
        device=torch.device("cpu"),
        engine=engine,
        on_host=blocks if on_host else (),
    )
    results = []
    for _ in range(3):
        if trains:
            results.append(input_gradient(model))
        else:
            with torch.no_grad():
                results.append(model(input_ids=IDS).logits)
    streamer.close()
    return results


def run_offloaded(engine: AdversarialCopies) -> list[Tensor]:
    """Return the gradients after three backward passes with offloaded activations."""
    model = build()
    apply_activation_offload_(list(model.layers.values()), engine, smallest_elements=1)
    for _ in range(3):
        loss_of(model).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture(autouse=True)
def _slots_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give slots memory on the device in addition to that on the host, as on an accelerator."""
    monkeypatch.setattr(packed, "is_host", lambda device: False)


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "disk"])
@pytest.mark.parametrize("trains", [True, False], ids=["backward", "forward"])
def test_streamed_blocks_are_read_after_their_copies(
    is_late: bool, on_host: bool, trains: bool
) -> None:
    engine = AdversarialCopies(is_late)
    results = run_streamed(engine, on_host, trains)
    plain = build().requires_grad_(False)
    want = input_gradient(plain) if trains else plain(input_ids=IDS).logits
    assert all(torch.equal(result, want) for result in results)
    assert not engine.hazards


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "early"])
def test_offloaded_activations_are_read_after_their_copies(is_late: bool) -> None:
    engine = AdversarialCopies(is_late)
    got = run_offloaded(engine)
    plain = build()
    for _ in range(3):
        loss_of(plain).backward()
    want = [p.grad for p in plain.parameters() if p.grad is not None]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert not engine.hazards


@pytest.mark.parametrize("kind", ["forward", "backward", "offload"])
def test_a_missing_wait_is_seen(kind: str) -> None:
    """Without its waits the same program computes with NaN."""
    engine = AdversarialCopies(is_late=True, waits=False)
    if kind == "offload":
        results = run_offloaded(engine)
    else:
        results = run_streamed(engine, True, kind == "backward")
    assert any(result.isnan().any() for result in results)
