"""Statistics on every layout against torch's mean and std on one plain process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from trainer_cases import VOCAB, tiny_model

from bmforge.errors import ConfigError
from bmforge.models import init_weights_
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    mesh_of,
    parallelize,
    run_step,
)
from bmforge.testing import run_distributed
from bmforge.train import format_table, inspect_activations, inspect_parameters

ROWS, LENGTH, MICRO = 8, 6, 2
# Whole on all processes, cut over tp, and a block that returns several things.
SEEN = ("embed", "layers.*", "layers.*.attn_norm", "layers.*.attn.q_proj", "layers.*.mlp.down_proj")
TITLES = ("max", "min", "std", "mean", "grad_std", "grad_mean")
STATISTICS = ("mean", "std", "max", "min", "grad_mean", "grad_std")


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def look(layout: Layout, recompute: bool = False):
    """Rows of all parameters and of `SEEN` after one step on this process's rows."""
    model = tiny_model(torch.float64)
    parallelize(model, layout, recompute=recompute)
    init_weights_(model, seed=3)
    mesh = mesh_of(model)
    size, rank = data_parallel_size(mesh), data_parallel_rank(mesh)
    parts = tokens().view(MICRO, size, ROWS // (MICRO * size), LENGTH)[:, rank]
    items = ROWS * (LENGTH - 1) / size
    with inspect_activations(model, SEEN) as seen:
        batches = [{"input_ids": ids, "labels": ids} for ids in parts]
        run_step(model, lambda b: model(**b, num_items_in_batch=items).loss, batches)
    return inspect_parameters(model), seen.rows()


def expected(value: torch.Tensor, grad: torch.Tensor) -> dict[str, float]:
    """What torch says of a whole tensor and its whole gradient."""
    whole = {"mean": value.mean(), "std": value.std(), "max": value.max(), "min": value.min()}
    found = {**whole, "grad_mean": grad.mean(), "grad_std": grad.std()}
    return {name: number.item() for name, number in found.items()}


@pytest.fixture(scope="module")
def plain():
    """Parameters and outputs of one process that runs all rows at once, without any layout."""
    model = init_weights_(tiny_model(torch.float64), seed=3)
    outputs: dict[str, torch.Tensor] = {}

    def keep(name, out):
        if isinstance(out, torch.Tensor):
            if out.requires_grad:  # not what backward makes again
                out.retain_grad()
                outputs[name] = out
        else:
            for number, one in enumerate(out):
                if isinstance(one, torch.Tensor):
                    keep(f"{name}[{number}]", one)

    for name, module in model.named_modules():
        fits = name == "embed" or name.endswith(("attn_norm", "q_proj", "mlp.down_proj"))
        if fits or (name.startswith("layers.") and name.count(".") == 1):
            module.register_forward_hook(lambda m, args, out, name=name: keep(name, out))
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    parameters = {
        n: {"shape": tuple(p.shape), **expected(p.detach(), p.grad)}
        for n, p in model.named_parameters()
    }
    return parameters, {n: expected(o.detach(), o.grad) for n, o in outputs.items()}


LAYOUTS = [
    pytest.param(1, Layout(), False, id="1"),
    pytest.param(1, Layout(), True, id="1-recompute"),
    pytest.param(2, Layout(zero=3), False, id="zero3x2"),
    pytest.param(2, Layout(tp=2), False, id="tp2"),
    pytest.param(2, Layout(pp=2), False, id="pp2"),
    pytest.param(
        2, Layout(tp=2, sequence_parallel=True), False, id="tp2-sp", marks=pytest.mark.long
    ),
    pytest.param(4, Layout(zero=0, pp=2), False, id="replicate2-pp2", marks=pytest.mark.long),
    pytest.param(4, Layout(zero=2, dp_replicate=2), False, id="hsdp", marks=pytest.mark.long),
    pytest.param(4, Layout(zero=3, tp=2), True, id="zero3-tp2", marks=pytest.mark.long),
    pytest.param(4, Layout(zero=3, cp=2), False, id="zero3-cp2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("world", "layout", "recompute"), LAYOUTS)
def test_rows_are_those_of_one_process(plain, world, layout, recompute):
    everyone = run_distributed(look, world, layout, recompute)
    assert all(one == everyone[0] for one in everyone)
    for rows, want in zip(everyone[0], plain, strict=True):
        assert [row["name"] for row in rows] == sorted(want)
        for row in rows:
            assert row["shape"] == want[row["name"]].get("shape", row["shape"])
            # Behind and in front of the blocks cp's processes have parts of gradients.
            parted = layout.cp > 1 and row["name"] == "embed"
            assert (row["grad_mean"] is None) == parted
            for name in STATISTICS[:4] if parted else STATISTICS:
                off = abs(row[name] - want[row["name"]][name])
                assert off <= 1e-12 + 1e-9 * abs(row[name]), (row["name"], name, off)


class Odd(nn.Module):
    """Parameters whose statistics are special."""

    def __init__(self) -> None:
        super().__init__()
        self.far = nn.Parameter(1e8 + torch.linspace(-1e-4, 1e-4, 1001, dtype=torch.float64))
        self.same = nn.Parameter(torch.full((5,), 0.1))
        self.one = nn.Parameter(torch.tensor(2.0))
        self.hole = nn.Parameter(torch.tensor([1.0, math.nan, -3.0]))
        self.vast = nn.Parameter(torch.tensor([1.0, math.inf]))
        self.none = nn.Parameter(torch.empty(0, 3))


@pytest.mark.filterwarnings("ignore:std")
def test_special_values_are_torchs():
    model = Odd()
    rows = {row["name"]: row for row in inspect_parameters(model)}
    for name in ("far", "same", "one", "hole", "vast"):
        tensor = getattr(model, name).detach().double()
        want = [tensor.mean(), tensor.std(), tensor.max(), tensor.min()]
        got = torch.tensor([rows[name][c] for c in STATISTICS[:4]], dtype=torch.float64)
        torch.testing.assert_close(got, torch.stack(want), rtol=1e-6, atol=0, equal_nan=True)
        assert rows[name]["grad_mean"] is None
    assert rows["same"]["std"] == 0.0
    assert rows["none"]["mean"] is None


def test_chunks_are_put_together(monkeypatch):
    model = nn.Linear(7, 9)
    whole = inspect_parameters(model)
    monkeypatch.setattr("bmforge.train.report.inspect._CHUNK", 4)
    for cut, want in zip(inspect_parameters(model, "*"), whole, strict=True):
        assert cut["name"] == want["name"]
        assert math.isclose(cut["mean"], want["mean"], rel_tol=1e-12)
        assert math.isclose(cut["std"], want["std"], rel_tol=1e-12)
        assert (cut["max"], cut["min"]) == (want["max"], want["min"])


def test_a_name_that_is_not_there():
    with pytest.raises(ConfigError, match="parameter pattern 'wieght' matches nothing"):
        inspect_parameters(nn.Linear(2, 2), ("wieght",))
    with pytest.raises(ConfigError, match="module pattern"):
        inspect_activations(nn.Sequential(nn.Linear(2, 2)), ("layers.*",))


def test_hooks_are_gone_afterwards():
    model = nn.Sequential(nn.Linear(2, 2))
    with inspect_activations(model, "**") as seen:
        model(torch.ones(1, 2))
    before = seen.rows()
    model(100 * torch.ones(1, 2))
    assert seen.rows() == before
    assert before[0]["grad_mean"] is None


def test_table_is_aligned():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(11)))
    model(torch.ones(1, 3)).sum().backward()
    lines = format_table(inspect_parameters(model, ("*.weight",))).splitlines()
    assert lines[0].split() == ["name", "shape", *TITLES]
    assert [line.split()[0] for line in lines[1:]] == [f"{n}.weight" for n in range(11)]
    assert len({len(line) for line in lines}) == 1
    assert float(lines[-1].split()[2]) == pytest.approx(model[10].weight.max().item(), rel=1e-3)
