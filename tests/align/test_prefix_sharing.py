"""Pairs behind one copy of their prompt have the loss and gradients of separate rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bmforge.align.losses import METHODS, MethodOptions
from bmforge.align.preferences import PairObjective
from bmforge.align.prefix_sharing import is_shared, model_inputs, share_prompt
from bmforge.align.reference import HostWeights, frozen_copy, score_rows
from bmforge.models import (
    GPT2,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    init_weights_,
)
from bmforge.parallel import (
    Layout,
    build_mesh,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    parallelize,
)
from bmforge.recipes.inputs.conversation_rows import EncodedRow
from bmforge.recipes.inputs.preference_rows import EncodedPair, PreferencePairs
from bmforge.testing import assert_close, run_distributed
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, Trainer
from bmforge.train.objective import prepare_batches

PAIRS = [name for name, method in METHODS.items() if method.loss is not None]
VOCAB, LENGTH = 29, 10
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 20, "num_layers": 2, "num_heads": 2}
MODELS: dict[str, Any] = {
    "llama": (Llama, LlamaConfig(**COMMON, intermediate_size=28, num_kv_heads=1)),
    "gpt2": (GPT2, GPT2Config(**COMMON, max_seq_len=32)),
    "mixtral": (
        Mixtral,
        MixtralConfig(**COMMON, intermediate_size=24, num_kv_heads=2, num_experts=4),
    ),
}

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
ANSWERS = st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=4).filter(
    lambda pairs: all(chosen != rejected for _, chosen, rejected in pairs)
)


def make_model(family: str, seed: int = 1) -> Any:
    kind, config = MODELS[family]
    model = kind.from_config(config, dtype=torch.float64)
    init_weights_(model, seed=seed)
    return model.eval()


def encode(prompt: list[int], answer: list[int]) -> EncodedRow:
    return EncodedRow([*prompt, *answer], [-100] * len(prompt) + answer)


def make_sources(pairs: Any, seq_len: int = LENGTH) -> tuple[PreferencePairs, PreferencePairs]:
    """The pairs in separate rows, and with shared prompts."""
    encoded = [EncodedPair(encode(p, c), encode(p, r)) for p, c, r in pairs]
    first, second = (PreferencePairs(encoded, seq_len, shares) for shares in (False, True))
    return first, second


def collate(source: PreferencePairs, padding: int = 0) -> dict[str, Tensor]:
    examples = [source.make(number, (number,)) for number in range(len(source))]
    examples += [{**examples[0], "labels": [-100]}] * padding
    return dict(source.collate(examples))


def loss_and_gradients(
    objective: PairObjective, model: Any, batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    model.zero_grad()
    prepared = next(iter(prepare_batches(objective, model, [batch])))
    result = objective(model, prepared, float(objective.count(batch)))
    assert result is not None
    result.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    metrics = {}
    for name, value in result.metrics.items():
        metrics[name] = float(value[0] / value[1] if isinstance(value, tuple) else value)
    return result.loss.detach(), gradients, metrics


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", PAIRS)
@given(pairs=ANSWERS, padding=st.integers(0, 2))
@settings(max_examples=4, deadline=None)
def test_loss_gradients_and_metrics_equal_separate_rows(
    name: str, family: str, pairs: Any, padding: int
) -> None:
    """Prompts of one token up to ones whose answers are truncated; all methods with pairs."""
    apart, shared = make_sources(pairs)
    if not len(apart):
        return
    method = METHODS[name]
    for on_prompt in (False, True) if method.nll_weight else (False,):
        reference = frozen_copy(make_model(family, seed=2)) if method.needs_reference else None
        options = MethodOptions(beta=method.beta, nll_weight=method.nll_weight or 0.3)
        objective = PairObjective(name, options, reference, on_prompt)
        model = make_model(family)
        batches = [collate(apart, padding), collate(shared, padding)]
        assert [is_shared(batch) for batch in batches] == [False, True]
        assert objective.count(batches[0]) == objective.count(batches[1]) == len(apart)
        want, found = (loss_and_gradients(objective, model, batch) for batch in batches)
        assert_close(found[0], want[0], rtol=1e-12, atol=1e-12)
        for key, gradient in want[1].items():
            assert_close(found[1][key], gradient, rtol=1e-12, atol=1e-12)
        assert found[2] == pytest.approx(want[2], rel=1e-10, abs=1e-10)


def test_the_prompt_is_computed_once() -> None:
    row = share_prompt([([1, 2, 3, 4, 5], [-100] * 3 + [4, 5]), ([1, 2, 3, 6], [-100] * 3 + [6])])
    assert row.ids == [1, 2, 3, 4, 5, 3, 6]
    assert row.labels == [-100, -100, -100, 4, 5, -100, 6]
    assert row.segments == [1, 1, 2, 2, 2, 3, 3]
    assert row.positions == [0, 1, 2, 3, 4, 2, 3]
    batch = {"input_ids": torch.tensor([row.ids]), "segment_ids": torch.tensor([row.segments])}
    batch["position_ids"] = torch.tensor([row.positions])
    mask = model_inputs(batch)["attention_mask"][0, 0]
    seen = [[key for key in range(7) if mask[query, key]] for query in range(7)]
    assert seen == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 5],
        [0, 1, 5, 6],
    ]


@given(pairs=ANSWERS)
@settings(max_examples=30, deadline=None)
def test_no_token_is_lost(pairs: Any) -> None:
    """The ids and labels of both answers follow from the shared row; the prompt is there once."""
    for prompt, chosen, rejected in pairs:
        rows = [encode(prompt, answer) for answer in (chosen, rejected)]
        row = share_prompt([(each.ids, each.labels) for each in rows])
        for segment, each in zip((2, 3), rows, strict=True):
            kept = [n for n, s in enumerate(row.segments) if s in (1, segment)]
            assert [row.ids[n] for n in kept] == each.ids
            assert [row.labels[n] for n in kept] == each.labels
            assert [row.positions[n] for n in kept] == list(range(len(each.ids)))
        assert len(row.ids) == len(prompt) + len(chosen) + len(rejected) + 1


class _Loader:
    """Loader of one rank's rows, four pairs a step."""

    is_endless = True

    def __init__(self, shares: bool, rank: int, world: int) -> None:
        draw = torch.Generator().manual_seed(3)
        pairs = []
        for _ in range(12):
            lengths = torch.randint(1, 5, (3,), generator=draw).tolist()
            parts = [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in lengths]
            pairs.append((parts[0], [*parts[1], 1], [*parts[2], 2]))
        self.source, self.step = make_sources(pairs)[shares], 0
        self.numbers = [n for n in range(4) if n % world == rank]

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> list[Any]:
        first = 4 * self.step % 12
        self.step += 1
        return [self.source.collate([self.source.make(first + n, (n,)) for n in self.numbers])]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Any) -> None:
        self.step = state["step"]


def train(layout: Layout, shares: bool) -> list[tuple[float, float]]:
    world = init_distributed()
    mesh = build_mesh(layout, world.device)
    model = make_model("llama").train()
    parallelize(model, layout, mesh=mesh)
    loop = TrainConfig(
        steps=3,
        optim=OptimConfig(name="sgd", lr=0.05, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
    )
    loader = _Loader(shares, data_parallel_rank(mesh), data_parallel_size(mesh))
    objective = PairObjective("simpo", MethodOptions(beta=2.0))
    trainer = Trainer(model, loader, loop, mesh=mesh, objective=objective)
    rows = [trainer.train_step()[0] for _ in range(3)]
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, Layout(zero=3), id="zero3"),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), id="tp", marks=pytest.mark.long),
        pytest.param(2, Layout(pp=2), id="pp", marks=pytest.mark.long),
    ],
)
def test_layouts_equal_one_process_with_separate_rows(world: int, layout: Layout) -> None:
    want = run_distributed(train, 1, Layout(), False)[0]
    for found in run_distributed(train, world, layout, True):
        assert torch.tensor(found).allclose(torch.tensor(want), rtol=1e-11, atol=1e-12)


def test_offloaded_references_are_empty_between_calls() -> None:
    """The same scores; outside of a call the weights have no storage on the device."""
    model, batch = make_model("llama"), {"input_ids": torch.randint(VOCAB, (2, 6))}
    batch["labels"] = batch["input_ids"]
    want = score_rows(model, batch)
    reference = frozen_copy(model, is_offloaded=True)
    for _ in range(2):
        assert {p.untyped_storage().nbytes() for p in model.parameters()} == {0}
        assert torch.equal(reference(model, batch), want)
    with HostWeights(other := make_model("llama", seed=2)).on_device():
        inside = score_rows(other, batch)
    assert torch.equal(inside, score_rows(make_model("llama", seed=2), batch))
