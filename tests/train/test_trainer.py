"""The trainer's numbers against a loop written out by hand, on any number of processes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trainer_cases import LENGTH, VOCAB, run, tiny_model, write_corpus

from bmforge.data import DataLoader, PackedDataset, TokenStore, iter_once
from bmforge.logging import get_logger, log_to_file
from bmforge.models import init_weights_
from bmforge.parallel import Layout
from bmforge.testing import assert_close, run_distributed
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, Trainer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


def whole_batches(corpus: str, steps: int):
    """The global batches, one process, one micro-batch."""
    dataset = PackedDataset(TokenStore(corpus), LENGTH, eos_id=0)
    loader = DataLoader(
        dataset,
        global_batch_size=8,
        micro_batch_size=8,
        seed=11,
        reset_at_documents=True,
        prefetch_steps=0,
    )
    return [next(loader)[0] for _ in range(steps)]


def train_by_hand(corpus: str, steps: int):
    """Plain torch: logits, cross-entropy, clip_grad_norm_, AdamW, a cosine written out."""
    model = init_weights_(tiny_model(torch.float64), seed=3).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    rows = []
    for step, batch in enumerate(whole_batches(corpus, steps)):
        shifted = batch["labels"][:, 1:]
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        logits = model(**inputs).logits[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), shifted.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        warm, p = (step + 1) / 2, (step - 2) / (steps - 2)
        lr = 1e-2 * (warm if step < 2 else 0.5 * (1 + math.cos(math.pi * p)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        rows.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    return rows, {f"param/{n}": p.detach() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def by_hand(corpus: str):
    return train_by_hand(corpus, 6)


# 8 rows: 3 processes x 2 do not divide them, and neither do 4 x 3.
LAYOUTS = [
    pytest.param(1, 8, Layout(), id="1"),
    pytest.param(1, 2, Layout(), id="1-accumulated"),
    pytest.param(1, 3, Layout(), id="1-accumulated-padded"),
    pytest.param(2, 2, Layout(zero=3), id="2-accumulated"),
    pytest.param(2, 3, Layout(zero=0), id="2-replicated-padded"),
    pytest.param(3, 2, Layout(zero=2), id="3-padded"),
    pytest.param(3, 3, Layout(zero=3), id="3-one-padded-row"),
    pytest.param(4, 3, Layout(zero=3, dp_replicate=2), id="4-hsdp-a-rank-all-padding"),
]


@pytest.mark.parametrize(("world", "micro", "layout"), LAYOUTS)
def test_equals_a_loop_by_hand(corpus: str, by_hand, world, micro, layout) -> None:
    wanted_rows, wanted = by_hand
    results = run_distributed(
        run, world, corpus, dtype=torch.float64, micro_batch_size=micro, layout=layout
    )
    for rows, state in results:
        for row, want in zip(rows, wanted_rows, strict=True):
            for name, value in want.items():
                assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert_close({n: state[n] for n in wanted}, wanted)
        assert {row["tokens"] for row in rows} == {LENGTH * 8}  # rows that only pad do not count


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_is_the_mean_over_tokens(corpus: str, world: int) -> None:
    """Row by row with torch's cross-entropy, from the parameters after the last step."""
    schedule = ScheduleConfig("constant", warmup_steps=0)
    changes = {"dtype": torch.float64, "schedule": schedule, "steps": 1, "evaluating": True}
    results = run_distributed(run, world, corpus, **changes)
    state = results[0][1]
    model = tiny_model(torch.float64).to_empty(device="cpu").eval()
    model.load_state_dict({n[6:]: t for n, t in state.items() if n.startswith("param/")}, False)
    model.lm_head.weight = model.embed.weight
    dataset = PackedDataset(TokenStore(corpus), LENGTH, eos_id=0)
    total, count = 0.0, 0
    for batch in iter_once(dataset, 1, reset_at_documents=True):
        labels = batch.pop("labels")[:, 1:].reshape(-1)
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1].reshape(-1, VOCAB)
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    for rows, _ in results:
        assert rows[-1]["val_loss"] == pytest.approx(total / count, rel=1e-9)


class Regression(nn.Module):
    """Nothing of a language model about it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class ClassLoader:
    """Two micro-batches of features and one class a row; some rows do not count."""

    def __init__(self) -> None:
        self.step = 0

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        self.step += 1
        draw = torch.Generator().manual_seed(self.step)
        x, labels = torch.randn(6, 4, generator=draw), torch.randint(3, (6,), generator=draw)
        labels[4] = -100
        return [{"x": x[:3], "labels": labels[:3]}, {"x": x[3:], "labels": labels[3:]}]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def classify(model: nn.Module, batch, num_items: float) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum") / num_items


def test_own_module_and_objective_without_a_run_directory(tmp_path: Path, monkeypatch) -> None:
    """One label a row: the mean over the five rows that count, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    model, twin = Regression(), Regression()
    seen = []
    config = TrainConfig(
        steps=4,
        grad_clip=None,
        optim=OptimConfig("sgd", lr=0.1, weight_decay=0.0),
        schedule=ScheduleConfig("constant"),
    )
    trainer = Trainer(
        model, ClassLoader(), config, objective=classify, callbacks=[lambda t, r: seen.append(r)]
    )
    assert trainer.fit().step == 4
    loader, optimizer = ClassLoader(), torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for row in seen:
        parts = next(loader)
        x, labels = (torch.cat([part[k] for part in parts]) for k in ("x", "labels"))
        loss = F.cross_entropy(twin(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert list(tmp_path.iterdir()) == []


def test_the_last_step_is_always_in_the_log(corpus: str, tmp_path: Path) -> None:
    model = init_weights_(tiny_model(), seed=0)
    rows = PackedDataset(TokenStore(corpus), seq_len=LENGTH)
    loader = DataLoader(rows, global_batch_size=4, micro_batch_size=4)
    handler = log_to_file(tmp_path / "log.txt")
    try:
        Trainer(model, loader, TrainConfig(steps=3, log_every_steps=2)).fit()
    finally:
        get_logger().removeHandler(handler)
        handler.close()
    steps = re.findall(r"step \d/\d", (tmp_path / "log.txt").read_text("utf-8"))
    assert steps == ["step 2/3", "step 3/3"]
