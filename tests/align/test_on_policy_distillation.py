"""On-policy distillation over the teacher's top-k tokens: plain formulas, packing, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.align.distillation import DistillationObjective
from bmforge.models import Llama, LlamaConfig, init_weights_
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    gradient_ranks,
    init_distributed,
    mesh_of,
    parallelize,
    sum_over_axes,
)
from bmforge.testing import assert_close, run_distributed
from bmforge.train.objective import run_objective

VOCAB, ROWS, WIDTH, TEMPERATURE = 29, 8, 10, 0.7
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
STUDENT = LlamaConfig(**SIZES, hidden_size=20, intermediate_size=28)
TEACHER = LlamaConfig(**SIZES, hidden_size=16, intermediate_size=24, init_std=0.2)


def make_model(config: LlamaConfig, seed: int, layout: Layout | None = None) -> Any:
    model = Llama.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, layout or Layout())
    init_weights_(model, seed=seed)
    return model


def make_batch() -> dict[str, Tensor]:
    """Padded rows with answers of 1 to 7 tokens; the last row has no label."""
    ids = torch.randint(VOCAB, (ROWS, WIDTH), generator=torch.Generator().manual_seed(2))
    places = torch.arange(WIDTH)
    lengths = torch.arange(ROWS)[:, None] + 3
    labels = torch.where((places >= 2) & (places < lengths), ids, -100)
    labels[-1] = -100
    mask = (places < lengths).long()
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def compare_plainly(
    logits: Tensor, teacher: Tensor, top_k: int, beta: float, is_scored: Tensor
) -> Tensor:
    """The summed divergence from whole logits, written with probabilities."""
    p, q = ((z / TEMPERATURE).softmax(-1)[is_scored] for z in (logits, teacher))
    if 0 < top_k < VOCAB:
        ids = q.topk(top_k, -1).indices
        parts = [part.gather(-1, ids) for part in (p, q)]
        p, q = (torch.cat((part, 1 - part.sum(-1, keepdim=True)), -1) for part in parts)
    if beta == 1:
        return (p * (p / q).log()).sum()
    if beta == 0:
        return (q * (q / p).log()).sum()
    m = beta * q + (1 - beta) * p
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum()


def run_plainly(top_k: int, beta: float) -> dict[str, Tensor]:
    """Loss and gradients of one process with whole logits."""
    init_distributed()
    student, teacher, batch = make_model(STUDENT, 1), make_model(TEACHER, 2), make_batch()
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    logits = student(**inputs).logits[:, :-1]
    targets = teacher(**inputs).logits[:, :-1].detach()
    is_scored = batch["labels"][:, 1:] != -100
    loss = compare_plainly(logits, targets, top_k, beta, is_scored) / is_scored.sum()
    loss.backward()
    return {"loss": loss.detach()} | gradients_of(student)


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {
        f"grad/{name}": p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def run_distillation(top_k: int, beta: float, layout: Layout, micro: int) -> dict[str, Tensor]:
    """Loss, reverse KL and gradients of one step of the objective, on this process's rows."""
    init_distributed()
    student, teacher = make_model(STUDENT, 1, layout), make_model(TEACHER, 2, layout)
    objective = DistillationObjective(
        teacher.eval().requires_grad_(False), beta, TEMPERATURE, top_k=top_k
    )
    mesh, batch = mesh_of(student), make_batch()
    count = int((batch["labels"][:, 1:] != -100).sum())
    size, rank = data_parallel_size(mesh), data_parallel_rank(mesh)
    own = {name: t.chunk(size)[rank] for name, t in batch.items()}
    parts = zip(*(t.chunk(micro) for t in own.values()), strict=True)
    batches = [dict(zip(own, part, strict=True)) for part in parts]
    loss, metrics = run_objective(objective, student, batches, count / size, mesh)
    total = sum_over_axes(loss, mesh, "dp_replicate", "dp_shard", "cp", "pp")
    kl = torch.tensor(metrics["kl"], dtype=torch.float64)
    return {"loss": total / gradient_ranks(mesh), "kl": kl} | gradients_of(student)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 2 * VOCAB])
def test_loss_and_gradient_are_those_of_whole_logits(top_k: int, beta: float) -> None:
    """With all tokens, top-k is the divergence of the whole vocabulary."""
    found, wanted = run_distillation(top_k, beta, Layout(), 2), run_plainly(top_k, beta)
    reverse = found.pop("kl")
    assert_close(found, wanted)
    assert_close(reverse, run_plainly(top_k, 1.0)["loss"])


LAYOUTS = [
    pytest.param(2, Layout(zero=3), 1, id="zero3"),
    pytest.param(2, Layout(tp=2), 1, id="tp"),
    pytest.param(2, Layout(pp=2), 2, id="pp"),
    pytest.param(2, Layout(cp=2), 1, id="cp"),
    pytest.param(2, Layout(tp=2, sequence_parallel=True), 1, id="sequence"),
    pytest.param(2, Layout(zero=2), 2, id="zero2-acc", marks=pytest.mark.long),
    pytest.param(4, Layout(tp=2, cp=2), 1, id="tp-cp", marks=pytest.mark.long),
    pytest.param(4, Layout(cp=2, pp=2), 2, id="cp-pp", marks=pytest.mark.long),
    pytest.param(4, Layout(tp=2, pp=2), 2, id="tp-pp", marks=pytest.mark.long),
    pytest.param(2, Layout(cp=2, cp_method="ring", zero=3), 2, id="ring", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("top_k", "beta"), [(3, 1.0), (20, 0.3)])
@pytest.mark.parametrize(("world", "layout", "micro"), LAYOUTS)
def test_layouts_equal_whole_logits(
    top_k: int, beta: float, world: int, layout: Layout, micro: int
) -> None:
    """Each of two ranks has 14 or 15 tokens, so 20 are more than one rank has."""
    want = run_plainly(top_k, beta)
    for got in run_distributed(run_distillation, world, top_k, beta, layout, micro):
        got.pop("kl")
        assert_close(got, {name: want[name] for name in got})


def test_packed_rows_have_the_loss_of_padded_ones() -> None:
    """Two rows of `make_batch` one after the other, with positions that begin again."""
    init_distributed()
    batch, first, second = make_batch(), 6, 8
    padded = {name: t[[3, 5]] for name, t in batch.items()}
    ends = first, second
    pieces = [{name: t[row, :end] for name, t in padded.items()} for row, end in enumerate(ends)]
    places = [torch.arange(end) for end in ends]
    packed = {
        "input_ids": torch.cat([piece["input_ids"] for piece in pieces])[None],
        "labels": torch.cat([piece["labels"] for piece in pieces])[None],
        "position_ids": torch.cat(places)[None],
        "document_ids": torch.repeat_interleave(torch.arange(2), torch.tensor(ends))[None],
    }
    results = []
    for rows in (padded, packed):
        student, teacher = make_model(STUDENT, 1), make_model(TEACHER, 2).requires_grad_(False)
        objective = DistillationObjective(teacher, 1.0, TEMPERATURE, top_k=4)
        loss, _ = run_objective(objective, student, [rows], 10.0, None)
        results.append({"loss": loss} | gradients_of(student))
    assert_close(results[1], results[0])
