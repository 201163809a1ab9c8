"""Context parallelism against one process: every family, method and combination."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_cases import BATCH, CASES, METHODS, Case, draw, gpt2, llama, mixtral, packed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.infer import KVCache
from bmforge.models import OPT, OPTConfig, init_weights_
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    mesh_of,
    parallelize,
    sum_over_axes,
)
from bmforge.parallel.context.divide import context_problems
from bmforge.testing import assert_close, run_distributed
from bmforge.testing.layouts import check_layout
from bmforge.train import TrainConfig, Trainer, clip_grad_norm_, evaluate
from bmforge.train.optim.build import OptimConfig


@pytest.mark.parametrize("name", CASES)
def test_families(name: str) -> None:
    """Thirteen tokens on two processes, with each family's masks, biases and losses."""
    method = METHODS[sorted(CASES).index(name) % 3]
    check_layout(*CASES[name](), world=2, layout=Layout(cp=2, cp_method=method))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_families_by_every_method(name: str, method: str) -> None:
    """All of them, with recompute, on two processes and on four."""
    case = CASES[name]()
    for size in (2, 4):
        layout = Layout(cp=size, cp_method=method)
        check_layout(*case, world=size, layout=layout, recompute=size == 2)


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (4, {"cp": 2, "zero": 0}),
        (4, {"cp": 2, "tp": 2, "sequence_parallel": True, "cp_method": "ring"}),
        (4, {"cp": 4}),
    ],
)
def test_with_other_axes(world: int, fields: dict[str, Any]) -> None:
    """Context parallelism beside ZeRO and tensor parallelism, on four processes."""
    check_layout(*llama(14), world=world, layout=Layout(**fields), recompute=True)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (4, {"cp": 2, "zero": 0}),
        (4, {"cp": 2, "zero": 2}),
        (4, {"cp": 2, "zero": 3}),
        (4, {"cp": 2, "tp": 2}),
        (4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
        (8, {"cp": 2, "dp_replicate": 2}),
        (8, {"cp": 2, "tp": 2, "zero": 0}),
        (8, {"cp": 2, "tp": 2, "zero": 3, "sequence_parallel": True}),
        (8, {"cp": 4, "zero": 2}),
    ],
)
def test_families_with_other_axes(world: int, fields: dict[str, Any], method: str) -> None:
    """Families of every kind beside the other axes; sixteen tokens, which tp divides."""
    for name in ("packed", "classifier", "t5", "longformer", "mixtral", "cpm_ant"):
        model, config, inputs, wanted = CASES[name]() if name == "longformer" else CASES[name](16)
        layout = Layout(**fields, cp_method=method)
        check_layout(model, config, inputs, wanted, world=world, layout=layout)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 16])
def test_lengths(length: int, method: str) -> None:
    """From fewer tokens than there are pieces of a row on; some processes may have one chunk."""
    for make in (llama, packed, mixtral):
        model, config, inputs, _ = make(16)
        inputs = {n: t[:, :length] for n, t in inputs.items()}
        wanted = {"labels": draw(BATCH, length, seed=2)}
        for size in (2, 4):
            layout = Layout(cp=size, cp_method=method)
            check_layout(model, config, inputs, wanted, world=size, layout=layout)


def run_outputs(make: Any, layout: Layout, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What a model returns without labels and gradients, and from a cache."""
    init_distributed()
    model_class, config, inputs, _ = make()
    model = model_class.from_config(config, device="meta", dtype=dtype)
    init_weights_(parallelize(model, layout), seed=3)
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
        found = {n: t for n, t in out._asdict().items() if t is not None}
        cache = KVCache(config.num_layers, 16)
        first = model(inputs["input_ids"][:, :8], cache=cache).logits
        second = model(inputs["input_ids"][:, 8:], cache=cache).logits
    return found | {"cached": torch.cat((first, second), 1)}


@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_whole(method: str) -> None:
    """Every process returns all logits and hidden states; with a cache all compute alike."""
    make = mixtral_without_padding
    want = run_distributed(run_outputs, 1, make, Layout())[0]
    assert_close(want["cached"], want["logits"])
    layout = Layout(cp=2, cp_method=method)
    for got in run_distributed(run_outputs, 2, make, layout):
        assert len(got["hidden_states"]) == 3
        assert_close(_flat(got), _flat(want))


def mixtral_without_padding() -> Case:
    model, config, inputs, wanted = mixtral()
    return model, config, {"input_ids": inputs["input_ids"]}, wanted


def _flat(found: dict[str, Any]) -> dict[str, Tensor]:
    trees = {n: t if isinstance(t, tuple) else (t,) for n, t in found.items()}
    return {f"{n}/{i}": t for n, tree in trees.items() for i, t in enumerate(tree)}


@pytest.mark.parametrize("method", METHODS)
def test_dropped_weights(method: str) -> None:
    """With dropout on the weights, too little to drop any, attention takes its other way."""
    check_layout(*gpt2(attn_dropout=1e-13), world=2, layout=Layout(cp=2, cp_method=method))


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_single_precision(method: str) -> None:
    """In fp32, loss and gradients differ by the order of summation only."""
    arguments = (*llama(), torch.float32)
    want = run_distributed(run_gradients, 1, *arguments, Layout())[0]
    for got in run_distributed(run_gradients, 2, *arguments, Layout(cp=2, cp_method=method)):
        for name, tensor in want.items():
            assert (got[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def run_gradients(
    model_class: Any, config: Any, inputs: Any, wanted: Any, dtype: torch.dtype, layout: Layout
) -> dict[str, Tensor]:
    """The loss and every gradient of one step."""
    init_distributed()
    model = parallelize(model_class.from_config(config, device="meta", dtype=dtype), layout)
    init_weights_(model, seed=3)
    loss = model(**inputs, **wanted).loss
    loss.backward()
    total = sum_over_axes(loss.detach(), mesh_of(model), "cp") / layout.cp
    return {"loss": total, **{n: full(p.grad) for n, p in model.named_parameters()}}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_outside(layout: Layout) -> dict[str, Tensor]:
    """Gradients of a loss that is computed from the logits, outside of the model."""
    init_distributed()
    model_class, config, inputs, wanted = llama()
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    init_weights_(parallelize(model, layout), seed=3)
    logits = model(**inputs).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted["labels"][:, 1:].flatten()).backward()
    return {n: full(p.grad) for n, p in model.named_parameters()}


def test_loss_outside_of_the_model() -> None:
    """All processes compute it alike; the mean of their gradients is its gradient."""
    want = run_distributed(run_outside, 1, Layout())[0]
    for got in run_distributed(run_outside, 2, Layout(cp=2)):
        assert_close(got, want)


def run_plain_loop(layout: Layout) -> dict[str, Tensor]:
    """What a loop of three lines gets, and what `evaluate` says, told nothing of the layout."""
    init_distributed()
    model_class, config, inputs, _ = llama()
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    init_weights_(parallelize(model, layout), seed=3)
    count = BATCH // data_parallel_size(mesh_of(model))
    first = data_parallel_rank(mesh_of(model)) * count
    ids = inputs["input_ids"][first : first + count]
    mine = {"input_ids": ids, "labels": ids}  # equally many on every process
    model(**mine).loss.backward()
    found = {n: full(p.grad).clone() for n, p in model.named_parameters()}
    result = evaluate(model, [mine])
    return {
        **found,
        "norm": clip_grad_norm_(model, 1.0),
        "held": torch.tensor([result.loss, result.tokens], dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (2, {"cp": 2}),
        (4, {"cp": 2, "zero": 3}),
        (2, {"zero": 3}),
        pytest.param(4, {"cp": 2, "tp": 2}, marks=pytest.mark.long),
    ],
)
def test_a_plain_loop(world: int, fields: dict[str, Any]) -> None:
    """Gradients, norm and evaluation of a loop that does not know of its layout."""
    want = run_distributed(run_plain_loop, 1, Layout())[0]
    for got in run_distributed(run_plain_loop, world, Layout(**fields)):
        assert_close(got, want)


class Rows:
    """A loader that gives every process its rows of the same batches."""

    def __init__(self, model: Any) -> None:
        mesh = mesh_of(model)
        self.count = BATCH // data_parallel_size(mesh)
        self.first, self.step = data_parallel_rank(mesh) * self.count, 0

    def __next__(self) -> list[dict[str, Tensor]]:
        self.step += 1
        mine = slice(self.first, self.first + self.count)
        ids = draw(BATCH, 12, seed=self.step)
        return [{"input_ids": ids[mine], "labels": ids.masked_fill(ids < 9, -100)[mine]}]


def run_training(layout: Layout) -> dict[str, Tensor]:
    """Three steps: losses, norms before clipping, and the parameters after them."""
    init_distributed()
    model_class, config, *_ = llama()
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    init_weights_(parallelize(model, layout), seed=3)
    settings = TrainConfig(steps=3, grad_clip=0.1, optim=OptimConfig(lr=1e-2))
    trainer = Trainer(model, Rows(model), settings)
    rows = [trainer.train_step()[0] for _ in range(3)]
    found = {n: full(p.detach()).clone() for n, p in model.named_parameters()}
    for name in ("loss", "grad_norm", "tokens"):
        found[name] = torch.tensor([row[name] for row in rows], dtype=torch.float64)
    return found


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (2, {"cp": 2}),
        (4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
        pytest.param(4, {"cp": 2, "zero": 0}, marks=pytest.mark.long),
        pytest.param(8, {"cp": 2, "dp_replicate": 2, "tp": 2}, marks=pytest.mark.long),
    ],
)
def test_training(world: int, fields: dict[str, Any]) -> None:
    """Loss, clipped norm and parameters of three steps are those of one process."""
    want = run_distributed(run_training, 1, Layout())[0]
    for got in run_distributed(run_training, world, Layout(**fields)):
        assert_close(got, want)


def drop_layers(layout: Layout | None) -> Tensor:
    """The loss of a model that leaves out half of its blocks; processes draw from other seeds."""
    sizes = {"vocab_size": 17, "hidden_size": 8, "num_heads": 2, "max_seq_len": 16}
    config = OPTConfig(**sizes, num_layers=8, layer_drop=0.5, dropout=0.0)
    model = OPT.from_config(config, device="meta", dtype=torch.float64)
    if layout is not None:
        parallelize(model, layout)
    init_weights_(model, seed=3)
    torch.manual_seed(7 + dist.get_rank())
    ids = torch.arange(26).view(2, 13) % 17
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    return sum_over_axes(loss.detach(), mesh_of(model), "cp") / (1 if layout is None else layout.cp)


def test_a_block_is_left_out_by_all_or_by_none() -> None:
    """Processes that share rows leave out the blocks that the first one draws."""
    (want,) = run_distributed(drop_layers, 1, None)
    for got in run_distributed(drop_layers, 2, Layout(cp=2)):
        assert_close(got, want)


def test_stacks_of_other_blocks_are_told_from_none() -> None:
    """A module of one's own with stacks, whose blocks have no attention by its name."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert "no block has" in context_problems(model, [model.blocks], 2, "ring", 1)[0]
    assert "no layout rules that list" in context_problems(model, [], 2, "ring", 1)[0]
