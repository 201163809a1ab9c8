"""The planner against what is known otherwise: deeper traces, a real run, closed forms, replays."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import bmforge.parallel
from bmforge.cli.plan_workload import read_model, workload_of
from bmforge.errors import ConfigError
from bmforge.models import init_weights_
from bmforge.models.bert import BertConfig
from bmforge.models.changes import Change
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.llama import Llama, LlamaConfig
from bmforge.models.t5 import T5Config
from bmforge.parallel import Layout, init_distributed, parallelize, run_step, shutdown_distributed
from bmforge.parallel.pipeline.replay import replay
from bmforge.parallel.pipeline.schedules import write_schedule
from bmforge.parallel.planner import trace as tracing
from bmforge.parallel.planner.estimate import Estimator, PlanRequest, TrainingSetup
from bmforge.parallel.planner.hardware import Cluster, find_device, parse_interconnect
from bmforge.parallel.planner.peak import (
    Share,
    all_blocks,
    count_parameters,
    count_work,
    peak_memory,
)
from bmforge.parallel.planner.search import plan
from bmforge.parallel.planner.step_time import StepWork, TrainingEngine, step_time
from bmforge.parallel.planner.storage_tracker import PARTS
from bmforge.parallel.planner.trace import Setting, trace_step
from bmforge.recipes.adapters import AdapterConfig, with_adapter
from bmforge.recipes.base_weights import quantize_base_
from bmforge.recipes.run import RunConfig
from bmforge.surgery import persistent_tensors

SMALL = {"vocab_size": 512, "hidden_size": 64, "num_heads": 4, "num_layers": 6}
TINY = GPT2Config(**SMALL, max_seq_len=64)
CONFIGS: dict[str, Any] = {
    "gpt2": TINY,
    "llama": LlamaConfig(**SMALL, intermediate_size=160, max_seq_len=64),
    "bert": BertConfig(**SMALL, intermediate_size=160, max_seq_len=64),
    "t5": T5Config(**SMALL, intermediate_size=160, head_dim=16),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A plan needs a process that has joined no group."""
    shutdown_distributed()
    yield
    shutdown_distributed()


def request_for(config: Any = TINY, gpus: int = 8, batch: int = 16, **changes: Any) -> PlanRequest:
    cluster = Cluster(find_device("a100-40gb"), gpus)
    return PlanRequest(workload_of("small", config, 64), cluster, batch, **changes)


def test_the_pinned_name_is_the_function() -> None:
    """Whatever else of the room has been imported before."""
    for module in pkgutil.iter_modules(bmforge.parallel.__path__):
        importlib.import_module(f"bmforge.parallel.{module.name}")
    from bmforge.parallel import PlanRequest as Asked
    from bmforge.parallel import plan as pinned

    assert pinned is plan
    assert Asked is PlanRequest


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("gpt2", Setting(Layout(), 4, 4, "bf16")),
        pytest.param(
            "gpt2",
            Setting(Layout(zero=2), 2, 2, "bf16", accumulates=True, piped=True),
            marks=pytest.mark.long,
        ),
        ("llama", Setting(Layout(tp=2, sequence_parallel=True), 2, 4, "bf16", recompute=True)),
        pytest.param("t5", Setting(Layout(zero=2), 2, 2, "fp32"), marks=pytest.mark.long),
        pytest.param(
            "t5",
            Setting(Layout(tp=2, sequence_parallel=True), 2, 4, "bf16", recompute=True),
            marks=pytest.mark.long,
        ),
    ],
)
def test_three_blocks_tell_of_six(
    family: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The composed peak is that of a trace of the whole depth; so is the work."""
    workload = workload_of(family, CONFIGS[family], 64)
    short = trace_step(workload, setting)
    composed, work = (
        peak_memory(short, Share(all_blocks(short, 6))),
        count_work(short, all_blocks(short, 6)),
    )
    monkeypatch.setattr(tracing, "BLOCKS", 6)
    deep = trace_step(workload, setting)
    live = np.cumsum([change for change, *_ in deep.events])
    assert composed.total == pytest.approx(live.max() + 3 * deep.static, rel=1e-12)
    sent = PARTS.index("communication")
    events = deep.events[: live.argmax() + 1]
    there = sum(change for change, part, _ in events if part == sent)
    assert composed.parts["communication"] == pytest.approx(there, rel=1e-12)
    if not setting.piped:  # there the last of two micro-batches is asked for
        assert work[0] == pytest.approx(deep.flops, rel=1e-12)
        assert work[1] == pytest.approx(deep.traffic_bytes, rel=0.01)


@pytest.mark.parametrize("layout", [Layout(), Layout(zero=3, tp=2)])
def test_kinds_of_blocks_tell_of_six(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that differ: composed of a trace of every kind, as a trace of the whole depth."""
    narrow = Change("resize", ("layers.2", "layers.3"), {"num_heads": 2, "intermediate_size": 48})
    config = CONFIGS["llama"].replace(changes=(narrow,))
    workload, setting = workload_of("llama", config, 64), Setting(layout, 2, 4, "bf16")
    assert [count for _, count in workload.kinds] == [2]
    short = trace_step(workload, setting)
    composed, work = (
        peak_memory(short, Share(all_blocks(short, 6))),
        count_work(short, all_blocks(short, 6)),
    )
    whole = replace(workload, build=lambda _: workload.whole(), kinds=())
    monkeypatch.setattr(tracing, "BLOCKS", 6)
    deep = trace_step(whole, setting)
    live = np.cumsum([change for change, *_ in deep.events]).max() + 3 * deep.static
    assert composed.total == pytest.approx(live, rel=1e-12)
    assert work[0] == pytest.approx(deep.flops, rel=1e-12)
    assert work[1] == pytest.approx(deep.traffic_bytes, rel=0.01)
    numbers, _ = count_parameters(short, all_blocks(short, 6), ends=0)
    inside = [p.numel() for n, p in whole.build(6).named_parameters() if n.startswith("layers.")]
    assert numbers * layout.tp == pytest.approx(sum(inside), rel=0.05)


def test_layers_without_a_part_can_be_planned() -> None:
    """Published sizes whose layers lack parts, windows by layer, dense layers among experts."""
    for name in ("cpm-ant-1b", "longformer-base-4096", "qwen2.5-7b"):
        family, config = read_model(name)
        workload = workload_of(name, config, 64)
        model = family.from_config(config, device="meta")
        counts = [config.num_layers - sum(n for _, n in workload.kinds)]
        counts += [n for _, n in workload.kinds]
        builds = [workload.build, *(build for build, _ in workload.kinds)]
        sizes = [sum(p.numel() for p in b(1).layers["0"].parameters()) for b in builds]
        total = sum(n * size for n, size in zip(counts, sizes, strict=True))
        assert total == sum(p.numel() for p in model.layers.parameters())


def test_earlier_gradients_are_as_large_as_the_parameters() -> None:
    workload = workload_of("gpt2", TINY, 64)
    trace = trace_step(workload, Setting(Layout(), 4, 4))
    plain = peak_memory(trace, Share(all_blocks(trace, 6)))
    trace = trace_step(workload, Setting(Layout(), 4, 4, accumulates=True))
    later = peak_memory(trace, Share(all_blocks(trace, 6)))
    assert later.parts["gradients"] == later.parts["parameters"]
    assert later.total - plain.total == pytest.approx(
        later.parts["gradients"] - plain.parts["gradients"]
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_a_real_run_on_this_machine(recompute: bool) -> None:
    """The allocator's high-water mark of two real steps, seen by torch's profiler."""
    config = GPT2Config(**{**SMALL, "hidden_size": 128, "num_layers": 4}, max_seq_len=64)
    choice = TrainingSetup(Layout(zero=0), 16, recompute)
    said = Estimator(request_for(config, 1, 16, precision="fp32")).estimate(choice).memory
    ids = torch.randint(512, (16, 64))
    init_distributed()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = GPT2.from_config(config, device="meta")
        parallelize(model, Layout(zero=0), recompute=recompute)
        init_weights_(model, 0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            run_step(model.train(), lambda b: model(**b).loss, [{"input_ids": ids, "labels": ids}])
            optimizer.step()
            optimizer.zero_grad()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    assert said.total == pytest.approx(np.cumsum(changes).max(), rel=0.01)


@pytest.mark.parametrize(
    ("base", "recompute"),
    [
        ("int4", True),
        (None, False),
        pytest.param(None, True, marks=pytest.mark.long),
        pytest.param("int8", False, marks=pytest.mark.long),
        pytest.param("int8", True, marks=pytest.mark.long),
        pytest.param("int4", False, marks=pytest.mark.long),
    ],
)
def test_a_real_run_with_an_adapter(base: str | None, recompute: bool) -> None:
    """LoRA on a float or quantized base: the allocator's high-water mark of a real step."""
    config: Any = replace(CONFIGS["llama"], hidden_size=128, num_layers=4, intermediate_size=320)
    if base is not None:
        quantize_base_(model := Llama.from_config(config, device="meta"), base)
        config = model.config
    config = with_adapter(Llama, config, RunConfig(adapter=AdapterConfig(kind="lora", rank=8)))
    workload = workload_of("small", config, 64, ())
    cluster = Cluster(replace(find_device("a100-40gb"), is_host=True), 1)
    choice = TrainingSetup(Layout(zero=0), 16, recompute)
    said = Estimator(PlanRequest(workload, cluster, 16, "fp32")).estimate(choice).memory
    ids = torch.randint(512, (16, 64))
    init_distributed()
    model = workload.whole()
    parallelize(model, Layout(zero=0), recompute=recompute)
    init_weights_(model, 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)

    def step() -> None:
        run_step(model.train(), lambda b: model(**b).loss, [{"input_ids": ids, "labels": ids}])
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's states
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    static = sum(t.untyped_storage().nbytes() for t in persistent_tensors(model).values())
    static += sum(2 * 4 * p.numel() for p in trained)
    assert said.total == pytest.approx(static + np.cumsum(changes).max(), rel=0.01)


def test_products_are_those_of_the_formula() -> None:
    """6 per weight and token and 12 L D T for attention, of which causal kernels do half."""
    whole = TINY.flops_per_token(64)
    attention = 12 * TINY.num_layers * TINY.hidden_size * 64
    trace = trace_step(workload_of("gpt2", TINY, 64), Setting(Layout(zero=0), 1, 2, "fp32"))
    flops, _ = count_work(trace, all_blocks(trace, 6))
    # Torch's kernels make five products in backward where the formula has four.
    kernels = attention * 7 / 6 / 2
    assert flops / (2 * 64) == pytest.approx(whole - attention + kernels, rel=1e-6)


def test_state_is_what_adamw_keeps() -> None:
    row = Estimator(request_for()).estimate(TrainingSetup(Layout(), 2))
    numbers = sum(p.numel() for p in GPT2.from_config(TINY, device="meta").parameters())
    assert row.memory.parts["parameters"] == pytest.approx(4 * numbers / 8, rel=0.01)
    assert row.memory.parts["optimizer"] == 2 * row.memory.parts["parameters"]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("seq_len", [8, 64])
def test_no_part_of_the_memory_is_negative(zero: int, seq_len: int) -> None:
    deep = LlamaConfig(**{**SMALL, "num_layers": 48}, intermediate_size=192, max_seq_len=64)
    gpus = 8 if zero else 1
    cluster = Cluster(find_device("a100-40gb"), gpus)
    request = PlanRequest(workload_of("small", deep, seq_len), cluster, gpus)
    row = Estimator(request).estimate(TrainingSetup(Layout(zero=zero), 1))
    assert min(row.memory.parts.values()) >= 0, row.memory.parts


def test_context_parallel_processes_share_the_shards() -> None:
    """ZeRO shards over all processes, those of the axis `cp` among them."""
    plain, cut = (
        Estimator(request_for(batch=8), exact_shards=exact).estimate(
            TrainingSetup(Layout(cp=cp), 1)
        )
        for cp, exact in ((1, True), (4, True))
    )
    assert cut.memory.parts["parameters"] == plain.memory.parts["parameters"]
    short = Estimator(request_for(batch=8)).estimate(TrainingSetup(Layout(cp=4), 1))
    assert short.memory.parts["parameters"] == pytest.approx(plain.memory.parts["parameters"])


def test_collectives_on_processors_copy_what_they_gather_and_scatter() -> None:
    """A second buffer that goes as it comes, as large as the whole: padded to equal shards."""
    workload = workload_of("gpt2", TINY, 64)
    plain, copied = (
        trace_step(workload, Setting(Layout(), 2, 1, "fp32", copies=copies))
        for copies in (False, True)
    )
    extra = Counter(c for c, *_ in copied.events) - Counter(c for c, *_ in plain.events)
    assert extra == Counter({-size: times for size, times in extra.items()})
    block = next(n for name, n in plain.parameters.items() if name)
    # Three blocks: gathered forward and, but for the last, again backward; scattered once.
    assert extra[4 * block] == 3 + 3 + 3


def test_offloading_leaves_half_precision_weights() -> None:
    estimator = Estimator(request_for())
    here, away = (estimator.estimate(TrainingSetup(Layout(), 2, offloaded=f)) for f in (0.0, 1.0))
    assert away.memory.parts["optimizer"] == 0
    assert away.memory.parts["parameters"] == here.memory.parts["parameters"] / 2
    assert away.times.parts["optimizer"] == 0
    small = replace(estimator.request.cluster, host_memory_gib=1e-6)
    estimator.request = replace(estimator.request, cluster=small)
    assert not estimator.estimate(TrainingSetup(Layout(), 2, offloaded=1.0)).fits


def test_a_processor_offloads_states_to_disk_and_keeps_gradients() -> None:
    trace = trace_step(workload_of("gpt2", TINY, 64), Setting(Layout(zero=0), 1, 2, "fp32"))
    here = peak_memory(trace, Share(all_blocks(trace, 6), half=False))
    away = peak_memory(
        trace, Share(all_blocks(trace, 6), half=False, offloaded=1.0, gradients_leave=False)
    )
    assert away.parts == {**here.parts, "optimizer": 0.0}


def test_pipeline_bubble_is_that_of_the_schedule() -> None:
    work = StepWork(1e12, 0.0, 16, 0.0, 6, 0.0, 1)
    times = step_time(work, Cluster(find_device("h100-80gb"), 4), Layout(zero=0, pp=4), "bf16")
    schedule = replay(write_schedule("1f1b", 4, 16))
    assert times.parts["bubble"] / times.total == pytest.approx(schedule.bubble_ratios[0])


def test_other_engines_and_nodes_without_a_switch() -> None:
    """Collectives are counted one by one; a pair has one link of three in a node of four."""
    work = StepWork(0.0, 0.0, 4, 1e9, 10, 0.0, 1)
    cluster = Cluster(find_device("h200"), 4, per_node=4)
    layout, usual = Layout(zero=0, tp=2), 8 * 10 * 4 * 0.5 / (0.8 * 450)
    ours = step_time(work, cluster, layout, "bf16").parts["tensor parallel"]
    assert ours == pytest.approx(usual)
    more = step_time(work, cluster, layout, "bf16", engine=TrainingEngine((7, 7, 6)))
    assert more.parts["tensor parallel"] == pytest.approx(usual * 14 / 8)
    bare = step_time(work, replace(cluster, has_switch=False), layout, "bf16")
    assert bare.parts["tensor parallel"] == pytest.approx(usual * 3)
    work = replace(work, parameters=4e9, shards=2)
    always, once = (
        step_time(
            work, cluster, Layout(zero=2), "bf16", engine=TrainingEngine(reduces_once=reduces)
        )
        for reduces in (False, True)
    )
    gathers, reduction = 4e9 * 2 * 0.5 / 360e9, 4e9 * 4 * 0.5 / 360e9
    assert always.parts["sharding"] == pytest.approx(4 * (gathers + reduction))
    assert once.parts["sharding"] == pytest.approx(4 * gathers + reduction)


def test_the_first_rank_of_a_pipeline_has_no_head() -> None:
    trace = trace_step(
        workload_of("llama", CONFIGS["llama"], 64),
        Setting(Layout(zero=0), 1, 2, "fp32", accumulates=True, piped=True),
    )
    half = all_blocks(trace, 3)
    first = peak_memory(trace, Share(half, in_flight=2, last=False))
    last = peak_memory(trace, Share(half, first=False))
    assert first.parts["logits"] == 0 < last.parts["logits"]
    weights = trace.block_static["layers"] * 3
    assert first.parts["gradients"] == weights + trace.ends_static[0]
    one = peak_memory(trace, Share(half, in_flight=1, last=False))
    assert first.parts["activations"] > 1.5 * one.parts["activations"]


@pytest.mark.long
def test_two_processes_plan_what_one_does() -> None:
    request = request_for(gpus=8, batch=16)
    assert plan(request, processes=2) == plan(request)


def test_a_trace_is_the_same_the_second_time() -> None:
    """What torch does once to learn the shapes of cut tensors is no memory of the model's."""
    choice = TrainingSetup(Layout(zero=2, tp=2, sequence_parallel=True), 1)
    first, second = (Estimator(request_for(gpus=4)) for _ in range(2))
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    first.estimate(choice)
    second.estimate(choice)
    assert first.traces == second.traces


def test_pipeline_ranks_hold_their_blocks() -> None:
    """Four ranks: a quarter of the blocks each, and four micro-batches in flight on the first."""
    estimator = Estimator(request_for(gpus=4))
    row = estimator.estimate(TrainingSetup(Layout(zero=0, pp=4), 1))
    alone = Estimator(request_for(gpus=1)).estimate(TrainingSetup(Layout(zero=0), 1))
    assert row.memory.parts["parameters"] < 0.5 * alone.memory.parts["parameters"]


def test_plan_ranks_what_fits_by_speed() -> None:
    found = plan(request_for(gpus=4, batch=4), layouts=(Layout(), Layout(tp=3)))
    assert found.winner is found.rows[0]
    times = [row.times.total for row in found.rows]
    assert times == sorted(times)
    assert all(row.fits for row in found.rows)
    ((layout, reason),) = found.refused
    assert layout.tp == 3
    assert "does not divide" in reason


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    request = request_for(gpus=1, batch=1)
    tiny = replace(request.cluster.device, memory_gib=0.9005)
    request = replace(request, cluster=replace(request.cluster, device=tiny), offload=False)
    found = plan(request)
    row = found.rows[0]
    assert row.short_bytes == row.memory.total - tiny.memory_bytes > 0
    with pytest.raises(
        ConfigError, match=r"no layout fits into memory: .* lacks 0\.0\d GiB per device"
    ):
        _ = found.winner


def test_hours_follow_from_the_speed() -> None:
    row = Estimator(request_for()).estimate(TrainingSetup(Layout(), 2))
    assert row.tokens_per_s == 16 * 64 / row.times.total
    assert row.hours(3600 * row.tokens_per_s) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: find_device("a100-40g"), "a100-40gb"),
        (lambda: find_device("nobody", 16), "--gpu-tflops"),
        (lambda: find_device("h200", -1), "above 0"),
        (lambda: parse_interconnect("pigeons"), "Gb/s per GPU"),
        (lambda: Cluster(find_device("h200"), 12), "nodes of 8"),
        (lambda: request_for(batch=0), "at least 1"),
        (
            lambda: Estimator(request_for(batch=3)).estimate(TrainingSetup(Layout(), 2)),
            "does not divide",
        ),
    ],
)
def test_bad_input_is_explained(call: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


def test_a_device_by_hand() -> None:
    device = find_device("mine", 48, 300)
    assert (device.name, device.memory_gib, device.half_tflops) == ("mine", 48, 300)
    assert find_device("RTX 4090").name == "4090"
    assert parse_interconnect("ib-200") == parse_interconnect("200") == 200
