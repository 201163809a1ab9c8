"""A base that checkpoints leave out: what is saved, what is checked, on any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import AdamW

from bmforge.errors import CheckpointError
from bmforge.models import GPT2, GPT2Config, init_weights_
from bmforge.parallel import Layout, parallelize
from bmforge.shards import whole_tensor
from bmforge.testing import assert_equal_trees, run_distributed
from bmforge.train.checkpoint import Base, Checkpointer, load_checkpoint, save_checkpoint
from bmforge.tune.delta import Lora, fingerprint_of, init_deltas_, list_deltas

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
WIDE = SIZES | {"hidden_size": 256, "num_heads": 4}
IDS = torch.arange(16).view(2, 8)


def make(
    layout: Layout | None = None, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: int
) -> tuple[Any, AdamW, Base]:
    model: Any = GPT2.from_config(GPT2Config(**(SIZES | sizes)), device="meta", dtype=dtype)
    Lora(model, rank=16 if sizes else 2)
    names = [n for n, p in model.named_parameters() if not p.requires_grad]
    parallelize(model, layout or Layout())
    init_weights_(model, seed)
    init_deltas_(model, 7)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, AdamW(trained, lr=0.1, foreach=False), Base("a folder", tuple(names))


def train_(model: Any, optimizer: AdamW, steps: int = 1) -> None:
    """Give every trained number a gradient that is the same on any layout, and step."""
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach() * 0.5 + 0.1
        optimizer.step()


def contents(model: Any, optimizer: AdamW) -> dict[str, torch.Tensor]:
    found = {name: whole_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = whole_tensor(value).clone()
    return found


def test_it_is_not_in_them(tmp_path: Path) -> None:
    """Nor beside them: their size is that of the delta and its optimizer state, times 1.05."""
    model, optimizer, base = make(**WIDE)
    with Checkpointer(tmp_path, base=base) as checkpointer:
        for step in (1, 2):
            train_(model, optimizer)
            checkpointer.save(step, model, optimizer)
        checkpointer.wait()
        assert checkpointer.last_error is None
    path = tmp_path / "step-00000002"
    kept = load_file(next(path.glob("shard-*")))
    assert {n for n in kept if n.startswith("model/")} == {
        f"model/{name}" for name in list_deltas(model)["default"].names()
    }
    assert not (tmp_path / "frozen").exists()
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert sum(file.stat().st_size for file in path.iterdir()) <= 1.05 * 3 * trained
    told = json.loads((path / "manifest.json").read_bytes())
    assert told["version"] == 3
    assert told["base"]["fingerprint"] == fingerprint_of(model)
    other, others, _ = make(**WIDE)
    load_checkpoint(tmp_path, other, others)
    assert_equal_trees(contents(other, others), contents(model, optimizer))


def test_another_base_is_refused(tmp_path: Path) -> None:
    """Before anything changes; the same numbers in another dtype are the same base."""
    model, optimizer, base = make()
    train_(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, step=1, base=base)
    other, others, _ = make(seed=1)
    before = contents(other, others)
    with pytest.raises(
        CheckpointError, match=r"base model has changed: its fingerprint.*'a folder'"
    ):
        load_checkpoint(tmp_path, other, others)
    assert_equal_trees(contents(other, others), before)
    smaller = make(num_layers=1)
    with pytest.raises(
        CheckpointError, match=r"base model lacks the parameters layers\.1\..* and \d+ more"
    ):
        load_checkpoint(tmp_path, *smaller[:2])
    rounded, states, _ = make()
    for name in base.names:
        parameter = rounded.get_parameter(name)
        parameter.data = parameter.data.float()
    load_checkpoint(tmp_path, rounded, states)


def test_what_has_the_base_inside_still_loads(tmp_path: Path) -> None:
    model, optimizer, base = make()
    train_(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    wanted = contents(model, optimizer)
    other, others, _ = make(seed=1)
    load_checkpoint(tmp_path, other, others)
    assert_equal_trees(contents(other, others), wanted)
    # From here on it is left out.
    with Checkpointer(tmp_path, base=base) as checkpointer:
        checkpointer.save(2, other, others)
        checkpointer.wait()
        assert checkpointer.last_error is None
    again, theirs, _ = make()
    load_checkpoint(tmp_path / "step-00000002", again, theirs)
    assert_equal_trees(contents(again, theirs), wanted)


def save_on(layout: Layout, directory: Path) -> Any:
    model, optimizer, base = make(layout)
    train_(model, optimizer)
    save_checkpoint(directory, model, optimizer, step=1, base=base)
    return contents(model, optimizer)


def load_on(layout: Layout, directory: Path, seed: int = 0) -> Any:
    model, optimizer, _ = make(layout, seed)
    if seed:
        with pytest.raises(CheckpointError, match="base model has changed"):
            load_checkpoint(directory, model, optimizer)
        return None
    load_checkpoint(directory, model, optimizer)
    return contents(model, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("there", [Layout(zero=3), Layout(tp=2), Layout(pp=2), None])
@pytest.mark.parametrize("here", [Layout(zero=3), Layout(tp=2), Layout(pp=2), None])
def test_any_layout_loads_any_others(tmp_path: Path, here: Any, there: Any) -> None:
    """To the bit, and knows another base."""
    worlds = [1 if layout is None else 2 for layout in (here, there)]
    saved = run_distributed(save_on, worlds[0], here or Layout(), tmp_path)
    loaded = run_distributed(load_on, worlds[1], there or Layout(), tmp_path)
    joined = [{name: t for one in part for name, t in one.items()} for part in (saved, loaded)]
    assert_equal_trees(*joined)
    run_distributed(load_on, worlds[1], there or Layout(), tmp_path, 1)
