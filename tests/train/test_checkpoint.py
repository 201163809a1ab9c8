"""Saving and loading on one process: everything comes back bit for bit."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from bmforge.errors import CheckpointError
from bmforge.train.checkpoint import rng as checkpoint_rng
from bmforge.train.checkpoint.checkpointer import (
    Checkpointer,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

Build = Callable[[nn.Module], list[Optimizer]]


class TiedModel(nn.Module):
    """An embedding tied to the head, a buffer that is saved and one that is not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += ids.numel()
        return self.head(self.norm(self.body(self.embed(ids))))


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2, fused=True)]


def adamw_tensor_lr(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)]


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=1e-2, momentum=0.9)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    rest = [p for name, p in model.named_parameters() if name != "body.weight"]
    return [Muon([model.body.weight], lr=1e-2), AdamW(rest, lr=1e-2, betas=(0.8, 0.9))]


def train(model: nn.Module, optimizers: list[Optimizer], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 11, (2, 5))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def contents(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Everything a checkpoint must restore, read by torch's own state_dict."""
    return {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizers": [
            {
                (i, key): value.clone() if isinstance(value, torch.Tensor) else value
                for i, values in optimizer.state_dict()["state"].items()
                for key, value in values.items()
            }
            for optimizer in optimizers
        ],
    }


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


@pytest.mark.parametrize("build", [adamw, adamw_tensor_lr, sgd, muon_and_adamw])
def test_resume_equals_unbroken_run(build: Build, tmp_path: Path) -> None:
    model = TiedModel(0)
    optimizers = build(model)
    train(model, optimizers, 3)
    optimizers[0].param_groups[0]["weight_decay"] = 0.125
    saved = contents(model, optimizers)
    state = {"loader": {"sample": 12}, "scale": 65536.0, "nested": [1, None, "x", 0.1]}
    save_checkpoint(tmp_path, model, optimizers, step=3, state=state)
    expected = train(model, optimizers, 4)

    other = TiedModel(1)
    others = build(other)
    assert load_checkpoint(tmp_path, other, others) == state
    assert_same(contents(other, others), saved)
    assert other.head.weight is other.embed.weight
    assert others[0].param_groups[0]["weight_decay"] == 0.125
    assert isinstance(others[-1].param_groups[0].get("betas", ()), tuple)
    assert train(other, others, 4) == expected
    assert_same(contents(other, others), contents(model, optimizers))


def test_fresh_state_replaces_what_the_optimizer_had(tmp_path: Path) -> None:
    model = TiedModel(0)
    optimizers = sgd(model)
    save_checkpoint(tmp_path, model, optimizers, step=0)
    other = TiedModel(1)
    others = sgd(other)
    train(other, others, 2)
    load_checkpoint(tmp_path, other, others)
    assert_same(contents(other, others), contents(model, optimizers))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def holder(values: dict[str, torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for name, value in values.items():
        module.register_buffer(name, value)
    return module


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5, 3), (2, 3, 4)])
def test_every_dtype_and_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {f"b{i}": (torch.randn(shape) * 50).to(dtype) for i, dtype in enumerate(DTYPES)}
    save_checkpoint(tmp_path, holder(values), step=1)
    loaded = holder({name: torch.zeros_like(value) for name, value in values.items()})
    load_checkpoint(tmp_path, loaded)
    for name, value in values.items():
        result = getattr(loaded, name)
        assert result.dtype == value.dtype
        assert result.shape == value.shape
        assert torch.equal(
            result.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        )


def test_special_values_and_strided_tensors(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    turned = torch.arange(12.0).reshape(3, 4).t()
    save_checkpoint(tmp_path, holder({"odd": odd, "turned": turned}), step=1)
    loaded = holder({"odd": torch.zeros(4), "turned": torch.zeros(4, 3)})
    load_checkpoint(tmp_path, loaded)
    assert torch.equal(loaded.odd.view(torch.int32), odd.view(torch.int32))
    assert torch.equal(loaded.turned, turned)


def test_shard_is_plain_safetensors_and_ties_are_stored_once(tmp_path: Path) -> None:
    model = TiedModel(0)
    path = save_checkpoint(tmp_path, model, step=7)
    stored = load_file(path / "shard-00000-of-00001.safetensors")
    names = {name.removeprefix("model/") for name in stored if name.startswith("model/")}
    assert names == set(model.state_dict()) - {"head.weight"}
    assert torch.equal(stored["model/embed.weight"], model.embed.weight)
    assert (tmp_path / "latest").read_text() == "step-00000007\n"


def test_generators_continue(tmp_path: Path) -> None:
    def draw() -> tuple[Any, ...]:
        gauss = random.gauss(0, 1)
        return gauss, random.random(), np.random.randn(3).tolist(), torch.randn(3).tolist()

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    save_checkpoint(tmp_path, nn.Linear(2, 2), step=1)
    # Saving draws nothing, so the numbers after it are those after loading.
    expected = draw()
    random.seed(9)
    np.random.seed(9)
    model = nn.Linear(2, 2)
    load_checkpoint(tmp_path, model)
    assert draw() == expected


def test_asynchronous_save_does_not_see_later_changes(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    before = model.weight.detach().clone()
    changed = threading.Event()

    def hold(phase: str) -> None:
        if phase == "shard-open":
            assert changed.wait(timeout=60)

    with Checkpointer(tmp_path, fault=hold) as checkpointer:
        checkpointer.save(1, model, state={"a": 1})
        assert find_checkpoints(tmp_path) == []
        with torch.no_grad():
            model.weight.fill_(7)
        changed.set()
        checkpointer.wait()
        assert checkpointer.last_error is None
        assert checkpointer.load_newest(model) == (1, {"a": 1})
    assert torch.equal(model.weight, before)


def test_state_is_copied_at_the_time_of_saving(tmp_path: Path) -> None:
    state = {"list": [1]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, nn.Linear(1, 1), state=state)
        state["list"].append(2)
        checkpointer.wait()
    assert load_checkpoint(tmp_path, nn.Linear(1, 1)) == {"list": [1]}


def test_background_function_writes_the_same(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, nn.Linear(2, 2), step=1, blocking=False)
    for thread in threading.enumerate():
        if thread.name == "save checkpoint":
            thread.join(timeout=60)
    verify_checkpoint(path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": torch.zeros(1)}}, r"state\['a'\]\['b'\] is a Tensor"),
        ({"a": {1: 2}}, "key 1"),
        ({"a": [np.int64(3)]}, r"state\['a'\]\[0\] is a int64"),
    ],
)
def test_state_that_json_cannot_carry(state: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, nn.Linear(2, 2), step=1, state=state)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight cannot be saved"):
        save_checkpoint(tmp_path, nn.Linear(2, 2, device="meta"), step=1)
    model = nn.Linear(2, 2)
    stranger = SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="that the model does not contain"):
        save_checkpoint(tmp_path, model, stranger, step=1)


def test_compiled_names_and_order_of_groups_do_not_matter(tmp_path: Path) -> None:
    model = TiedModel(0)
    optimizers = adamw(model)
    train(model, optimizers, 2)
    save_checkpoint(tmp_path, model, optimizers, step=2)
    plain = TiedModel(1)
    wrapped = nn.Module()
    wrapped._orig_mod = plain
    others = [AdamW(list(plain.parameters())[::-1], lr=1.0, fused=True)]
    load_checkpoint(tmp_path, wrapped, others)
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in optimizers[0].state[theirs].items():
            assert torch.equal(others[0].state[mine][key], value)
    assert others[0].param_groups[0]["lr"] == 1e-2


def test_warning_when_groups_join(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 2.0}]
    save_checkpoint(tmp_path, model, SGD(groups), step=1)
    logger = logging.getLogger("bmforge")
    logger.addHandler(caplog.handler)
    try:
        joined = SGD(model.parameters(), lr=3.0)
        load_checkpoint(tmp_path, model, joined)
    finally:
        logger.removeHandler(caplog.handler)
    assert "saved with different settings" in caplog.text
    assert joined.param_groups[0]["lr"] == 3.0


class StandInDevice:
    """What an accelerator's torch module offers for its generator."""

    def __init__(self) -> None:
        self.state = torch.zeros(16, dtype=torch.uint8)
        self.seeds: list[int] = []

    def get_rng_state(self) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


def test_accelerator_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = StandInDevice()
    monkeypatch.setattr(checkpoint_rng, "_device_module", lambda: None)
    without = save_checkpoint(tmp_path / "without", nn.Linear(1, 1), step=1)
    monkeypatch.setattr(checkpoint_rng, "_device_module", lambda: device)
    device.state = torch.arange(16, dtype=torch.uint8)
    path = save_checkpoint(tmp_path / "with", nn.Linear(1, 1), step=1)
    device.state = torch.zeros(16, dtype=torch.uint8)
    load_checkpoint(path, nn.Linear(1, 1))
    assert torch.equal(device.state, torch.arange(16, dtype=torch.uint8))
    assert device.seeds == []
    # Saved without an accelerator: seeded, the same way each time.
    load_checkpoint(without, nn.Linear(1, 1))
    load_checkpoint(without, nn.Linear(1, 1))
    assert len(device.seeds) == 2
    assert len(set(device.seeds)) == 1


def test_named_groups_keep_their_own_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, model, AdamW(model.named_parameters(), lr=0.5), step=1)
    turned = AdamW(list(model.named_parameters())[::-1], lr=0.1)
    load_checkpoint(tmp_path, model, turned)
    assert turned.param_groups[0]["param_names"] == ["bias", "weight"]
    assert turned.param_groups[0]["lr"] == 0.5
