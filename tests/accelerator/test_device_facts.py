"""What a process reads about an accelerator: half precision, free memory, its process group."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge import device
from bmforge.infer.engine.divide import DeviceMemory, divide_blocks
from bmforge.infer.engine.workspace import Workspace
from bmforge.memory.copies import staging_bytes
from bmforge.models import Llama, LlamaConfig
from bmforge.parallel import distributed

CARD = torch.device("cuda", 1)
GIB = 1 << 30


def install(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Replace torch's module of the accelerator."""
    card = SimpleNamespace(**functions)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: card)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0), (12, 0)])
def test_bf16_is_fast_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    install(monkeypatch, is_bf16_supported=is_bf16_supported)
    expected = dtype != torch.bfloat16 or capability[0] >= 8
    assert device.has_fast_half(CARD, dtype) is expected


@settings(max_examples=50, deadline=None)
@given(
    total=st.integers(4, 96),
    others=st.floats(0, 1),
    own=st.floats(0, 1),
    peak=st.floats(1, 2),
    share=st.sampled_from([1.0, 0.5]),
)
def test_room_is_what_no_process_uses(
    total: int, others: float, own: float, peak: float, share: float
) -> None:
    """No process can get more than is free now, nor more than its limit."""
    others_bytes = int(others * total * GIB)
    own_bytes = int(own * (total * GIB - others_bytes))
    peak_bytes = min(int(peak * own_bytes), total * GIB)
    free_bytes = total * GIB - others_bytes - own_bytes
    with pytest.MonkeyPatch.context() as patch:
        install(
            patch,
            mem_get_info=lambda device: (free_bytes, total * GIB),
            max_memory_reserved=lambda device: peak_bytes,
            memory_reserved=lambda device: own_bytes,
            get_per_process_memory_fraction=lambda device: share,
        )
        room = device.memory_room_bytes(CARD)
    assert room + peak_bytes <= min(share * total * GIB, total * GIB - others_bytes)
    if not others_bytes and share == 1:
        assert room == int(0.97 * total * GIB) - peak_bytes


def test_a_full_card_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A desktop's programs hold 22 of 24 GiB."""
    install(
        monkeypatch,
        mem_get_info=lambda device: (2 * GIB, 24 * GIB),
        max_memory_reserved=lambda device: 0,
    )
    assert device.memory_room_bytes(CARD) == int(0.97 * 2 * GIB)


@pytest.mark.parametrize("is_launched", [False, True])
@pytest.mark.parametrize("name", ["cuda:1", "cpu"])
def test_process_groups_know_their_device(
    monkeypatch: pytest.MonkeyPatch, name: str, is_launched: bool
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: calls.append(options))
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **options: dist.HashStore())
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for key, value in names.items():
        if is_launched:
            monkeypatch.setenv(key, value)
        else:
            monkeypatch.delenv(key, raising=False)
    distributed._join(torch.device(name), timedelta(seconds=1))
    assert calls[0]["device_id"] == (None if name == "cpu" else torch.device(name))


def test_staging_memory_is_a_power_of_two() -> None:
    """As torch's allocator of page-locked memory rounds; the CPU's does not."""
    assert [staging_bytes(n, CARD) for n in (0, 1, 64, 65, 634_000_000)] == [0, 1, 64, 128, GIB]
    assert staging_bytes(634_000_000, torch.device("cpu")) == 634_000_000


@pytest.mark.parametrize("blocks_kept", [0, 1, 3])
def test_plans_count_the_rounding_of_staging_memory(blocks_kept: int) -> None:
    sizes = {"hidden_size": 96, "num_heads": 4, "intermediate_size": 200, "vocab_size": 64}
    model = Llama.from_config(LlamaConfig(**sizes, num_layers=4, max_seq_len=64), device="meta")
    blocks = {f"layers.{n}": model.layers[str(n)] for n in range(4)}
    work = Workspace(cache_bytes=0, step_bytes=0)

    def kept(budget: int) -> int:
        room = DeviceMemory(CARD, 2**20)
        plan = divide_blocks(model, blocks, [room], budget, work).plan
        assert plan is not None
        assert len(plan.moving) == 4
        return len(plan.on_host)

    matrices = [p for p in model.layers["0"].parameters() if p.dim() > 1]
    rounded = 1 << (sum(p.numel() * 4 for p in matrices) - 1).bit_length()
    assert kept(blocks_kept * rounded) == blocks_kept
    assert kept((blocks_kept + 1) * rounded - 1) == blocks_kept
