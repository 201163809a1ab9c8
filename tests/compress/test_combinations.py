"""Any of the four ways with any others: trained with a teacher, finished, saved, opened."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_models import make_inputs, make_llama, task_loss

from bmforge.compress import (
    CompressConfig,
    DistillConfig,
    DistillLoss,
    MoEfyConfig,
    PruneConfig,
    QuantizeConfig,
    StructureConfig,
    compress,
)
from bmforge.compress.prune.structure import StructureMethod
from bmforge.errors import ConfigError
from bmforge.models import Llama
from bmforge.nn import MoE
from bmforge.nn.packed_store import PackedStore
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_equal_trees

WAYS: dict[str, Any] = {
    "structure": StructureConfig(intermediate_size=64),
    "moefy": MoEfyConfig(num_experts=2, share=0.5, router="similarity"),
    "prune": PruneConfig(pattern="2:4"),
    "quantize": QuantizeConfig(scheme="int8", training="fake"),
}
TEACH = DistillConfig(losses=(DistillLoss(temperature=2.0), DistillLoss(kind="hidden")))
# Every two ways are together in one of these, and each is left out in one.
QUICK = [("structure", "moefy", "prune", "quantize"), ("structure",), ("moefy", "prune")]
ALL = [names for count in range(1, 5) for names in itertools.combinations(WAYS, count)]


@pytest.mark.parametrize(
    "names",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.long, id="+".join(n)) for n in ALL],
)
def test_together(names: tuple[str, ...], tmp_path: Path) -> None:
    model: Any = make_llama(0, width=32, intermediate_size=128).float()
    teacher = copy.deepcopy(model)
    batch = make_inputs(model, padded=False)
    config = CompressConfig(distill=TEACH, **{name: WAYS[name] for name in names})
    batches = [{"input_ids": batch["input_ids"]}] if "moefy" in names else None
    job = compress(model, config, teacher=teacher, batches=batches)
    objective = job.objective(task_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = objective(model, batch, float(model.count_items(batch)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.after_step_()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    report = job.finish_()
    small: Any = job.model.eval()
    assert set(report.facts) == {
        {"moefy": "experts", "prune": "zeros"}.get(name, name) for name in names
    }
    layer = small.layers["0"]
    assert isinstance(layer.mlp, MoE) == ("moefy" in names)
    packed = isinstance(layer.attn.q_proj, PackedStore)
    assert packed == ("quantize" in names)
    if "prune" in names:
        weight = layer.attn.q_proj
        values = weight.dense(torch.float32) if packed else weight.weight
        assert int((values.unflatten(-1, (-1, 4)) == 0).sum(-1).min()) >= 2
    before = report.before.parameters
    assert (report.after.parameters < before * 0.8) == ("structure" in names)
    small.save_pretrained(tmp_path)
    again = Llama.from_pretrained(tmp_path)
    assert_equal_trees(persistent_tensors(again), persistent_tensors(small))
    given = {"input_ids": batch["input_ids"]}
    assert torch.equal(again(**given).logits, small(**given).logits)


GATES = StructureConfig(intermediate_size=64, gates=("features",), gate_steps=2, warmup_steps=1)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"moefy": WAYS["moefy"]}, "moefy"),
        ({"prune": WAYS["prune"]}, "pattern='2:4'"),
        ({"quantize": WAYS["quantize"]}, "training='fake'"),
    ],
)
def test_gates_refuse_what_needs_the_shapes_of_now(beside: dict[str, Any], said: str) -> None:
    """Before the run, not when it is finished; the model is as it was."""
    model: Any = make_llama(0, width=32, intermediate_size=128)
    names = list(dict(model.named_modules()))
    batches = [make_inputs(model, padded=False)] if "moefy" in beside else None
    with pytest.raises(ConfigError, match=f"(?s){said}.*separate job"):
        compress(model, CompressConfig(structure=GATES, **beside), batches=batches)
    with pytest.raises(ConfigError, match=said):
        compress(
            model, CompressConfig(**beside), batches=batches, methods=(StructureMethod(GATES),)
        )
    assert list(dict(model.named_modules())) == names


@pytest.mark.parametrize(
    "beside",
    [{"prune": PruneConfig(sparsity=0.5)}, {"quantize": QuantizeConfig(scheme="int8")}],
    ids=["zeros", "integers"],
)
def test_gates_beside_what_fits_any_shape(beside: dict[str, Any]) -> None:
    model: Any = make_llama(0, width=32, intermediate_size=128).float()
    job = compress(model, CompressConfig(structure=GATES, **beside))
    for _ in range(2):
        job.after_step_()
    job.finish_()
    mlp = job.model.get_submodule("layers.0").spec.mlp  # type: ignore[union-attr]
    assert mlp.intermediate_size == 64
    if "prune" in beside:
        weight = job.model.get_submodule("layers.0.attn.q_proj").weight
        assert float((weight == 0).float().mean()) > 0.3  # type: ignore[operator,union-attr]
