"""One model on several devices: how it is divided, and that nothing else changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bmforge.device import find_devices
from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request
from bmforge.infer.engine import budget
from bmforge.infer.engine.divide import DeviceMemory, divide_blocks
from bmforge.infer.engine.workspace import Workspace
from bmforge.models import T5, Llama, LlamaConfig, Mixtral, MixtralConfig, T5Config
from bmforge.surgery import wrappers_of
from bmforge.testing.changed_models import run_step_of
from bmforge.testing.tolerance import assert_equal_trees
from bmforge.tune.delta import Lora

CONFIG = EngineConfig(max_tokens=16, max_rows=4)
TWO = ["cpu", "cpu"]
SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_heads": 4}
IDS = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(0))


def make(kind: str) -> Any:
    if kind == "llama":
        config = LlamaConfig(**SIZES, intermediate_size=64, num_layers=12, max_seq_len=64)
        return Llama.from_config(config, seed=1).eval()
    return T5.from_config(T5Config(**SIZES, intermediate_size=64, num_layers=8), seed=1).eval()


def enough(source: Any, **options: Any) -> int:
    with pytest.raises(ConfigError, match="on every device is enough") as caught:
        Engine(source, device_budget_bytes=1, devices=TWO, config=CONFIG, **options)
    return int(str(caught.value).split("too small: ")[1].split()[0])


def names_of(engine: Engine) -> list[list[str]]:
    return [[*plan.resident, *plan.moving] for plan in engine.plan.each()]


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("from_memory", [False, True])
def test_blocks_that_move_on_both(kind: str, from_memory: bool, tmp_path: Path) -> None:
    """Under the budget that is said to be enough both devices have blocks that come and go."""
    model = make(kind)
    model.save_pretrained(tmp_path)
    source = copy.deepcopy(model) if from_memory else tmp_path
    batch = {"input_ids": IDS, "labels": IDS}
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 2}
    with Engine(copy.deepcopy(model), config=CONFIG) as plain:
        want = plain.generate(IDS, **options), run_step_of(plain.model, batch)
    budget = enough(source)
    with Engine(source, device_budget_bytes=budget, devices=TWO, config=CONFIG) as engine:
        for plan in engine.plan.each():
            assert plan.moving
            assert plan.used_bytes <= budget
        assert torch.equal(engine.generate(IDS, **options), want[0])
        if from_memory:
            assert_equal_trees(run_step_of(engine.model, batch), want[1])


class Stacked(nn.Module):
    """Blocks of given numbers of bytes behind a table."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(10, 64, dtype=torch.uint8), requires_grad=False)
        self.blocks = nn.ModuleList()
        for size in sizes:
            block = nn.Module()
            weight = torch.zeros(size // 64, 64, dtype=torch.uint8)
            block.weight = nn.Parameter(weight, requires_grad=False)
            self.blocks.append(block)


def divide(sizes: list[int], rooms: list[int], cache: int = 0) -> list[tuple[int, int]] | int:
    """Return how many blocks stay and move on each device, or the budget that is enough."""
    model = Stacked(sizes)
    blocks = {f"blocks.{n}": block for n, block in enumerate(model.blocks)}
    devices, order = [DeviceMemory(torch.device("cpu"), room, 64) for room in rooms], list(blocks)
    found = divide_blocks(model, blocks, devices, None, Workspace(cache, 128))
    if found.plan is None:
        return found.smallest_bytes
    found_order = [
        n
        for plan in found.plan.each()
        for n in sorted((*plan.resident, *plan.moving), key=order.index)
    ]
    assert found_order == order
    for plan, room in zip(found.plan.each(), rooms, strict=False):
        assert plan.used_bytes <= room
    return [(len(plan.resident), len(plan.moving)) for plan in found.plan.each()]


def test_how_blocks_are_divided() -> None:
    step, table, one = 192, 640, 640  # a step's with what a process needs
    # All fit: the first is filled, and what is not needed has nothing.
    assert divide([one] * 4, [step + table + 4 * one, 10_000]) == [(4, 0)]
    assert divide([one] * 4, [step + table + 3 * one, 10_000]) == [(3, 0), (1, 0)]
    assert divide([one] * 4, [step + table, step + 2 * one, step + 2 * one]) == [
        (0, 0),
        (2, 0),
        (2, 0),
    ]
    # Not all fit: as much of them as there is room, on both.
    assert divide([one] * 12, [step + table + 4 * one, step + 4 * one]) == [(2, 4), (2, 4)]
    assert divide([one] * 12, [step + table + 3 * one, step + 6 * one]) == [(1, 3), (4, 4)]
    # A device without room for two slots is left out, wherever it stands.
    assert divide([one] * 12, [step + table + 6 * one, step + one + 9]) == [(4, 8)]
    assert divide([one] * 12, [step + table + one + 9, step + 6 * one]) == [(0, 0), (4, 8)]
    assert divide([one] * 12, [step + table + one, step + 6 * one, step]) == [(0, 0), (4, 8)]
    # Keys and values are where their blocks are.
    assert divide([one] * 4, [step + table + 4 * one, 10_000], cache=4 * one) == [(2, 0), (2, 0)]
    assert divide([one] * 4, [step + table + 8 * one, 10_000], cache=4 * one) == [(4, 0)]


@pytest.mark.parametrize("sizes", [[640] * 9, [640, 1280, 640, 3200, 640, 640], [64] * 30])
@pytest.mark.parametrize("count", [2, 3])
def test_what_is_enough_is(sizes: list[int], count: int) -> None:
    """So much on every device works, and so does more."""
    least = divide(sizes, [1] * count, cache=512)
    assert isinstance(least, int)
    for more in range(0, sum(sizes), 64):
        assert isinstance(divide(sizes, [least + more] * count, cache=512), list)


def test_shared_weights_stay_together() -> None:
    """Blocks that have a tensor in common are on the first device, wherever they stand."""
    model = Stacked([640] * 6)
    model.blocks[5].weight = model.blocks[0].weight
    blocks = {f"blocks.{n}": block for n, block in enumerate(model.blocks)}
    rooms = [DeviceMemory(torch.device("cpu"), room) for room in (640 * 4, 640 * 3)]
    plan = divide_blocks(model, blocks, rooms, None, Workspace(0, 0)).plan
    assert plan is not None
    assert list(plan.elsewhere) == ["blocks.3", "blocks.4"]


@pytest.mark.parametrize(
    ("cpu", "given", "waiting"),
    [
        (640 * 2, 1024 * 3, 3),  # as asked; page-locked memory is rounded to powers of two
        (640 * 2, None, 0),  # the CPU's own blocks and slots take all of its room
        (1024, None, 1),  # it has none of its own
    ],
)
def test_where_moving_blocks_wait(cpu: int, given: int | None, waiting: int) -> None:
    """Host memory is counted once where the CPU computes, too."""
    model = Stacked([640] * 12)
    blocks = {f"blocks.{n}": block for n, block in enumerate(model.blocks)}
    places = (torch.device("lazy", 0), 640 * 5), (torch.device("cpu"), cpu)
    rooms = [DeviceMemory(device, size) for device, size in places]
    plan = divide_blocks(model, blocks, rooms, given, Workspace(0, 0)).plan
    assert plan is not None
    assert len(plan.moving) > waiting
    assert len(plan.on_host) == waiting
    assert not any(other.on_host for other in plan.others)


def need(model: Any) -> int:
    """Return what the whole model takes on one device."""
    with Engine(copy.deepcopy(model), config=CONFIG) as engine:
        return engine.plan.used_bytes


def test_opened_again() -> None:
    """A module that was divided is a plain one after it, and can be divided another time."""
    model = make("llama")
    want, budget = model(input_ids=IDS).logits, need(model) - 1
    for _ in range(2):
        with Engine(model, devices=TWO, device_budget_bytes=budget, config=CONFIG) as engine:
            assert engine.plan.others
            assert not engine.plan.moved_bytes
        assert not wrappers_of(model.layers["11"])
        assert torch.equal(model(input_ids=IDS).logits, want)


def test_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free is divided: a full device has room for what was planned, and no more."""
    model = make("llama")
    free = 2 * need(model) - 2
    monkeypatch.setattr(budget, "available_host_bytes", lambda: free)
    with Engine(model, devices=TWO, config=CONFIG) as engine:
        assert engine.plan.others
        engine.generate(IDS, max_new_tokens=2)
        with pytest.raises(ConfigError, match="max_rows=4"):
            engine.generate(IDS.repeat(3, 1), max_new_tokens=2)
    free = 9000
    with pytest.raises(ConfigError, match=r"the free memory \(.* on cpu, .* on cpu\) is too small"):
        Engine(model, devices=TWO, config=CONFIG)


def test_a_module_of_transformers() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=16, n_embd=32, n_head=4, vocab_size=96, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_beams": 2}
    want = model.generate(IDS, **options)
    budget = enough(model)
    with Engine(model, device_budget_bytes=budget, devices=TWO, config=CONFIG) as engine:
        assert all(plan.moving for plan in engine.plan.each())
        assert torch.equal(engine.model.generate(IDS, **options), want)


def test_requests_and_deltas() -> None:
    """Requests run beside each other, packed and with a delta, and have the plain engine's ids."""
    model = make("llama")
    delta = Lora(model, ["attn.q", "mlp.down"], name="style", rank=2)
    with torch.no_grad():
        for tensor in delta.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
    options = GenerationConfig(max_new_tokens=6, eos_token_id=())
    requests = [Request(IDS[0].tolist(), options, delta=name) for name in ("style", (), "style")]
    with Engine(copy.deepcopy(model), config=CONFIG) as plain:
        want = [plain.submit(request).wait(60)[0].ids for request in requests]
    assert want[0] != want[1]
    budget = enough(model)
    with Engine(model, device_budget_bytes=budget, devices=TWO, config=CONFIG) as engine:
        handles = [engine.submit(request) for request in requests]
        assert [handle.wait(60)[0].ids for handle in handles] == want


def test_quantised_as_it_is_opened(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    with Engine(tmp_path, quantize="int8", config=CONFIG) as plain:
        want = plain.generate(IDS, max_new_tokens=6)
    budget = enough(tmp_path, quantize="int8")
    options: dict[str, Any] = {"quantize": "int8", "devices": TWO, "config": CONFIG}
    with Engine(tmp_path, device_budget_bytes=budget, **options) as engine:
        assert all(names_of(engine))
        assert torch.equal(engine.generate(IDS, max_new_tokens=6), want)


def test_what_is_refused(tmp_path: Path) -> None:
    for named, said in (
        ([], "at least one"),
        ("cpu", "must be a list"),
        (torch.device("cpu"), "must be a list"),
        ([None], "devices=None"),
        ([1.5], "devices=1.5"),
        ([True], "devices=True"),
        (["nothing:0"], "unknown device"),
        (["cpu", 99], "accelerator"),
        (["mps:3"], "does not exist"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_devices(named)  # type: ignore[arg-type]
    assert find_devices(["cpu:0", "cpu"]) == (torch.device("cpu"),) * 2
    config = MixtralConfig(
        **SIZES,
        intermediate_size=64,
        num_layers=2,
        num_kv_heads=2,
        num_experts=4,
        experts_per_token=2,
    )
    Mixtral.from_config(config, seed=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="supports a single device"):
        Engine(tmp_path, devices=TWO, config=EngineConfig(stream_experts=True, max_tokens=32))
    with pytest.raises(ConfigError, match="more than the machine's memory"):
        Engine(tmp_path, devices=["cpu"] * 99, device_budget_bytes=1 << 33, config=CONFIG)


def test_a_block_that_somebody_else_replaced() -> None:
    """Closing says so, and takes what it put there off all the others."""
    model = make("llama")
    with Engine(copy.deepcopy(model), config=CONFIG) as engine:
        need = engine.plan.used_bytes
    divided = Engine(model, device_budget_bytes=need - 1, devices=TWO, config=CONFIG)
    assert all(wrappers_of(block) for block in model.layers.values())
    model.layers["3"].forward = lambda *args, **options: None
    with pytest.raises(ConfigError, match="forward of a Block was replaced"):
        divided.close()
    assert not any(wrappers_of(block) for name, block in model.layers.items() if name != "3")
