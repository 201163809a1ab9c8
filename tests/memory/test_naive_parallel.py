"""Blocks on several devices: what meets is on one, and each device brings its own beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

from bmforge.errors import ConfigError
from bmforge.infer.decoder_factory import start_decoder
from bmforge.memory.copies import make_copy_engine
from bmforge.memory.naive_parallel import spread_blocks_
from bmforge.memory.streaming import stream_blocks_
from bmforge.models import Llama, LlamaConfig, load_weights_, weight_reader
from bmforge.testing.fake_devices import FIRST, SECOND, FakeDevices
from bmforge.tune.delta import Lora

HOST = torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=48,
    num_layers=6, max_seq_len=64,
)  # fmt: skip
NAMES = [f"layers.{number}" for number in range(6)]
PLACES = {name: FIRST if number < 3 else SECOND for number, name in enumerate(NAMES)}
IDS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def test_without_it_devices_mix() -> None:
    """The check of every family would see a tensor that stayed behind."""
    model, fake = Llama.from_config(CONFIG, seed=1), FakeDevices()
    fake.place_(model, FIRST, PLACES)
    with fake, pytest.raises(FakeTensorDeviceMismatchError):
        model(input_ids=fake.move(IDS, FIRST))


def test_beams_of_caches_on_both() -> None:
    """Rows of keys and values change places on each device."""
    model, fake = Llama.from_config(CONFIG, seed=1).eval(), FakeDevices()
    spread_blocks_(model, PLACES, FIRST)
    fake.place_(model, FIRST, PLACES)
    with fake, torch.no_grad():
        decoder, start = start_decoder(model, fake.move(IDS, FIRST), None, 4)
        decoder.run(start)
        decoder.reorder(torch.zeros(4, dtype=torch.int64, device=FIRST))
        scores = decoder.run(torch.zeros(4, 1, dtype=torch.int64, device=FIRST))
        assert scores.shape == (4, 64)
        assert scores.device == FIRST
        pairs = [decoder.cache.held(layer) for layer in range(6)]
        assert [pair[0].device for pair in pairs if pair is not None] == [*PLACES.values()]


@pytest.mark.parametrize("has_grad", [False, True])
def test_rows_of_deltas(has_grad: bool) -> None:
    """Each row has its own delta on whichever device a block is."""
    model, fake = Llama.from_config(CONFIG, seed=1).eval(), FakeDevices()
    for name in ("one", "two"):
        Lora(model, ["attn.q", "mlp.down"], name=name, rank=2)
    spread_blocks_(model, PLACES, FIRST)
    fake.place_(model, FIRST, PLACES)
    for rows in (["one", "two"], ["two", None]):
        with fake, torch.set_grad_enabled(has_grad):
            out = model(input_ids=fake.move(IDS, FIRST), adapter_names=rows).logits
            assert out.device == FIRST
            if has_grad:
                out.sum().backward()


class Adds(nn.Module):
    """A block of a foreign kind: notes what it is given, and returns more than states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.given: list[Any] = []

    def forward(self, x: Tensor, *, beside: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.given.append(beside["mask"])
        return x + self.weight * beside["mask"], x.sum()


def test_what_goes_where() -> None:
    """States stay for the next block, all else goes home; a mask crosses once until it changes."""
    model, fake = nn.ModuleList(Adds() for _ in range(4)), FakeDevices()
    devices = dict(zip("0123", (FIRST, SECOND, SECOND, SECOND), strict=True))
    spread_blocks_(model, devices, FIRST)
    fake.place_(model, FIRST, devices)
    mask, x = (fake.move(torch.ones(4), FIRST) for _ in range(2))
    seen = []
    with fake, torch.no_grad():
        for _ in range(2):
            for block in model:
                x, total = block(x, beside={"mask": mask})
                seen.append(x.device)
                assert total.device == FIRST
            mask.add_(1)
    assert seen == [FIRST, SECOND, SECOND, FIRST] * 2
    first: Any = model[1]
    second: Any = model[2]
    assert first.given[0] is second.given[0]
    assert first.given[1] is second.given[1] is not first.given[0]
    with pytest.raises(ConfigError, match="order_key='device'"):
        spread_blocks_(model, devices, FIRST)


def test_brings_beside_the_other(tmp_path: Path) -> None:
    """While the first device computes its last block, the second one's first two arrive."""
    Llama.from_config(CONFIG, seed=1).save_pretrained(tmp_path)
    model = Llama.from_config(CONFIG, device="meta").eval()
    reader, engines = weight_reader(model, tmp_path), []
    for names in (NAMES[:3], NAMES[3:]):
        engines.append(make_copy_engine(HOST, records=True))
        stream_blocks_(model, reader, device=HOST, blocks=names, engine=engines[-1])
    load_weights_(model, tmp_path)
    spread_blocks_(model, dict.fromkeys(NAMES, HOST), HOST)
    second, before = engines[1], []

    def look(*_: Any) -> None:
        second.run(lambda: None, "look").wait_on_host()  # all that was asked before is done
        before.append(
            [event.label for event in second.events if event.kind in ("done", "computes")]
        )

    model.layers["2"].mlp.register_forward_hook(look)
    with torch.no_grad():
        model(input_ids=IDS)  # here nothing is known of what comes
        model(input_ids=IDS)
    assert before[0] == ["look"]
    ran = before[1].index("block 1")
    assert set(before[1][ran:]) >= {"read block 0", "read block 1"}
