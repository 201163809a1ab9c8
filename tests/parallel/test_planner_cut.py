"""The pipeline's cut, what the planner makes of it, and how it spares itself work."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bmforge.cli.info import describe_model
from bmforge.cli.plan_workload import workload_of
from bmforge.errors import ConfigError
from bmforge.models.changes import Change
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.hub import find_preset
from bmforge.models.llama import LlamaConfig
from bmforge.models.mixtral import MixtralConfig
from bmforge.models.t5 import T5, T5Config
from bmforge.nn import attention_bias, losses
from bmforge.parallel import Layout, shutdown_distributed
from bmforge.parallel.pipeline.stages import cut_blocks
from bmforge.parallel.planner import estimate as estimating
from bmforge.parallel.planner.dry_run import dry_run
from bmforge.parallel.planner.estimate import Estimator, PlanRequest, TrainingSetup
from bmforge.parallel.planner.hardware import Cluster, find_device
from bmforge.parallel.planner.peak import Share, all_blocks, count_work, peak_memory
from bmforge.parallel.planner.ranks import cut_ranks
from bmforge.parallel.planner.search import plan
from bmforge.parallel.planner.storage_tracker import StorageTracker
from bmforge.parallel.planner.trace import Setting, trace_step

SMALL = {"vocab_size": 512, "hidden_size": 64, "num_heads": 4, "num_layers": 6}
TINY = GPT2Config(**SMALL, max_seq_len=64)
SMALL_T5 = T5Config(**SMALL, intermediate_size=160, head_dim=16)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A plan needs a process that has joined no group."""
    shutdown_distributed()
    yield
    shutdown_distributed()


def request_for(config: Any = TINY, gpus: int = 1, batch: int = 4, **changes: Any) -> PlanRequest:
    cluster = Cluster(find_device("a100-40gb"), gpus)
    return PlanRequest(workload_of("small", config, 64), cluster, batch, **changes)


@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.0, 5.45), (3.0, 1.5)])
def test_the_cut_is_the_best_of_all(ends: tuple[float, float]) -> None:
    """By trying every one: the costliest stage is cheapest, then the sum of squares is least."""
    costs, found = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0], []
    for stages in (1, 3, 4, 6):
        for places in itertools.combinations(range(1, len(costs)), stages - 1):
            edges = (0, *places, len(costs))
            sums = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
            sums[0] += ends[0]
            sums[-1] += ends[1]
            found.append((stages, max(sums), sum(s * s for s in sums), edges))
        best = min(f[1:3] for f in found if f[0] == stages)
        sizes = cut_blocks(costs, ends, stages)
        edges = (0, *itertools.accumulate(sizes))
        assert best in {f[1:3] for f in found if f[0] == stages and f[3] == edges}


def test_the_default_cut_of_published_sizes() -> None:
    """An embedding looks rows up and computes nothing: GPT-2 had 1, 1, 1, 1, 1, 1, 5, 1 blocks."""
    for name, pp, most in (("gpt2", 8, 2), ("llama-3.2-1b", 4, 5)):
        family, config = find_preset(name)
        model = family.from_config(config, device="meta")
        sizes = [rank.blocks for rank in cut_ranks(model, Layout(zero=0, pp=pp), ())]
        assert sum(sizes) == config.num_layers
        assert max(sizes) <= most
        assert sizes[-1] == 1  # beside the head, which costs several blocks


@pytest.mark.parametrize(
    ("family", "config", "layout"),
    [
        (GPT2, TINY, Layout(zero=0, pp=2)),
        (T5, SMALL_T5, Layout(zero=0, pp=3)),
        (GPT2, TINY, Layout(zero=0, pp=2, pp_cut=(1, 5))),
    ],
)
def test_what_is_planned_is_what_runs(family: Any, config: Any, layout: Layout) -> None:
    """Blocks and bytes of every rank, against the layout as `parallelize` builds it."""
    built = dry_run(lambda: family.from_config(config, device="meta"), layout, layout.pp)
    ranks = cut_ranks(family.from_config(config, device="meta"), layout, ())
    assert [rank.blocks for rank in ranks] == [share.blocks for share in built.shares]
    request = request_for(config, layout.pp, precision="fp32", offload=False)
    memory = Estimator(request).estimate(TrainingSetup(layout, 1)).memory
    sizes = [share.parameter_bytes for share in built.shares]
    assert min(abs(memory.parts["parameters"] / size - 1) for size in sizes) < 0.002


@pytest.mark.parametrize(("config", "tokens", "few"), [(SMALL_T5, 64, 1), (TINY, 64, 1000)])
def test_loops_in_short(
    config: Any, tokens: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tiles and chunks, of which two of a size are run: as if all of them were."""
    monkeypatch.setattr(attention_bias, "_TILE_ELEMENTS", 4 * tokens * tokens)
    monkeypatch.setattr(losses, "_HOST_CHUNK_ELEMENTS", 512 * 40)
    monkeypatch.setattr(losses, "_HOST_TILE_ELEMENTS", 100 * 40)
    monkeypatch.setattr(losses, "_FEW_TOKENS", few)
    workload = workload_of("small", config, tokens)
    setting = Setting(Layout(zero=0), 1, 5, "fp32", copies=True)  # a CPU, whose head has tiles
    short = trace_step(workload, setting)
    monkeypatch.setattr(StorageTracker, "shorten", lambda self, pieces, size_of: iter(pieces))
    whole = trace_step(workload, setting)
    blocks = all_blocks(short, 6)
    assert len(short.events) < 0.9 * len(whole.events)
    assert count_work(short, blocks)[0] == count_work(whole, blocks)[0]
    assert count_work(short, blocks)[1] == pytest.approx(count_work(whole, blocks)[1], rel=0.02)
    assert peak_memory(short, Share(blocks)) == peak_memory(whole, Share(blocks))


def test_products_of_experts_are_counted() -> None:
    """Wider experts: 6 FLOPs per weight of the k experts that work on a token."""
    flops = []
    for width in (32, 96):
        config = MixtralConfig(
            **SMALL,
            num_kv_heads=4,
            intermediate_size=width,
            num_experts=4,
            experts_per_token=2,
            max_seq_len=64,
        )
        trace = trace_step(workload_of("m", config, 64), Setting(Layout(zero=0), 1, 2, "fp32"))
        flops.append(count_work(trace, all_blocks(trace, 6))[0])
    weights = 2 * 3 * 64 * (96 - 32)  # k experts of three matrices
    assert flops[1] - flops[0] == 6 * weights * 6 * (2 * 64)


def test_frozen_parameters_have_no_states() -> None:
    """AdamW keeps two numbers for every one that is trained, and nothing else has gradients."""
    change = Change("low_rank", ("layers.*.attn.q_proj",), {"rank": 2})
    config = LlamaConfig(**SMALL, intermediate_size=160, max_seq_len=64, changes=(change,))
    workload = workload_of("small", config, 64, ())
    trained = sum(p.numel() for p in workload.whole().parameters() if p.requires_grad)
    request = replace(request_for(config, precision="fp32"), workload=workload)
    for rows in (4, 1):  # at once, and with gradients of earlier micro-batches
        parts = Estimator(request).estimate(TrainingSetup(Layout(zero=0), rows)).memory.parts
        assert parts["optimizer"] == 2 * 4 * trained
        assert parts["gradients"] <= 4 * trained
    whole = Estimator(request_for(config, precision="fp32")).estimate(
        TrainingSetup(Layout(zero=0), 4)
    )
    assert whole.memory.parts["optimizer"] > 50 * parts["optimizer"]
    with pytest.raises(ConfigError, match="leaves no parameter of 'small' to train"):
        workload_of("small", TINY, 64, ())


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call traces nothing and says the same; a file that was touched is not believed."""
    traced: list[Setting] = []

    def count(workload: Any, setting: Setting, outcomes: Any) -> Any:
        traced.append(setting)
        return trace_step(workload, setting, outcomes)

    monkeypatch.setattr(estimating, "trace_step", count)
    layouts = (Layout(zero=0, pp=2),)
    first = plan(request_for(gpus=2), layouts=layouts, keep=tmp_path)
    once = len(traced)  # the layout, and the least memory that the model needs
    assert plan(request_for(gpus=2), layouts=layouts, keep=tmp_path).rows == first.rows
    assert len(traced) == once
    file = min(tmp_path.glob("*.json"))
    kept = json.loads(file.read_text())
    kept["trace"]["flops"] *= 2
    for damaged in (json.dumps(kept), file.read_text()[:100], "[]", ""):
        file.write_text(damaged)
        again = plan(request_for(gpus=2), layouts=layouts, keep=tmp_path)
        assert again.rows == first.rows
    assert len(traced) == once + 4
    # Another model, or rows of another length, is another trace.
    plan(
        request_for(GPT2Config(**SMALL, intermediate_size=128, max_seq_len=64), gpus=2),
        layouts=layouts,
        keep=tmp_path,
    )
    assert len(traced) == 2 * once + 4


def test_recompute_is_looked_at_where_it_may_help() -> None:
    found = plan(request_for(gpus=2), layouts=(Layout(zero=2), Layout(zero=0, pp=2)))
    assert [row.choice.recompute for row in found.rows] == [False, False]
    assert {row.choice.layout.pp: row.choice.rows for row in found.rows} == {1: 2, 2: 1}


def test_the_obstacle_and_the_nearest_that_works() -> None:
    found = plan(request_for(gpus=3, batch=8))
    with pytest.raises(ConfigError) as refused:
        _ = found.winner
    said = str(refused.value)
    assert "a batch of 8 sequences cannot be divided evenly among 3 data-parallel processes" in said
    assert "Nearest batch that works: --batch 9, or --gpus 2 for this batch" in said
    assert plan(request_for(gpus=3, batch=9), layouts=(Layout(),)).winner.fits
    with pytest.raises(ConfigError, match=r"--gpus 8 or 16, or --gpus-per-node 6"):
        Cluster(find_device("h200"), 12)


def test_devices_go_by_their_names() -> None:
    names = {"L40S": "l40s", "RTX 6000 Ada": "6000-ada", "NVIDIA L4": "l4", "Tesla T4": "t4"}
    for name, key in names.items():
        assert find_device(name).name == key


def test_presets_go_by_the_names_of_their_weights() -> None:
    """`from_pretrained` takes these names, so `info` and `plan` do."""
    for name in ("gpt2-base", "openai-community/gpt2"):
        assert find_preset(name) == find_preset("gpt2")
        assert "124,439,808" in describe_model(name)
    for family in (GPT2, T5):
        for name in family.config_class.hub_ids:
            assert find_preset(name)[0] is family
