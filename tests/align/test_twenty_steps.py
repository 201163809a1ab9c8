"""Twenty steps of every post-training objective are the same on every layout, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from bmforge.align.distillation import DistillationObjective
from bmforge.align.losses import METHODS as PREFERENCES
from bmforge.align.losses import MethodOptions
from bmforge.align.policy import METHODS as POLICIES
from bmforge.align.policy import PolicyConfig
from bmforge.align.preferences import PairObjective, UnpairedObjective
from bmforge.align.reinforcement import PolicyObjective
from bmforge.align.reward import RewardObjective
from bmforge.align.value import ValueObjective
from bmforge.models import Llama, LlamaConfig, Mixtral, MixtralConfig, init_weights_
from bmforge.parallel import (
    Layout,
    build_mesh,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    parallelize,
)
from bmforge.testing import run_distributed
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, Trainer

STEPS, ITEMS, WIDTH, VOCAB = 20, 8, 8, 29
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 20, "num_layers": 2, "num_heads": 2}
PAIRS = [name for name, method in PREFERENCES.items() if method.loss is not None]
NAMES = [*PAIRS, "kto", "reward", *POLICIES, "value", "distill"]
QUICK = ["kto", "ppo", "value"]
LIMIT_S = 800.0  # for busy machines


def make_model(family: str, name: str) -> Any:
    """A model in float64 with random weights, and the head that the objective needs."""
    head: dict[str, Any] = {}
    if name in ("reward", "value"):
        head = {"head": "sequence_classification", "num_labels": 1}
    if family == "mixtral":
        config: Any = MixtralConfig(
            **COMMON, **head, intermediate_size=24, num_kv_heads=2, num_experts=4
        )
        return Mixtral.from_config(config, dtype=torch.float64)
    config = LlamaConfig(**COMMON, **head, intermediate_size=28, num_kv_heads=2, max_seq_len=16)
    return Llama.from_config(config, dtype=torch.float64)


def make_objective(name: str, make_teacher: Callable[[], Any]) -> Any:
    if name == "distill":
        return DistillationObjective(make_teacher(), 1.0, 0.7, top_k=7)
    if name in PAIRS:
        smoothing = 0.1 if "label_smoothing" in PREFERENCES[name].options else 0.0
        method = PREFERENCES[name]
        options = MethodOptions(beta=method.beta, nll_weight=method.nll_weight)
        return PairObjective(name, MethodOptions(**{**vars(options), "label_smoothing": smoothing}))
    if name == "kto":
        return UnpairedObjective(MethodOptions(beta=0.1))
    if name == "reward":
        return RewardObjective(0.01)
    if name == "value":
        return ValueObjective(0.2)
    return PolicyObjective(PolicyConfig(beta=0.1).resolve(name), 0.7, WIDTH)


def make_items(name: str, step: int) -> dict[str, torch.Tensor]:
    """One step's rows of unlike lengths, with drawn scores of the other policies."""
    draw = torch.Generator().manual_seed(step)
    has_pairs = name in (*PAIRS, "kto", "reward")
    rows = ITEMS * (2 if has_pairs else 1)
    ids = torch.randint(VOCAB, (rows, WIDTH), generator=draw)
    places = torch.arange(WIDTH)
    lengths = torch.randint(4, WIDTH + 1, (rows, 1), generator=draw)
    labels = torch.where((places >= 2) & (places < lengths), ids, -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": (places < lengths).long()}
    if has_pairs:
        del batch["attention_mask"]
        sums = -torch.rand(rows, generator=draw, dtype=torch.float64) * 10
        more = {"reference_logps": sums, "is_good": torch.arange(ITEMS) % 3 > 0}
        if name == "reward":
            batch["attention_mask"] = (places < lengths).long()
            more = {"margin": torch.rand(ITEMS, generator=draw, dtype=torch.float64)}
        return {**batch, **more}
    numbers = torch.randn(6, rows, WIDTH, generator=draw, dtype=torch.float64)
    advantages, old, reference, sampler, values, returns = numbers
    scores = {"old": old, "reference": reference, "sampler": sampler}
    return {
        **batch,
        "advantages": advantages,
        **{key: 0.1 * value - 3.3 for key, value in scores.items()},
        **{"values": values, "returns": returns},
    }


class Steps:
    """Loader of this rank's micro-batches of every step."""

    is_endless = True

    def __init__(
        self, name: str, rank: int, world: int, micro: int, make: Callable[..., Any] = make_items
    ) -> None:
        self.name, self.rank, self.world, self.micro, self.step = name, rank, world, micro, 0
        self.make = make

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        self.step += 1
        batch, parts = self.make(self.name, self.step), []
        for first in range(self.rank * self.micro, ITEMS, self.micro * self.world):
            part = {}
            for key, value in batch.items():
                each = len(value) // ITEMS
                part[key] = value[each * first : each * (first + self.micro)]
            parts.append(part)
        return parts

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]


def train_all(
    names: list[str],
    family: str,
    layout: Layout,
    micro: int,
    items: Callable[..., Any] = make_items,
    steps: int = STEPS,
) -> dict[str, list[tuple[float, float]]]:
    """Loss and gradient norm of every step of every objective; `items` makes the step's rows."""
    world = init_distributed()
    mesh = build_mesh(layout, world.device)
    loop = TrainConfig(
        steps=STEPS,
        optim=OptimConfig(name="sgd", lr=0.05, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
        disable_dropout=True,
    )
    results: dict[str, list[tuple[float, float]]] = {}
    for name in names:

        def make(seed: int, name: str = name) -> Any:
            model = make_model(family, name)
            init_weights_(model, seed=seed)
            parallelize(model, layout, mesh=mesh)
            return model

        model, rows = make(1), results.setdefault(name, [])
        loader = Steps(name, data_parallel_rank(mesh), data_parallel_size(mesh), micro, items)
        objective = make_objective(name, lambda make=make: make(2).eval().requires_grad_(False))
        trainer = Trainer(model, loader, loop, mesh=mesh, objective=objective)
        for _ in range(steps):
            row, _ = trainer.train_step()
            rows.append((row["loss"], row["grad_norm"]))
    return results


def compare(names: list[str], family: str, world: int, layout: Layout, micro: int) -> None:
    limit = {"timeout_s": LIMIT_S}
    wanted = run_distributed(train_all, 1, names, family, Layout(), ITEMS, **limit)[0]
    for found in run_distributed(train_all, world, names, family, layout, micro, **limit):
        for name in names:
            assert len(found[name]) == STEPS
            assert wanted[name][0] != wanted[name][-1]
            for row, other in zip(found[name], wanted[name], strict=True):
                assert row == pytest.approx(other, rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize(
    ("world", "layout", "micro"),
    [
        pytest.param(1, Layout(), 1, id="micro-batches"),
        pytest.param(2, Layout(zero=3), 2, id="zero3"),
    ],
)
def test_some_objectives(world: int, layout: Layout, micro: int) -> None:
    compare(QUICK, "llama", world, layout, micro)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "world", "layout", "micro"),
    [
        pytest.param("llama", 1, Layout(), 2, id="micro-batches"),
        pytest.param("llama", 2, Layout(zero=3), 2, id="zero3"),
        pytest.param("llama", 2, Layout(tp=2), 4, id="tp"),
        pytest.param("llama", 2, Layout(tp=2, sequence_parallel=True), 4, id="sequence"),
        pytest.param("llama", 2, Layout(pp=2), 2, id="pp"),
        pytest.param("llama", 2, Layout(cp=2), 4, id="cp"),
        pytest.param("mixtral", 2, Layout(ep=2), 2, id="ep"),
    ],
)
def test_every_objective(family: str, world: int, layout: Layout, micro: int) -> None:
    compare(NAMES, family, world, layout, micro)
