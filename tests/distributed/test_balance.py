"""The balance of experts is that of all unmasked tokens of a step, however these are divided.

The reference adds the formula of the Switch paper for the whole batch to the loss of a plain model
that knows no balance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.models import Mixtral, MixtralConfig, init_weights_
from bmforge.parallel import (
    LOSS_AXES,
    Layout,
    data_parallel_rank,
    data_parallel_size,
    gradient_ranks,
    init_distributed,
    mesh_of,
    parallelize,
    run_step,
    sum_over_axes,
)
from bmforge.testing import run_distributed
from bmforge.testing.tolerance import assert_close
from bmforge.train import evaluate

WEIGHT, EXPERTS, CHOSEN, ROWS, REAL = 0.5, 4, 2, 8, 5
SIZES = {
    "vocab_size": 29, "hidden_size": 12, "intermediate_size": 10, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 4, "max_seq_len": 16, "init_std": 0.3, "num_experts": EXPERTS,
    "experts_per_token": CHOSEN, "router_aux_loss_coef": WEIGHT,
}  # fmt: skip


def make_model(balances: bool) -> Mixtral:
    config = MixtralConfig(**SIZES, output_router_logits=balances)
    return Mixtral.from_config(config, device="meta", dtype=torch.float64)


def make_rows(is_masked: bool) -> dict[str, Tensor]:
    """Five rows with unequal numbers of labels, one without, then three that only fill up."""
    ids = torch.randint(0, 29, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[3, 3:] = mask[REAL:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :5] = labels[2] = labels[REAL:] = -100
    rows = {"input_ids": ids, "labels": labels}
    return {**rows, "attention_mask": mask} if is_masked else rows


def switch_balance(router_logits: tuple[Tensor, ...], counted: Tensor) -> Tensor:
    """Equations 4 to 6: f is the share of tokens that each expert gets, P its mean probability."""
    tokens = [one[counted.flatten().bool()].softmax(-1) for one in router_logits]
    probability = torch.cat(tokens)
    best = probability.argsort(-1, descending=True)[:, :CHOSEN]
    f = torch.stack([(best == e).sum() for e in range(EXPERTS)]).double() / len(best)
    return EXPERTS * (f * probability.mean(0)).sum()


def want(is_masked: bool) -> dict[str, Tensor]:
    model = make_model(balances=False)
    init_weights_(model, seed=3)
    count = REAL if is_masked else ROWS  # only a mask tells filler rows from others
    rows = {name: tensor[:count] for name, tensor in make_rows(is_masked).items()}
    out = model(**rows)
    counted = rows.get("attention_mask", torch.ones_like(rows["labels"]))
    loss = out.loss + WEIGHT * switch_balance(out.router_logits, counted)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def found(layout: Layout, passes: int, is_masked: bool) -> dict[str, Tensor]:
    """A step in micro-batches, in slots [micro-batch][process][row], on this process."""
    init_distributed()
    model = make_model(balances=True)
    parallelize(model, layout)
    init_weights_(model, seed=3)
    mesh, rows = mesh_of(model), make_rows(is_masked)
    items = model.count_items(rows) / data_parallel_size(mesh)
    width = ROWS // passes // data_parallel_size(mesh)
    slots = {name: tensor.split(width) for name, tensor in rows.items()}
    batches = [
        {name: parts[n * data_parallel_size(mesh) + data_parallel_rank(mesh)] for name, parts in
         slots.items()}
        for n in range(passes)
    ]  # fmt: skip
    state = torch.get_rng_state()
    losses = run_step(model, lambda b: model(**b, num_items_in_batch=items).loss, batches)
    assert torch.equal(torch.get_rng_state(), state)
    loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return {
        "loss": sum_over_axes(loss, mesh, *LOSS_AXES) / gradient_ranks(mesh),
        **{n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()},
    }


@pytest.mark.parametrize(
    ("world", "layout", "passes", "is_masked"),
    [
        (1, Layout(), 1, True),
        (1, Layout(), 4, False),
        (2, Layout(), 1, False),
        (2, Layout(zero=2), 4, True),
        (2, Layout(pp=2), 4, True),
        (2, Layout(cp=2), 2, False),
        pytest.param(4, Layout(ep=2, tp=2), 2, True, marks=pytest.mark.long),
        pytest.param(4, Layout(pp=2, zero=0), 2, False, marks=pytest.mark.long),
        pytest.param(4, Layout(dp_replicate=2), 2, False, marks=pytest.mark.long),
        pytest.param(8, Layout(pp=2, cp=2, tp=2), 4, True, marks=pytest.mark.long),
    ],
)
def test_of_all_tokens(world: int, layout: Layout, passes: int, is_masked: bool) -> None:
    (wanted,) = run_distributed(want, 1, is_masked)
    for got in run_distributed(found, world, layout, passes, is_masked):
        assert_close(got, {name: wanted[name] for name in got})


def measure(balances: bool) -> Any:
    model = make_model(balances)
    parallelize(model, Layout())
    init_weights_(model, seed=3)
    rows = make_rows(is_masked=True)
    return evaluate(model, [rows]).loss


def test_a_validation_loss_is_of_predictions() -> None:
    assert run_distributed(measure, 1, True) == run_distributed(measure, 1, False)
