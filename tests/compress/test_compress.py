"""A job of several methods: their order, their losses, their state, the small model, the report."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_models import make_inputs, make_llama, task_loss
from torch import Tensor, nn

from bmforge.compress import (
    CompressConfig,
    CompressReport,
    DistillConfig,
    DistillLoss,
    MethodBase,
    PruneConfig,
    QuantizeConfig,
    compress,
)
from bmforge.compress.phases import PhaseSteps, split_phases
from bmforge.compress.report import measure_sizes
from bmforge.errors import ConfigError
from bmforge.parallel import Layout, parallelize
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close, assert_equal_trees, run_distributed
from bmforge.train import TrainConfig, Trainer

ITEMS = 13.0


class Pull(MethodBase):
    """Pulls the mean of the last norm's weight to 3; says what happens to it."""

    def __init__(self, name: str = "structure", said: list[str] | None = None) -> None:
        self.name, self.said, self.steps = name, said if said is not None else [], 0

    def attach_(self, model: nn.Module) -> None:
        self.said.append(f"attach {self.name}")

    def extra_loss(self, model: Any, step: int) -> Tensor | None:
        return (model.norm.weight.mean() - 3 - step) ** 2 if self.name == "structure" else None

    def after_step_(self, model: nn.Module, step: int) -> None:
        self.steps = step

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def finish_(self, model: nn.Module) -> dict[str, Any]:
        self.said.append(f"finish {self.name}")
        return {"steps": self.steps}


def test_one_order() -> None:
    """Whatever the order in which they are given."""
    said: list[str] = []
    names = ["quantize", "structure", "zeros", "experts"]
    job = compress(make_llama(0), methods=[Pull(name, said) for name in names])
    job.finish_()
    order = ["structure", "experts", "zeros", "quantize"]
    assert said == [f"{what} {name}" for what in ("attach", "finish") for name in order]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_term_without_tokens_counts_once_a_step(parts: int) -> None:
    """However the step is divided into micro-batches; in evaluation not at all."""
    model = make_llama(0)
    batch = make_inputs(model, padded=False)
    items = model.count_items(batch)
    job = compress(model, methods=[Pull()])
    job.after_step_()
    objective = job.objective(task_loss)
    rows = range(3) if parts == 3 else [slice(None)]
    pieces = [{n: t[r].view(-1, t.shape[1]) for n, t in batch.items()} for r in rows]
    for piece in pieces:
        objective(model, piece, float(items)).backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    want = task_loss(model, batch, items) + Pull().extra_loss(model, 1)
    want.backward()
    assert_close(got, {n: p.grad for n, p in model.named_parameters()})
    model.eval()
    assert torch.equal(objective(model, batch, items), task_loss(model, batch, items))


def test_state_goes_on() -> None:
    """A job of the same methods goes on; another one is refused."""
    job = compress(make_llama(0), methods=[Pull(), Pull("zeros")])
    job.after_step_()
    job.after_step_()
    state = job.state_dict()
    again = compress(make_llama(0), methods=[Pull(), Pull("zeros")])
    again.load_state_dict(state)
    assert again.step == 2
    assert again.state_dict() == state
    other = compress(make_llama(0), methods=[Pull()])
    with pytest.raises(
        ConfigError, match="methods structure, zeros, but this recipe uses structure"
    ):
        other.load_state_dict(state)


def test_report(tmp_path: Path) -> None:
    """Sizes by hand; written, read again, and drawn."""
    model = make_llama(0).float()
    before = sum(t.numel() for t in persistent_tensors(model).values())
    blocks = sum(t.numel() for n, t in persistent_tensors(model).items() if "_proj.weight" in n)
    config = CompressConfig(prune=PruneConfig(pattern="2:4"))
    report = compress(model, config).finish_()
    assert report.before.parameters == report.after.parameters == before
    assert report.before.size_bytes == 4 * before
    assert report.after.zeros == blocks // 2
    page = report.save(tmp_path)
    assert CompressReport.load(tmp_path) == report
    text = page.read_text()
    for said in ("Llama", f"{before:,}", "zeros", "Size in MB"):
        assert said in text
    assert "<script" not in text


def test_packed_numbers_count_as_numbers() -> None:
    """An int8 model has the parameters of the float one, in a quarter of the bytes or so."""
    model = make_llama(0, width=64, intermediate_size=128).float()
    before = measure_sizes(model)
    report = compress(model, CompressConfig(quantize=QuantizeConfig(scheme="int8"))).finish_()
    assert report.after.parameters == before.parameters
    linear = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    saved = linear * 4 - linear - linear // 32 * 2  # a half for every 32 columns
    assert before.size_bytes - report.after.size_bytes == saved


def test_what_does_not_go_together() -> None:
    """Is said before anything is changed."""
    model, teacher = make_llama(0), make_llama(1)
    batches = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}]
    for arguments, said in (
        ({}, "no compression method is configured"),
        ({"teacher": teacher}, "a teacher was passed without distillation losses"),
        (
            {"config": CompressConfig(distill=DistillConfig())},
            "losses were passed without a teacher",
        ),
        ({"methods": [Pull("shrink")]}, "unknown compression method: 'shrink'"),
        ({"methods": [Pull(), Pull()]}, "structure is configured twice"),
        ({"methods": [Pull()], "batches": batches}, "batches have no effect"),
        ({"config": CompressConfig(prune=PruneConfig("wanda"))}, "there is no calibration data"),
    ):
        with pytest.raises(ConfigError, match=said):
            compress(model, **arguments)  # type: ignore[arg-type]
    job = compress(model, methods=[Pull()])
    job.finish_()
    with pytest.raises(ConfigError, match="already finished"):
        job.finish_()


def test_phases() -> None:
    """What changes shapes has a phase of its own, what keeps them shares one."""
    zeros, integers = PruneConfig(pattern="2:4"), QuantizeConfig()
    teach = DistillConfig(losses=(DistillLoss(),))
    config = CompressConfig(prune=zeros, quantize=integers, distill=teach)
    (one,) = split_phases(config, PhaseSteps(weights=5))
    assert (one.name, one.steps, one.config) == ("weights", 5, config)
    (alone,) = split_phases(CompressConfig(distill=teach), PhaseSteps(weights=2))
    assert alone.config.names == ()
    with pytest.raises(ConfigError, match="distill has no effect without training steps"):
        split_phases(config, PhaseSteps())
    with pytest.raises(ConfigError, match=r"steps\.structure=1 has no effect"):
        split_phases(config, PhaseSteps(structure=1))
    with pytest.raises(ConfigError, match="no compression method"):
        split_phases(CompressConfig(), PhaseSteps())


class Loader:
    """The same rows, cut over processes, for every step."""

    def __init__(self, batch: Any, rank: int, world: int) -> None:
        each = batch["input_ids"].shape[0] // world
        self.batch = {n: t[rank * each : (rank + 1) * each] for n, t in batch.items()}

    def __next__(self) -> list[Any]:
        return [self.batch]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train_small(layout: Layout, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Distil and make zeros on a layout; return the small model's tensors."""
    from bmforge.parallel import data_parallel_rank, data_parallel_size, init_distributed, mesh_of

    init_distributed()
    model, teacher = make_llama(0), make_llama(1, width=24, head_dim=4)
    batch = make_inputs(model, rows=4, padded=False)
    config = CompressConfig(
        prune=PruneConfig(pattern="2:4"),
        distill=DistillConfig(
            losses=(
                DistillLoss(temperature=2.0),
                DistillLoss(kind="hidden"),
                DistillLoss(kind="relation", of="key"),
            )
        ),
    )
    job = compress(model, config, teacher=teacher)
    parallelize(model, layout)
    parallelize(teacher, layout)
    mesh = mesh_of(model)
    loader = Loader(batch, data_parallel_rank(mesh), data_parallel_size(mesh))
    settings = TrainConfig(steps=3, save_every_steps=None)
    Trainer(model, loader, settings, objective=job.objective(task_loss), callbacks=(job,)).fit()
    job.finish_()
    return {name: t.detach().clone() for name, t in persistent_tensors(job.model).items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, Layout(zero=3)),
        (2, Layout(zero=2)),
        (2, Layout(tp=2)),
    ],
)
def test_layouts(world: int, layout: Layout) -> None:
    """A teacher of another width, and zeros: the same small model."""
    (want,) = run_distributed(train_small, 1, Layout())
    for got in run_distributed(train_small, world, layout):
        assert_close(got, want, rtol=1e-7, atol=1e-9)


def test_a_laid_out_model_leaves_a_plain_one() -> None:
    """With everything that it had, and nothing of the layout or the teacher."""
    model = make_llama(0)
    twin = copy.deepcopy(model)
    job = compress(
        model,
        CompressConfig(distill=DistillConfig(losses=(DistillLoss(kind="hidden"),))),
        teacher=make_llama(1, width=24, head_dim=4),
    )
    parallelize(model)
    job.finish_()
    assert_equal_trees(persistent_tensors(job.model), persistent_tensors(twin))
    batch = make_inputs(twin)
    assert torch.equal(task_loss(job.model, batch, ITEMS), task_loss(twin, batch, ITEMS))
