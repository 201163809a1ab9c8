"""Experts divided over processes against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.errors import ConfigError, DistributedError
from bmforge.models import (
    CPM2,
    CPM2Config,
    Mixtral,
    MixtralConfig,
    Model,
    Qwen2Moe,
    Qwen2MoeConfig,
    Qwen3Moe,
    Qwen3MoeConfig,
    init_weights_,
    load_weights_,
)
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    mesh_of,
    parallelize,
)
from bmforge.parallel.collectives import exchange_rows
from bmforge.parallel.expert import find_mixtures
from bmforge.testing import assert_close, assert_equal_trees, run_distributed
from bmforge.testing.batches import Batch
from bmforge.testing.layouts import check_layout
from bmforge.train.checkpoint.checkpointer import load_checkpoint, save_checkpoint
from bmforge.train.optim.build import OptimConfig, build_optimizers, clip_grad_norm_

TINY: dict[str, Any] = {"vocab_size": 29, "num_layers": 2, "num_heads": 4, "init_std": 0.3}
DECODER: dict[str, Any] = {
    **TINY, "hidden_size": 16, "num_kv_heads": 2, "head_dim": 4, "max_seq_len": 32,
    "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **DECODER, "num_experts": 8, "experts_per_token": 3, "expert_size": 6, "intermediate_size": 20,
    "dense_layers": [0],
}  # fmt: skip


def build_config(family: str) -> tuple[type[Model], Any]:
    """A tiny model with experts, their balance in the loss."""
    if family == "mixtral":
        config = MixtralConfig(**DECODER, num_experts=4, experts_per_token=2, intermediate_size=10)
        return Mixtral, config
    if family == "qwen3":
        return Qwen3Moe, Qwen3MoeConfig(**QWEN)
    if family == "qwen2":
        return Qwen2Moe, Qwen2MoeConfig(**QWEN, shared_size=14)
    sizes = {"hidden_size": 12, "intermediate_size": 10, "head_dim": 3, "num_buckets": 8}
    return CPM2, CPM2Config(**TINY, **sizes, eos_token_id=7, num_experts=4)


def make_batches(family: str, rows: int = 8) -> tuple[Batch, Batch]:
    """Whole batches; the rows have padding and different numbers of labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 29, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[-1, 4:] = 0
    if family == "cpm2":
        labels = torch.randint(0, 29, (rows, 5), generator=generator)
        labels[0, 2:] = -100
        return {"input_ids": ids, "attention_mask": mask}, {"labels": labels}
    return {"input_ids": ids, "attention_mask": mask}, {"labels": ids.masked_fill(mask == 0, -100)}


def compare(family: str, world: int, layout: Layout, recompute: bool = False) -> None:
    """Compare a step on a layout with one process."""
    inputs, labels = make_batches(family)
    model_class, config = build_config(family)
    check_layout(
        model_class, config, inputs, labels, world=world, layout=layout, recompute=recompute
    )


@pytest.mark.parametrize(
    ("family", "world", "layout", "recompute"),
    [
        ("mixtral", 2, Layout(zero=3, ep=2), True),
        ("mixtral", 4, Layout(zero=2, tp=2, ep=2), False),
        ("qwen2", 2, Layout(zero=2, ep=2), False),
        ("qwen3", 4, Layout(zero=3, ep=2), False),
        ("cpm2", 2, Layout(zero=3, ep=2), True),
        ("cpm2", 2, Layout(zero=2), False),
    ],
)
def test_step_equals_one_process(family: str, world: int, layout: Layout, recompute: bool) -> None:
    """Loss, with the balance of all tokens in it, and every gradient."""
    compare(family, world, layout, recompute)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, Layout(zero=2, ep=2)),
        (2, Layout(zero=3, ep=2)),
        (2, Layout(zero=0)),
        (4, Layout(zero=3, ep=2)),
        (4, Layout(zero=2, ep=2)),
        (4, Layout(zero=3, ep=4)),
        (4, Layout(zero=3, ep=2, dp_replicate=2)),
        (4, Layout(zero=3, dp_replicate=2)),
        (2, Layout(zero=3, cp=2, ep=2)),
        (4, Layout(zero=2, cp=2, ep=4)),
        (4, Layout(zero=3, cp=2, ep=2)),
        (4, Layout(zero=3, ep=2, tp=2)),
        (4, Layout(zero=2, ep=2, tp=2, sequence_parallel=True)),
        (8, Layout(zero=3, ep=2, tp=2)),
        (8, Layout(zero=3, ep=2, dp_replicate=2)),
        (8, Layout(zero=2, ep=2, tp=2, dp_replicate=2)),
        (8, Layout(zero=3, ep=4)),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "qwen2", "qwen3", "cpm2"])
def test_matrix(family: str, world: int, layout: Layout, recompute: bool) -> None:
    """Every family on every layout."""
    compare(family, world, layout, recompute)


def rows_of(batch: Batch, mesh: Any) -> Batch:
    """This process's rows."""
    count = next(iter(batch.values())).shape[0] // data_parallel_size(mesh)
    first = data_parallel_rank(mesh) * count
    return {name: tensor[first : first + count] for name, tensor in batch.items()}


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, put together by DTensor itself."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(
    family: str, layout: Layout, directory: str | None = None, accumulate: int = 1
) -> dict[str, Tensor]:
    """Return initial weights, norm and final weights of three steps; save or load on the way."""
    model_class, config = build_config(family)
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, layout, recompute=accumulate > 1)
    init_weights_(model, seed=3)
    out = {f"init/{name}": whole(p) for name, p in model.named_parameters()}
    optimizers = build_optimizers(model, OptimConfig(lr=1e-2))
    inputs, labels = make_batches(family, 8 * accumulate)
    items = model.count_items(labels) / data_parallel_size(mesh_of(model))
    for step in range(3):
        for number in range(accumulate):
            part = {n: t[8 * number : 8 * number + 8] for n, t in (inputs | labels).items()}
            mine = rows_of(part, mesh_of(model))
            model(**mine, num_items_in_batch=items).loss.backward()
        out[f"norm/{step}"] = clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if directory is not None:
        save_checkpoint(directory, model, optimizers, step=3)
        model.save_pretrained(f"{directory}/export-{dist.get_world_size()}")
    return out | {f"final/{name}": whole(p) for name, p in model.named_parameters()}


def check_training(family: str, world: int, layout: Layout, tmp_path: Path, **options: Any) -> None:
    """Compare three steps, and open what they saved on one process and back."""
    want = run_distributed(train, 1, family, Layout(), str(tmp_path / "one"), **options)[0]
    for got in run_distributed(train, world, family, layout, str(tmp_path / "many"), **options):
        init = {name: tensor for name, tensor in got.items() if name.startswith("init/")}
        assert_equal_trees(init, {name: want[name] for name in init})
        assert_close(got, want)
    final = {n.removeprefix("final/"): t for n, t in got.items() if n.startswith("final/")}
    alone = run_distributed(reopen, 1, family, Layout(), tmp_path, f"many/export-{world}")[0]
    assert_equal_trees({n: alone[f"model/{n}"] for n in final}, final)
    assert_equal_trees({n: alone[f"export/{n}"] for n in final}, final)
    for many in run_distributed(reopen, world, family, layout, tmp_path, f"many/export-{world}"):
        assert_equal_trees(many, alone)


def reopen(family: str, layout: Layout, directory: Path, export: str) -> dict[str, Tensor]:
    """Return the weights and optimizer state of a checkpoint, and the weights of an export."""
    model_class, config = build_config(family)
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, layout)
    load_weights_(model, directory / export)
    out = {f"export/{name}": whole(p) for name, p in model.named_parameters()}
    optimizers = build_optimizers(model, OptimConfig(lr=1e-2))
    load_checkpoint(directory / "many", model, optimizers)
    for name, parameter in model.named_parameters():
        out[f"model/{name}"] = whole(parameter)
        for key, value in optimizers[0].state[parameter].items():
            out[f"optim/{name}/{key}"] = whole(value)
    return out


def test_training_and_checkpoints(tmp_path: Path) -> None:
    """Init bit for bit, norm and weights of three steps with accumulation, files both ways."""
    layout = Layout(zero=3, ep=2)
    check_training("mixtral", 2, layout, tmp_path, accumulate=2)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mixtral"])
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, Layout(zero=3, ep=2)),
        (4, Layout(zero=2, ep=2, tp=2)),
        (4, Layout(zero=3, ep=2, dp_replicate=2)),
        (8, Layout(zero=3, ep=2, tp=2)),
    ],
)
def test_training_matrix(family: str, world: int, layout: Layout, tmp_path: Path) -> None:
    """The same on more layouts."""
    check_training(family, world, layout, tmp_path)


def step_lopsided(layout: Layout) -> dict[str, Tensor]:
    """A step in which expert 2 gets no token, and experts 0 and 1, of one process, all of them."""
    model_class, config = build_config("mixtral")
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, layout)
    init_weights_(model, seed=3)
    for mixture in find_mixtures(model).values():
        mixture.router.register_forward_hook(
            lambda module, args, out: out + out.new_tensor([50.0, 40.0, -50.0, 0.0])
        )
    inputs, labels = make_batches("mixtral")
    items = model.count_items(labels) / dist.get_world_size()
    model(**rows_of(inputs | labels, mesh_of(model)), num_items_in_batch=items).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", [Layout(zero=3, ep=2), Layout(zero=2, ep=4)])
def test_experts_and_processes_without_tokens(layout: Layout) -> None:
    """An idle expert has a gradient of zero, whether or not its process has others to work on."""
    want = run_distributed(step_lopsided, 1, Layout())[0]
    assert want["layers.0.mlp.experts.up_proj"][2:].abs().max() == 0
    assert want["layers.0.mlp.experts.up_proj"][:2].abs().min(0).values.max() > 0
    for got in run_distributed(step_lopsided, layout.ep, layout):
        assert_close(got, want)


def exchange_job() -> dict[str, list[Any]]:
    """Rows go where they belong and their gradients back; process 1 sends and gets none."""
    rank = dist.get_rank()
    sent = [[1, 0, 2], [0, 0, 0], [3, 0, 1]][rank]
    received = [[1, 0, 3], [0, 0, 0], [2, 0, 1]][rank]
    x = torch.arange(sum(sent), dtype=torch.float32).add(10 * rank).unsqueeze(1).requires_grad_()
    out = exchange_rows(x, dist.group.WORLD, sent, received)
    (out * (rank + 1)).sum().backward()
    return {"out": out.flatten().tolist(), "grad": x.grad.flatten().tolist()}


def test_exchange() -> None:
    """An uneven exchange by hand."""
    assert run_distributed(exchange_job, 3) == [
        {"out": [0.0, 20.0, 21.0, 22.0], "grad": [1.0, 3.0, 3.0]},
        {"out": [], "grad": []},
        {"out": [1.0, 2.0, 23.0], "grad": [1.0, 1.0, 1.0, 3.0]},
    ]


def half_step(layout: Layout) -> dict[str, Tensor]:
    """A step in bf16."""
    model_class, config = build_config("mixtral")
    model = model_class.from_config(config, device="meta")
    parallelize(model, layout, precision="bf16", recompute=True)
    init_weights_(model, seed=3)
    inputs, labels = make_batches("mixtral")
    items = model.count_items(labels) / dist.get_world_size()
    model(**rows_of(inputs | labels, mesh_of(model)), num_items_in_batch=items).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_half_precision(world: int) -> None:
    """Experts compute in bf16; their gradients are those of ZeRO within its rounding."""
    want = run_distributed(half_step, world, Layout(zero=3))[0]
    for got in run_distributed(half_step, world, Layout(zero=3, ep=2)):
        for name, gradient in got.items():
            assert gradient.dtype == torch.float32
            assert (gradient - want[name]).norm() <= 0.02 * want[name].norm(), name


def capacity_job(layout: Layout) -> tuple[dict[str, Tensor], list[list[int]]]:
    """A step with a capacity; each process's rows in its own forward where there is one process."""
    model_class, config = build_config("mixtral")
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, layout)
    init_weights_(model, seed=3)
    loads = []
    for mixture in find_mixtures(model).values():
        mixture.capacity_factor = 0.75
        mixture.experts.register_forward_pre_hook(
            lambda module, args: loads.append(F.pad(args[1], (1, 0)).diff().tolist())
        )
    model.spec = model.spec.__class__(**{**vars(model.spec), "balance_weight": None})
    inputs, labels = make_batches("mixtral")
    items = model.count_items(labels) / dist.get_world_size()
    mine = rows_of(inputs | labels, mesh_of(model))
    for half in range(2 // dist.get_world_size()):
        part = {n: t[4 * half : 4 * half + 4] for n, t in mine.items()}
        model(**part, num_items_in_batch=items).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}, loads


def test_capacity() -> None:
    """Every process lets an expert take so many of its tokens, wherever the expert is."""
    want, loads = run_distributed(capacity_job, 1, Layout())[0]
    most = 14  # 0.75 x 36 tokens x 2 / 4 experts, rounded up
    assert max(max(load) for load in loads) == most
    for got, far in run_distributed(capacity_job, 2, Layout(zero=3, ep=2)):
        assert_close(got, want)
        assert max(max(load) for load in far) <= 2 * most


def count_job(recompute: bool) -> tuple[list[int], int]:
    """Return the sizes of the all-to-alls of a step: integers in all, and rows' bytes."""
    model_class, config = build_config("mixtral")
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, Layout(zero=3, ep=2), recompute=recompute)
    init_weights_(model, seed=3)
    counts, sent = [], 0
    inner = dist.all_to_all_single

    def record(out: Tensor, given: Tensor, *more: Any, **named: Any) -> Any:
        nonlocal sent
        counts.append(0 if given.is_floating_point() else given.numel())
        sent += given.nbytes if given.is_floating_point() else 0
        return inner(out, given, *more, **named)

    dist.all_to_all_single = record
    try:
        inputs, labels = make_batches("mixtral")
        model(**rows_of(inputs | labels, mesh_of(model))).loss.backward()
    finally:
        dist.all_to_all_single = inner
    return counts, sent


@pytest.mark.parametrize("recompute", [False, True])
def test_communication(recompute: bool) -> None:
    """Per layer forward E integers and 2 M k rows of D, backward the rows; recompute forward's."""
    results = run_distributed(count_job, 2, recompute)
    layers, experts, chosen, tokens, width = 2, 4, 2, 8 * 9, 16 * 8
    forwards = 2 if recompute else 1
    for counts, _ in results:
        assert [n for n in counts if n] == [experts] * layers * forwards
        assert counts.count(0) == 2 * layers * (forwards + 1)
    moved = sum(sent for _, sent in results)
    assert moved == 2 * layers * (forwards + 1) * tokens * chosen * width


def refuse(layout: Layout, family: str | None = None) -> str:
    """Return why a layout is refused."""
    model_class, config = build_config(family or "mixtral")
    if family is None:
        config = config.replace(num_experts=3)
    model = model_class.from_config(config, device="meta")
    with pytest.raises(ConfigError) as caught:
        parallelize(model, layout)
    return str(caught.value)


def test_problems() -> None:
    """What does not fit is said before anything is sent."""
    assert "ep=2 does not divide the 3 experts" in run_distributed(refuse, 2, Layout(ep=2))[1]
    message = run_distributed(refuse, 2, Layout(ep=4), "mixtral")[0]
    assert "ep=4 does not divide dp_shard=2 x cp=1" in message
    message = run_distributed(refuse, 2, Layout(ep=2, dp_replicate=2), "mixtral")[0]
    assert "ep=2 does not divide dp_shard=1" in message
    assert "zero=0 replicates" in run_distributed(refuse, 2, Layout(zero=0, ep=2), "mixtral")[0]
    assert "ep=0 must be at least 1" in Layout(ep=0).problems(2)[0]


def lay_out_dense() -> None:
    """Lay out a model without experts."""
    config = CPM2Config(**TINY, hidden_size=12, intermediate_size=10, head_dim=3, eos_token_id=7)
    parallelize(CPM2.from_config(config, device="meta"), Layout(ep=2))


def test_a_model_without_experts() -> None:
    """There is nothing to divide."""
    with pytest.raises(DistributedError, match="ep=2: CPM2 has no experts"):
        run_distributed(lay_out_dense, 2)
