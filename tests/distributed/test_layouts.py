"""Every layout against one process: loss, gradients, clipped norm, parameters after 3 steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bmforge.errors import ConfigError, DistributedError
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, init_weights_
from bmforge.models.rules import LayoutRules
from bmforge.parallel import Layout, build_mesh, init_distributed, parallelize, run_step
from bmforge.parallel.planner.dry_run import dry_run
from bmforge.records import find_parallel_record, units_of
from bmforge.shards import local_tensor
from bmforge.surgery import wrappers_of
from bmforge.testing import assert_close, assert_equal_trees, run_distributed
from bmforge.train.optim.build import OptimConfig, build_optimizers, clip_grad_norm_

BATCH, LENGTH, STEPS, MICRO = 12, 10, 3, 1


def tiny(family: str):
    """A model whose rows (vocab 29, hidden 20) divide by neither 2, 3 nor 4 throughout."""
    common = {"vocab_size": 29, "hidden_size": 20, "num_layers": 3, "num_heads": 2}
    if family == "gpt2":
        return GPT2.from_config(GPT2Config(**common, max_seq_len=16), device="meta")
    config = LlamaConfig(**common, intermediate_size=27, num_kv_heads=1, head_dim=10)
    return Llama.from_config(config, device="meta")


def batches(dtype: torch.dtype):
    """The whole batches; some labels are left out so that ranks have different counts."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        ids = torch.randint(0, 29, (BATCH, LENGTH), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        yield ids, labels


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def train(family, layout, dtype, recompute=False, accumulate=1, optimizer="adamw"):
    """Three steps on this process's rows; return everything that a layout must not change."""
    world = init_distributed()
    model = tiny(family).to(dtype)
    parallelize(model, layout, recompute=recompute)
    init_weights_(model, seed=3)
    out = {f"init/{n}": full(p) for n, p in model.named_parameters()}
    optimizers = build_optimizers(model, OptimConfig(name=optimizer, lr=1e-2))
    rows = BATCH // (world.size * accumulate)
    for step, (ids, labels) in enumerate(batches(dtype)):
        items = (labels[:, 1:] != -100).sum().item()
        loss = torch.zeros((), dtype=dtype)
        for micro in range(accumulate):
            first = (micro * world.size + world.rank) * rows
            mine = slice(first, first + rows)
            part = model(
                input_ids=ids[mine], labels=labels[mine], num_items_in_batch=items / world.size
            ).loss
            part.backward()
            loss += part.detach()
        if world.size > 1:
            dist.all_reduce(loss)
        out[f"loss/{step}"] = loss / world.size
        if step == 0:
            out.update({f"grad/{n}": full(p.grad) for n, p in model.named_parameters()})
        out[f"norm/{step}"] = clip_grad_norm_(model.parameters(), 0.5).to(dtype)
        for each in optimizers:
            each.step()
            each.zero_grad()
    out.update({f"final/{n}": full(p) for n, p in model.named_parameters()})
    return out


@pytest.fixture(scope="module")
def reference():
    known = {}

    def get(family, dtype, optimizer="adamw"):
        key = (family, dtype, optimizer)
        if key not in known:
            known[key] = run_distributed(train, 1, family, Layout(), dtype, optimizer=optimizer)[0]
        return known[key]

    return get


CASES = [
    pytest.param(2, Layout(zero=2), {}, id="zero2x2"),
    pytest.param(2, Layout(zero=3), {"recompute": True, "accumulate": 2}, id="zero3x2-rc-acc"),
    pytest.param(2, Layout(zero=0), {}, id="replicate2"),
    pytest.param(3, Layout(zero=3), {}, id="zero3x3", marks=pytest.mark.long),
    pytest.param(4, Layout(zero=3), {"recompute": True}, id="zero3x4-rc"),
    pytest.param(4, Layout(zero=2), {"accumulate": 3}, id="zero2x4-acc", marks=pytest.mark.long),
    pytest.param(4, Layout(zero=3, dp_replicate=2), {}, id="hsdp2x2"),
    pytest.param(4, Layout(zero=2, dp_replicate=2), {"recompute": True}, id="hsdp2x2-z2-rc"),
]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("world", "layout", "options"), CASES)
def test_float64_equals_one_process(reference, family, world, layout, options):
    want = reference(family, torch.float64)
    for got in run_distributed(train, world, family, layout, torch.float64, **options):
        init = {n: t for n, t in got.items() if n.startswith("init/")}
        assert_equal_trees(init, {n: want[n] for n in init})
        assert_close(got, want)


@pytest.mark.parametrize(("world", "layout", "options"), CASES)
def test_float32_row(reference, world, layout, options):
    want = reference("gpt2", torch.float32)
    got = run_distributed(train, world, "gpt2", layout, torch.float32, **options)[0]
    for name in (n for n in want if n.startswith("loss/")):
        assert_close(got[name], want[name], rtol=1e-5, atol=0)
    for name in (n for n in want if n.startswith("grad/")):
        difference, size = (got[name] - want[name]).norm(), want[name].norm()
        if name.endswith("k_proj.bias"):  # its true gradient is 0
            assert difference < 1e-6
        else:
            assert difference <= 1e-5 * size, name


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
@pytest.mark.parametrize(("world", "layout", "options"), CASES)
def test_other_optimizers(reference, optimizer, world, layout, options):
    want = reference("gpt2", torch.float64, optimizer)
    kwargs = {**options, "optimizer": optimizer}
    assert_close(run_distributed(train, world, "gpt2", layout, torch.float64, **kwargs)[0], want)


def train_half(precision, recompute=False):
    """Loss of three bf16 or fp16 steps, and the dtypes on the way."""
    world = init_distributed()
    model = tiny("gpt2")
    parallelize(model, Layout(zero=3), precision=precision, recompute=recompute)
    init_weights_(model, seed=3)
    optimizers = build_optimizers(model, OptimConfig(lr=1e-2))
    losses = []
    rows = BATCH // world.size
    for ids, labels in batches(torch.float32):
        mine = slice(world.rank * rows, (world.rank + 1) * rows)
        items = (labels[:, 1:] != -100).sum().item() / world.size
        out = model(input_ids=ids[mine], labels=labels[mine], num_items_in_batch=items)
        out.loss.backward()
        total = out.loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total / world.size)
        optimizers[0].step()
        optimizers[0].zero_grad()
    dtypes = {str(p.dtype) for p in model.parameters()} | {str(out.last_hidden_state.dtype)}
    return torch.stack(losses), dtypes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_fp32_on_one_and_two_processes(precision):
    exact = run_distributed(train_half, 1, "fp32")[0][0]
    for world in (1, 2):
        losses, dtypes = run_distributed(train_half, world, precision, recompute=world == 2)[0]
        half = "torch.bfloat16" if precision == "bf16" else "torch.float16"
        assert dtypes == {"torch.float32", half}
        assert_close(losses, exact, rtol=2e-2, atol=0)


def lay_out(layout, kwargs):
    parallelize(tiny("gpt2"), layout, **kwargs)


@pytest.mark.parametrize(
    ("world", "layout", "kwargs", "words"),
    [
        (3, Layout(dp_replicate=2), {}, ["dp_replicate=2", "does not divide the 3 processes"]),
        (3, Layout(tp=3), {}, ["tp=3 does not divide", "heads", "q_proj"]),
        (2, Layout(sequence_parallel=True), {}, ["sequence_parallel has no effect with tp=1"]),
        (2, Layout(pp=2, pp_schedule="1f2b"), {}, ["schedule='1f2b'", "did you mean '1f1b'"]),
        (
            2,
            Layout(pp=2, pp_cut=(2, 2)),
            {},
            ["pp_cut=(2, 2) must contain 2 positive numbers", "with the sum"],
        ),
        (2, Layout(pp=2, pp_balance="time"), {}, ["pp_balance='time'"]),  # type: ignore[arg-type]
        (2, Layout(pp=2, pp_schedule="zbv", pp_stages_per_rank=3), {}, ["stages_per_rank=3"]),
        (4, Layout(pp=4), {}, ["pp=4 needs 4 stages, but the model has only"]),
        (2, Layout(pp_schedule="gpipe"), {}, ["pp_schedule='gpipe' has no effect with pp=1"]),
        (1, Layout(zero=1), {}, ["zero=1 must be 0, 2 or 3"]),  # type: ignore[arg-type]
        (2, Layout(zero=0, dp_replicate=2), {}, ["no effect"]),
        (1, Layout(), {"precision": "bf17"}, ["precision='bf17'", "bf16"]),
        (2, Layout(), {"prefetch": -1, "precision": "int8"}, ["prefetch=-1", "int8"]),
    ],
)
def test_what_does_not_fit_is_said_on_every_rank(world, layout, kwargs, words):
    with pytest.raises(DistributedError) as caught:
        run_distributed(lay_out, world, layout, kwargs)
    for word in [*words, "ConfigError", *(f"rank {r}:" for r in range(world))]:
        assert word in str(caught.value)


def lay_out_own(layout):
    blocks = [torch.nn.Linear(4, 4) for _ in range(3)]
    parallelize(torch.nn.Sequential(*blocks), layout)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_a_model_without_rules_is_refused(axis):
    with pytest.raises(DistributedError, match=rf"(?s)rank 0.*{axis}=2.*rank 1.*{axis}=2"):
        run_distributed(lay_out_own, 2, Layout(**{axis: 2}))


def list_units():
    model = parallelize(tiny("llama"), Layout(pp=2, pp_cut=(1, 2)), recompute=True)
    assert find_parallel_record(model).layout.pp == 2
    return [
        (unit.name, unit.stage, dict(wrappers_of(unit.module)).keys() == {"recompute"})
        for unit in units_of(model)
    ]


def test_units_are_those_of_this_stage():
    """The list that everybody uses has what is here, and says where; all of it is recomputed."""
    first, second = run_distributed(list_units, 2)
    assert first == [("layers.0", 0, True)]
    assert second == [("layers.1", 1, True), ("layers.2", 1, True)]


def lay_out_without_a_place():
    """What a stage carries on would arrive nowhere."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    parallelize(model, Layout(pp=2), LayoutRules(("blocks.*",), ("blocks.*",), stacks=("blocks",)))


def test_a_pipeline_needs_a_place_to_arrive():
    with pytest.raises(
        DistributedError, match=r"Module has no attribute `stage_inputs`.*add `stage_inputs = "
    ):
        run_distributed(lay_out_without_a_place, 2)


def step_with_too_few():
    config = GPT2Config(vocab_size=9, hidden_size=4, num_layers=4, num_heads=1, max_seq_len=4)
    model = GPT2.from_config(config, device="meta")
    parallelize(model, Layout(pp=2, pp_schedule="dualpipev"))
    ids = torch.zeros(1, 4, dtype=torch.long)
    run_step(model, lambda b: model(**b).loss, [{"input_ids": ids, "labels": ids}])


def test_too_few_micro_batches_are_refused():
    with pytest.raises(DistributedError, match=r"(?s)num_micro_batches=1.*rank 1.*num_micro_batc"):
        run_distributed(step_with_too_few, 2)


def call_with_gradients():
    model = parallelize(tiny("gpt2"), Layout(pp=2))
    model(input_ids=torch.zeros(1, 4, dtype=torch.long))


def test_a_pipeline_is_trained_by_steps():
    with pytest.raises(DistributedError, match="a pipelined model cannot compute gradients"):
        run_distributed(call_with_gradients, 2)


def ask_for_hidden_states():
    model = init_weights_(parallelize(tiny("llama"), Layout(pp=2)))
    with torch.no_grad():
        model(torch.zeros(2, 4, dtype=torch.long), output_hidden_states=True)


def test_hidden_states_do_not_cross_a_pipeline():
    with pytest.raises(DistributedError, match="is not supported with pp above 1"):
        run_distributed(ask_for_hidden_states, 2)


def lay_out_on_anothers_mesh():
    world = init_distributed()
    parallelize(tiny("llama"), Layout(), mesh=build_mesh(Layout(tp=2), world.device))


def test_a_mesh_of_another_layout_is_refused():
    with pytest.raises(DistributedError, match=r"'tp': 2.*needs.*'tp': 1"):
        run_distributed(lay_out_on_anothers_mesh, 2)


def test_dry_run_is_what_will_be():
    """Every process's share as built here is what that process will hold."""
    layout = Layout(tp=2, pp=2)
    found = dry_run(lambda: tiny("llama"), layout, 8)
    assert found.axes == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert found.parameters == sum(p.numel() for p in tiny("llama").parameters())
    real = run_distributed(count_share, 8, layout)
    assert [share.rank for share in found.shares] == [0, 4]
    assert [share.parameters for share in found.shares] == [real[0], real[4]]
    assert [share.stages for share in found.shares] == [(0,), (1,)]
    with pytest.raises(ConfigError, match="tp=3 does not divide"):
        dry_run(lambda: tiny("llama"), Layout(tp=3), 6)


def count_share(layout):
    model = parallelize(tiny("llama"), layout)
    return sum(local_tensor(p).numel() for p in model.parameters())


def test_layout_problems_without_processes():
    assert Layout(zero=3).problems(5) == []
    with pytest.raises(ConfigError, match="tp=0 must be at least 1"):
        Layout(tp=0).check(4)
