"""Models of transformers, Conv1D among them: what is done in place, and what through our class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import hf_bert, hf_gpt2, logits, texts
from torch import Tensor, nn

from bmforge.compress import (
    CompressConfig,
    DistillConfig,
    DistillLoss,
    MoEfyConfig,
    PruneConfig,
    QuantizeConfig,
    StructureConfig,
    compress,
    quantize,
)
from bmforge.compress.prune import prune
from bmforge.errors import ConfigError
from bmforge.models import AutoModel
from bmforge.nn import MoE
from bmforge.nn.packed_store import PackedStore
from bmforge.testing import assert_equal_trees

LEARNED = (DistillLoss(temperature=2.0), DistillLoss(kind="hidden"))
WAYS: dict[str, Any] = {
    "structure": StructureConfig(intermediate_size=32),
    "moefy": MoEfyConfig(num_experts=2, share=0.5, router="similarity"),
    "prune": PruneConfig(pattern="2:4"),
    "quantize": QuantizeConfig(scheme="int8-dynamic", training="fake"),
}
Build = Callable[[], nn.Module]
BOTH = [hf_gpt2, pytest.param(hf_bert, marks=pytest.mark.long)]


def task(model: nn.Module, batch: dict[str, Tensor], num_items: float) -> Tensor:
    return model(**batch).loss


def batch_of(seed: int) -> dict[str, Tensor]:
    ids = texts(1, seed=seed)[0]
    return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, job: Any, steps: int = 25) -> list[float]:
    objective, batch = job.objective(task), batch_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    found = []
    for _ in range(steps):
        loss = objective(model.train(), batch, 64.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.after_step_()
        found.append(float(loss.detach()))
    return found


def packed_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PackedStore)]


def has_zeros_in_fours(module: Any) -> bool:
    groups = module.dense(torch.float32).unflatten(-1, (-1, 4))
    return int((groups == 0).sum(-1).min()) >= 2


@pytest.mark.parametrize("build", BOTH)
def test_taught_with_zeros_and_integers_in_place(build: Build) -> None:
    """Its own class trains, and in the end computes what it was trained with."""
    model = build()
    teacher = copy.deepcopy(model)
    want = logits(teacher, texts(1)[0])
    said = DistillConfig(losses=LEARNED, task_weight=0.0)
    ways = {name: WAYS[name] for name in ("prune", "quantize")}
    job = compress(model, CompressConfig(distill=said, **ways), teacher=teacher)
    losses = train(model, job)
    assert losses[-1] < 0.7 * losses[0]
    before = logits(model.eval(), texts(1)[0])
    report = job.finish_()
    assert report.after.size_bytes < report.before.size_bytes
    assert torch.allclose(logits(model, texts(1)[0]), before, rtol=1e-3, atol=1e-3)
    assert len(packed_of(model)) == 2 * (4 if build is hf_gpt2 else 6)
    assert all(map(has_zeros_in_fours, packed_of(model)))
    assert torch.equal(logits(teacher, texts(1)[0]), want)


@pytest.mark.parametrize("build", BOTH)
def test_each_way_alone_in_place(build: Build) -> None:
    """Zeros by what goes through it, integers by what they do to it, a teacher alone."""
    zeros = build()
    prune(zeros, PruneConfig(method="wanda", pattern="2:4"), batches=texts()).finish_(zeros)
    linear = [m for n, m in zeros.named_modules() if n.endswith(("c_fc", "intermediate.dense"))]
    for module in linear:
        weight: Any = module.weight.t() if hasattr(module, "nf") else module.weight
        assert ((weight.unflatten(-1, (-1, 4)) == 0).sum(-1) == 2).all()
    assert len(linear) == 2
    plain = build()
    packed = quantize(copy.deepcopy(plain), "int8", method="gptq", batches=texts())
    ids = texts(1, seed=5)[0]
    assert 0 < (logits(packed, ids) - logits(plain, ids)).norm() < 0.05 * logits(plain, ids).norm()
    student = build()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(0.5)
    job = compress(student, CompressConfig(distill=DistillConfig(losses=LEARNED)), teacher=plain)
    losses = train(student, job)
    assert losses[-1] < losses[0]
    job.finish_()


@pytest.mark.parametrize("build", [hf_gpt2, hf_bert])
@pytest.mark.parametrize("way", ["structure", "moefy"])
def test_what_needs_our_layers_says_so(build: Build, way: str) -> None:
    """Nobody knows what a size means in a class that is not ours; the model stays as it is."""
    model = build()
    before = copy.deepcopy(model.state_dict())
    batches = [{"input_ids": ids} for ids in texts()] if way == "moefy" else None
    with pytest.raises(ConfigError, match=r"Load it with|open it with"):
        compress(model, CompressConfig(**{way: WAYS[way]}), batches=batches)
    assert_equal_trees(model.state_dict(), before)


@pytest.mark.parametrize("build", [hf_gpt2, hf_bert])
def test_all_ways_through_our_class(build: Build, tmp_path: Path) -> None:
    """What transformers saved is opened, shrunk for transformers, and made small by all ways."""
    theirs: Any = build()
    theirs.save_pretrained(tmp_path / "theirs")
    model: Any = AutoModel.from_pretrained(tmp_path / "theirs")
    ids = texts(1)[0]
    assert torch.allclose(logits(model, ids), logits(theirs, ids), rtol=1e-4, atol=1e-4)
    narrow = copy.deepcopy(model)
    job = compress(narrow, CompressConfig(structure=WAYS["structure"]))
    assert job.finish_().facts["structure"]["opens_elsewhere"]
    narrow.save_pretrained(tmp_path / "narrow")
    again = type(theirs).from_pretrained(tmp_path / "narrow").eval()
    assert torch.allclose(logits(again, ids), logits(narrow, ids), rtol=1e-4, atol=1e-4)
    teacher = copy.deepcopy(model)
    batches = [{"input_ids": ids} for ids in texts()]
    config = CompressConfig(distill=DistillConfig(losses=LEARNED), **WAYS)
    job = compress(model, config, teacher=teacher, batches=batches)
    train(model, job, 3)
    job.finish_()
    assert any(isinstance(module, MoE) for module in model.modules())
    assert packed_of(model)
    model.eval().save_pretrained(tmp_path / "small")
    small = AutoModel.from_pretrained(tmp_path / "small")
    assert torch.equal(logits(small, ids), logits(model, ids))
