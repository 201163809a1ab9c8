"""Plans of preferences, reward models, RL and distillation against steps of real models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bmforge.align.distillation import DistillationObjective
from bmforge.align.losses import MethodOptions
from bmforge.align.policy import Policy
from bmforge.align.preferences import PairObjective
from bmforge.align.reference import frozen_copy, score_rows
from bmforge.align.reinforcement import PolicyObjective
from bmforge.align.reward import RewardObjective
from bmforge.align.value import ValueConfig
from bmforge.align.value_training import ValueTrainer
from bmforge.cli import main
from bmforge.cli.plan_tasks import head_of_task
from bmforge.cli.plan_workload import workload_of
from bmforge.device import parse_dtype
from bmforge.models import init_weights_
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.llama import Llama, LlamaConfig
from bmforge.parallel import Layout, init_distributed, parallelize, shutdown_distributed
from bmforge.parallel.planner.estimate import Estimator, PlanRequest, TrainingSetup
from bmforge.parallel.planner.hardware import Cluster, find_device
from bmforge.recipes.adapters import AdapterConfig, with_adapter
from bmforge.recipes.resident_models import reference_copy, teacher_copy, value_model
from bmforge.recipes.run import RunConfig
from bmforge.surgery import persistent_tensors
from bmforge.train import TrainConfig
from bmforge.train.objective import prepare_batches
from bmforge.tune.delta.selection import choosing_deltas

SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "num_heads": 4, "num_layers": 4}
CONFIG = GPT2Config(**SIZES, max_seq_len=64)
LLAMA = LlamaConfig(**SIZES, intermediate_size=320, max_seq_len=64)
ROWS, LENGTH = 8, 64
SMALL = "hidden_size=64 num_heads=4 num_layers=4 vocab_size=512"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plan needs a process without a group, and traces of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutdown_distributed()
    yield
    shutdown_distributed()


def measure_step(model: Any, step: Callable[[], None], static: int) -> float:
    """Peak bytes of a step: the tensors before it, and the allocator's high-water mark in it."""
    step()  # allocates the optimizer's states
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return static + float(np.cumsum(changes).max())


def size_of(model: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in persistent_tensors(model).values())


def make_batch(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(512, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def run_real_step(
    config: Any, objective: Any, batch: Any, trained: Any, reference: Any, precision: str = "fp32"
) -> float:
    """Return the peak of real steps of a model on one process."""
    init_distributed()
    workload = workload_of("small", config, LENGTH, trained, parse_dtype(precision))
    model = workload.whole()
    parallelize(model, Layout(zero=0), precision=precision)
    init_weights_(model, 0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def step() -> None:
        model.train()
        (prepared,) = prepare_batches(objective, model, [batch])
        objective(model, prepared, ROWS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    static = size_of(model) + sum(2 * 4 * p.numel() for p in parameters)
    static += 0 if reference is None else size_of(reference)
    return measure_step(model, step, static)


def plan_memory(
    config: Any, task: str, trained: Any = None, residents: Any = (), precision: str = "fp32"
) -> float:
    cluster = Cluster(replace(find_device("a100-40gb"), is_host=True), 1)
    workload = workload_of("small", config, LENGTH, trained, parse_dtype(precision), task)
    request = PlanRequest(workload, cluster, ROWS, precision, residents=residents)
    return Estimator(request).estimate(TrainingSetup(Layout(zero=0), ROWS)).memory.total


def make_reference() -> Any:
    model = GPT2.from_config(CONFIG)
    init_weights_(model, 1)
    return model


def score_base(model: Any, batch: Any) -> Any:
    """`adapter_off` of a model whose adapter comes from its config, without a `Delta`."""
    with choosing_deltas(model, ()):
        return score_rows(model, batch)


def lora_config() -> Any:
    return with_adapter(Llama, LLAMA, RunConfig(adapter=AdapterConfig(kind="lora", rank=8)))


def test_preferences_with_a_copy() -> None:
    reference = make_reference()
    planned = plan_memory(CONFIG, "preferences", None, (reference_copy(reference),))
    objective = PairObjective("dpo", MethodOptions(beta=0.1), frozen_copy(reference))
    batch = {k: v for k, v in make_batch(2 * ROWS).items() if k != "attention_mask"}
    assert planned == pytest.approx(run_real_step(CONFIG, objective, batch, None, reference), 0.05)


def test_preferences_with_an_adapter_need_the_memory_of_fine_tuning() -> None:
    """At most 5 % above fine-tuning on the same rows: the reference is free, no logits exist."""
    config = lora_config()
    planned = plan_memory(config, "preferences", ())
    options = MethodOptions(beta=0.1)
    pairs = {k: v for k, v in make_batch(2 * ROWS).items() if k != "attention_mask"}
    measured = run_real_step(config, PairObjective("dpo", options, score_base), pairs, (), None)
    assert planned == pytest.approx(measured, rel=0.05)
    shutdown_distributed()
    tuning = run_real_step(config, _FineTuning(), pairs, (), None)
    assert measured <= 1.05 * tuning


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "lora"])
def test_fine_tuning_on_a_cpu(kind: str, precision: str) -> None:
    """Its kernels save less for backward than the operators of an accelerator."""
    config = {"gpt2": CONFIG, "llama": LLAMA, "lora": lora_config()}[kind]
    trained = () if kind == "lora" else None
    rows = {name: t for name, t in make_batch(ROWS).items() if name != "attention_mask"}
    planned = plan_memory(config, "pretrain", trained, precision=precision)
    measured = run_real_step(config, _FineTuning(), rows, trained, None, precision)
    assert planned == pytest.approx(measured, rel=0.05)


class _FineTuning:
    """Mean cross-entropy of the rows, an objective without preparation."""

    def __call__(self, model: Any, batch: Any, num_items: float) -> Any:
        return model(**batch)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_policy_gradients(beta: float) -> None:
    """An update of reinforcement learning, whose rollouts are counted apart."""
    planned = plan_memory(CONFIG, "rl")
    batch = make_batch(ROWS)
    names = ["advantages", "sampler", *(["reference"] if beta else [])]
    batch |= {name: torch.randn(ROWS, LENGTH, dtype=torch.float64) for name in names}
    objective = PolicyObjective(Policy(beta=beta), 1.0, LENGTH)
    assert planned == pytest.approx(run_real_step(CONFIG, objective, batch, None, None), rel=0.05)


def test_ppo_keeps_a_value_model_with_its_states() -> None:
    """An update of policy and value model, on values and returns of a rollout."""
    value = GPT2.from_config(head_of_task("reward", CONFIG))
    init_weights_(value, 1)
    resident = value_model(value)
    planned = plan_memory(CONFIG, "rl", None, (resident,))
    batch = make_batch(ROWS)
    for name in ("advantages", "sampler", "values", "returns"):
        batch[name] = torch.randn(ROWS, LENGTH, dtype=torch.float64)
    objective = PolicyObjective(Policy(advantage="gae"), 1.0, LENGTH)
    objective.companion = ValueTrainer(value, TrainConfig(steps=10), ValueConfig())
    measured = run_real_step(CONFIG, objective, batch, None, None) + resident.nbytes
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("top_k", [0, 16, 256])
def test_distillation_with_a_teacher(top_k: int) -> None:
    """The teacher's weights, and with top-k its predictions, are in memory during the step."""
    teacher = make_reference().eval().requires_grad_(False)
    task = f"distill:{top_k}" if top_k else "distill"
    planned = plan_memory(CONFIG, task, None, (teacher_copy(teacher),))
    objective = DistillationObjective(teacher, 1.0, 1.0, top_k=top_k)
    measured = run_real_step(CONFIG, objective, make_batch(ROWS), None, teacher)
    assert planned == pytest.approx(measured, rel=0.05)


def test_reward_models() -> None:
    config = head_of_task("reward", CONFIG)
    planned = plan_memory(config, "reward")
    batch = {**make_batch(2 * ROWS), "margin": torch.zeros(ROWS)}
    measured = run_real_step(config, RewardObjective(), batch, None, None)
    assert planned == pytest.approx(measured, rel=0.05)


def run_plan(options: str, capsys: pytest.CaptureFixture[str]) -> Any:
    command = f"plan gpt2 --set {SMALL} --seq 64 --batch 8 --gpu v100-16gb --json {options}"
    assert main(command.split()) == 0
    return json.loads(capsys.readouterr().out)


WEIGHTS = 64 * (512 + 1024 + 2) + 4 * (12 * 64**2 + 13 * 64)  # of that GPT-2, closed form


@pytest.mark.parametrize("gpus", [1, 2])
def test_copies_are_counted_per_process(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--gpus {gpus} --precision fp32"
    for row in run_plan(f"--task preferences {options}", capsys)["rows"]:
        shards = 1 if row["layout"]["zero"] == 0 else gpus
        shards *= row["layout"]["tp"] * row["layout"]["pp"]
        found = row["memory_parts_bytes"]["reference"]
        assert found == pytest.approx(4 * WEIGHTS / shards, abs=1)
    plan = run_plan(f"--task rl --max-num-seqs 4 {options}", capsys)
    assert plan["rows"]
    for row in plan["rows"]:
        parts = row["memory_parts_bytes"]
        assert parts.get("rollout copy", 0) == (4 * WEIGHTS if gpus > 1 else 0)
        assert parts["KV cache"] == 2 * 4 * 64 * 4 * (64 + 32) * 4


def test_a_teacher_is_sharded_with_top_k(capsys: pytest.CaptureFixture[str]) -> None:
    """Over the whole vocabulary every process has the teacher, and there is no tp or pp."""
    for top_k in (0, 8):
        options = f"--task distill --teacher gpt2 --gpus 2 --distill-top-k {top_k}"
        rows = run_plan(options, capsys)["rows"]
        layouts = [row["layout"] for row in rows]
        assert any(each["tp"] * each["pp"] > 1 for each in layouts) == (top_k > 0)
        for row, each in zip(rows, layouts, strict=True):
            shards = each["tp"] * each["pp"] * (1 if each["zero"] == 0 else 2 // each["tp"])
            shards = min(2, shards) if top_k else 1
            found = row["memory_parts_bytes"]["teacher"]
            assert found == pytest.approx(4 * 124_439_808 / shards, abs=1)


@pytest.mark.parametrize(
    ("options", "part", "size"),
    [
        ("--task preferences --adapter lora", "reference", 0),
        ("--task preferences --reference precomputed", "reference", 0),
        ("--task distill --teacher gpt2", "teacher", 4 * 124_439_808),
        ("--task distill --teacher gpt2 --distill-top-k 8", "teacher", 4 * 124_439_808),
        ("--task rl", "reference", 0),
        ("--task rl", "value model", 0),
        ("--task rl --value-model", "value model", 12 * (WEIGHTS + 64)),
    ],
)
def test_parts_of_tasks(
    options: str, part: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    row = run_plan(f"--gpus 1 {options}", capsys)["rows"][0]
    assert row["memory_parts_bytes"].get(part, 0) == size


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--reference copy", "no effect with --task pretrain"),
        ("--task rl --reference precomputed", "allowed: adapter, copy"),
        ("--task preferences --reference adapter", "Add --adapter lora"),
        ("--task distill", "is required with --task distill"),
        ("--task rl --distill-top-k 8", "only with --task distill"),
        ("--task rl --teacher gpt2", "no effect with other tasks"),
        ("--task reward --max-num-seqs 4", "no effect without --task rl"),
        ("--task reward --value-model", "no effect with --task reward"),
    ],
)
def test_options_without_effect(
    options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gpt2", *options.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.long
def test_dpo_of_7b_in_int4_fits_in_16_gib(capsys: pytest.CaptureFixture[str]) -> None:
    """LoRA on an int4 base: a pair of answers of 1,024 tokens each."""
    command = "plan llama-2-7b --task preferences --adapter lora --base-dtype int4 --gpus 1"
    command += " --gpu 4090 --seq 1024 --batch 8 --no-offload --json"
    assert main(command.split()) == 0
    least = json.loads(capsys.readouterr().out)["least_memory"]
    weights = 6.48e9 * (0.5 + 4 / 64) + 2 * 2 * 32000 * 4096
    assert 0.95 * weights < least["memory_bytes"] <= 16 * 2**30
