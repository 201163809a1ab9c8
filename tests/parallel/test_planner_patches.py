"""Planning changes nothing of torch, for no thread."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from bmforge.cli.plan_workload import workload_of
from bmforge.models import Llama
from bmforge.models.llama import LlamaConfig
from bmforge.parallel import Layout, shutdown_distributed
from bmforge.parallel.planner.dry_run import dry_run
from bmforge.parallel.planner.trace import Setting, trace_step

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=4, num_heads=4, max_seq_len=32
)
OWNERS = (torch.UntypedStorage, torch.Tensor, DeviceMesh, FSDPModule, DTensor, ShardingPropagator)


def functions() -> dict[str, int]:
    """Identities of the functions of torch's modules and of the classes that planning runs."""
    owners = {f"{o.__module__}.{o.__qualname__}": vars(o) for o in OWNERS}
    modules = {n: vars(m) for n, m in list(sys.modules.items()) if n.startswith("torch.")}
    return {
        f"{owner}.{name}": id(value)
        for owner, values in (owners | modules).items()
        for name, value in list(values.items())
        if callable(value) or isinstance(value, staticmethod)
    }


def seen_elsewhere() -> dict[str, int]:
    found: dict[str, int] = {}
    thread = threading.Thread(target=lambda: found.update(functions()))
    thread.start()
    thread.join()
    return found


def assert_same(before: dict[str, int], now: dict[str, int]) -> None:
    changed = [name for name, value in before.items() if now.get(name) != value]
    assert not changed


def test_a_trace_patches_nothing() -> None:
    shutdown_distributed()
    workload = workload_of("llama", CONFIG, 16)
    seen: list[dict[str, int]] = []

    def run(*args: Any) -> Any:
        loss = workload.run(*args)
        loss.register_hook(lambda _: seen.append(seen_elsewhere()))
        seen.append(functions())
        return loss

    before = functions()
    trace_step(replace(workload, run=run), Setting(Layout(tp=2), 2, 2))
    assert len(seen) == 2
    for now in (*seen, functions()):
        assert_same(before, now)


def test_a_dry_run_patches_nothing() -> None:
    shutdown_distributed()
    seen: list[dict[str, int]] = []

    def build() -> Any:
        seen.append(seen_elsewhere())
        return Llama.from_config(CONFIG, device="meta")

    before = functions()
    dry_run(build, Layout(tp=2, pp=2), 8)
    assert len(seen) == 2
    for now in (*seen, functions()):
        assert_same(before, now)
