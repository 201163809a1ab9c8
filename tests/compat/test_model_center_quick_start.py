"""The quick-start program against a plain loop over transformers' BERT."""

from __future__ import annotations

import json
import os
from pathlib import Path

import model_center_programs as programs
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from bmforge.parallel import shutdown_distributed
from bmforge.testing.pool import run_distributed

SETTINGS = {"max_encoder_length": 32, "start_lr": 3e-2, "warmup_iter": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a model and data, as the program expects them."""
    place = tmp_path_factory.mktemp("quick_start")
    programs.write_bert(place / "bert-base-uncased")
    programs.write_boolq(place / "path", train=40, dev=14)
    return place


def read_tensors(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, masks and labels, made by hand from the published form."""
    vocabulary = programs.SPECIAL + programs.WORDS
    ids, masks, labels = [], [], []
    for line in (folder / "path" / "BoolQ" / f"{split}.jsonl").read_text().splitlines():
        row = json.loads(line)
        words = f"[CLS] {row['passage']} [SEP] {row['question']} [SEP]".split()
        padding = 32 - len(words)
        ids.append([vocabulary.index(word) for word in words] + [0] * padding)
        masks.append([1] * len(words) + [0] * padding)
        labels.append(int(row["label"]))
    return torch.tensor(ids), torch.tensor(masks), torch.tensor(labels)


def plain_loop(folder: Path, batch_size: int, world: int) -> tuple[list[float], list[float]]:
    """The same training without bmforge: transformers' model, torch's Adam, Noam by its formula."""
    from transformers import BertModel

    bert = BertModel.from_pretrained(folder / "bert-base-uncased", attn_implementation="eager")
    dense = torch.nn.Linear(32, 2, bias=False)
    torch.manual_seed(0)
    torch.nn.init.normal_(dense.weight)
    params = [*bert.parameters(), *dense.parameters()]
    adam = torch.optim.Adam(params)
    ids, masks, labels = read_tensors(folder, "train")
    dev_ids, dev_masks, dev_labels = read_tensors(folder, "val")
    losses, accuracies, step = [], [], 0
    for epoch in range(1, 6):
        orders = []
        for rank in range(world):
            sampler = DistributedSampler(range(len(ids)), world, rank, shuffle=True, seed=0)
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        for at in range(0, len(orders[0]), batch_size):
            rows = torch.tensor([n for order in orders for n in order[at : at + batch_size]])
            peak, warm = SETTINGS["start_lr"], SETTINGS["warmup_iter"]
            lr = peak / warm**0.5 * step / warm if step < warm else peak / step**0.5
            for group in adam.param_groups:
                group["lr"] = lr
            pooled = bert(ids[rows], masks[rows]).pooler_output
            loss = torch.nn.functional.cross_entropy(dense(pooled), labels[rows])
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, 10.0)
            adam.step()
            step += 1
            losses.append(loss.item())
        with torch.no_grad():
            found = dense(bert(dev_ids, dev_masks).pooler_output).argmax(-1)
        accuracies.append((found == dev_labels).float().mean().item())
    return losses, accuracies


def run_in(folder: str, batch_size: int) -> tuple[list[float], list[float], list[int]]:
    """Run the program in a folder."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        return programs.quick_start(batch_size, **SETTINGS)
    finally:
        os.chdir(before)


def test_losses_are_those_of_a_plain_loop(folder: Path) -> None:
    """One process, five epochs with evaluation."""
    try:
        losses, accuracies, counts = run_in(str(folder), 8)
    finally:
        shutdown_distributed()
    wanted, wanted_accuracies = plain_loop(folder, 8, 1)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert accuracies == pytest.approx(wanted_accuracies)
    assert counts == [14] * 5
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("world", "rows"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.long)])
def test_several_processes_train_as_one(folder: Path, world: int, rows: int) -> None:
    """A part of the batch on each; evaluation counts every example once."""
    results = run_distributed(run_in, world, str(folder), rows)
    wanted, wanted_accuracies = plain_loop(folder, rows, world)
    for losses, accuracies, counts in results:
        # fp32, and what the order of summation makes of it over 25 steps.
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert accuracies == pytest.approx(wanted_accuracies)
        assert counts == [14] * 5
