"""Quality, size and speed of compressed models compared with the dense model.

    python -m benchmarks.compression.quality DATA --out DIR [--task news text] [--seeds 0]
        [--only int8 "2:4" ...] [--steps 120] [--speed] [--rounds 15]

DATA has `ag_news/test.csv` and `tinyshakespeare.txt`. Every recipe of `recipes.py` compresses the
trained model of each task:

- news: the all-MiniLM-L6-v2 of the development environment (22M parameters) with a classifier for
  AG News, 5,000 training examples and 2,000 held-out ones; accuracy.
- text: an OPT with 11M parameters, trained on the news and tinyshakespeare; bits per byte of
  held-out documents.

A recipe is compared with a dense model that was trained for as many more steps with the same
learning rate. Models and results are stored in DIR, and the same command continues an interrupted
run. Training uses bf16 (autocast), and the quality is measured in fp32. `--speed` compares the
speed of the stored models with the dense model instead.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters.ag_news import Item, batches, encoder_directory, read_items
from benchmarks.compression.recipes import NEWS, RECIPES, TEXT, Recipe
from benchmarks.compression.speed import time_runs
from benchmarks.harness import header, make_parser, paired_ratio, table
from bmforge.compress import compress, measure_sizes, quantize
from bmforge.compress.phases import split_phases
from bmforge.data import PrepareConfig, TokenStore, prepare
from bmforge.infer.decoder import Decoder
from bmforge.models import OPT, AutoModel, Bert, OPTConfig
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import OptimConfig, OptimGroup, ScheduleConfig, build_schedule
from bmforge.train.optim.build import build_optimizers
from bmforge.train.schedule import set_learning_rate_

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rate:
    """Training of a model.

    Attributes:
        steps: steps of the dense model.
        first: its peak learning rate.
        further: peak learning rate of the further steps and of the recipes.
        decay: weight decay.
    """

    steps: int
    first: float
    further: float
    decay: float


class News:
    """Classification of news with a pretrained encoder."""

    name, shapes, rate = "news", NEWS, Rate(157, 1e-4, 1e-4, 0.01)
    unit, of_dense = "accuracy, %", "recipe / dense, %"

    def __init__(self, data: Path, out: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(encoder_directory())
        items = read_items(data / "ag_news", tokenizer, 48)
        self.learn: list[Item] = items[:5000]
        self.held_out: list[Item] = items[5000:7000]

    def make(self, seed: int) -> Any:
        """Return the encoder with a randomly initialized classifier."""
        told = {"head": "sequence_classification", "new_head": True, "num_labels": 4}
        model: Any = Bert.from_pretrained(encoder_directory(), **told)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.classifier.weight.normal_(std=0.02, generator=draw)
        return model

    def stream(self, seed: int) -> Iterator[Batch]:
        """Yield training batches without end."""
        return batches(self.learn, 32, seed)

    def calibration(self, seed: int) -> list[Batch]:
        """Return calibration batches."""
        stream = batches(self.learn, 32, seed + 1000)
        return [next(stream) for _ in range(12)]

    @torch.no_grad()
    def measure(self, model: Any) -> float:
        """Return the accuracy on held-out examples in per cent."""
        right = 0
        for batch in batches(self.held_out, 50, None):
            labels = batch.pop("labels")
            right += int((model(**batch).logits.argmax(-1) == labels).sum())
        return 100 * right / len(self.held_out)

    def compare(self, value: float, dense: float) -> float:
        """Return the accuracy as a percentage of the dense model's."""
        return 100 * value / dense

    def runs(self, model: Any) -> dict[str, Callable[[], Any]]:
        """Return the functions that are timed, by name."""
        items = {f"{count} texts": next(batches(self.held_out, count, None)) for count in (1, 32)}
        return {what: lambda b=batch: model(**b) for what, batch in items.items()}


class Text:
    """Next-token prediction with a decoder that this script trains."""

    name, shapes, rate = "text", TEXT, Rate(400, 2e-3, 1e-3, 0.1)
    unit, of_dense = "bits per byte", "recipe / dense - 1, %"

    def __init__(self, data: Path, out: Path) -> None:
        corpus, source = out / "corpus", out / "texts.jsonl"
        if not source.exists():
            source.write_text("".join(_documents(data)), encoding="utf-8")
        options = PrepareConfig(vocab_size=2048, validation_fraction=0.05)
        report = prepare(source, corpus, options)
        held_out = report.validation
        self.tokens_per_byte = held_out.tokens / held_out.text_bytes
        self.rows = {side: _rows(corpus, side, 256) for side in ("train", "validation")}

    def make(self, seed: int) -> Any:
        """Return a randomly initialized decoder."""
        sizes = {"hidden_size": 384, "num_layers": 6, "num_heads": 6}
        config = OPTConfig(vocab_size=2048, max_seq_len=256, pad_token_id=None, **sizes)  # type: ignore[arg-type]
        torch.manual_seed(seed)
        return OPT.from_config(config)

    def stream(self, seed: int) -> Iterator[Batch]:
        """Yield training batches without end."""
        draw = torch.Generator().manual_seed(seed)
        rows = self.rows["train"]
        while True:
            for part in rows[torch.randperm(len(rows), generator=draw)].split(8):
                yield {"input_ids": part, "labels": part}

    def calibration(self, seed: int) -> list[Batch]:
        """Return calibration batches."""
        stream = self.stream(seed + 1000)
        return [next(stream) for _ in range(8)]

    @torch.no_grad()
    def measure(self, model: Any) -> float:
        """Return the bits per byte of held-out documents."""
        rows = self.rows["validation"]
        losses = [float(model(input_ids=r, labels=r).loss) * len(r) for r in rows.split(8)]
        return sum(losses) / len(rows) / math.log(2) * self.tokens_per_byte

    def compare(self, value: float, dense: float) -> float:
        """Return the increase over the dense model in per cent."""
        return 100 * (value / dense - 1)

    def runs(self, model: Any) -> dict[str, Callable[[], Any]]:
        """Return the functions that are timed, by name."""
        prompt = self.rows["validation"][:1, :64]

        def write() -> None:
            decoder = Decoder(model, None, 96)
            scores = decoder.run(prompt)
            for _ in range(32):
                scores = decoder.run(scores.argmax(-1, keepdim=True))

        row = self.rows["validation"][:1]
        return {
            "32 tokens after 64": write,
            "256 at once": lambda: model(input_ids=row, logits_to_keep=1),
        }


def _documents(data: Path) -> Iterator[str]:
    """Yield the news items and the parts of the plays as JSON lines."""
    import csv

    with open(data / "ag_news" / "test.csv", encoding="utf-8", newline="") as file:
        for _, title, text in csv.reader(file):
            yield json.dumps({"text": f"{title}. {text}"}) + "\n"
    play = (data / "tinyshakespeare.txt").read_text(encoding="utf-8").split("\n\n")
    for start in range(0, len(play), 12):
        yield json.dumps({"text": "\n\n".join(play[start : start + 12])}) + "\n"


def _rows(corpus: Path, side: str, length: int) -> torch.Tensor:
    """Return the tokens of a split as rows: (rows, length)."""
    store = TokenStore(corpus / side / "tokens")
    ids = torch.cat([torch.from_numpy(store[i].astype("int64")) for i in range(len(store))])
    count = len(ids) // length
    return ids[: count * length].view(count, length)


Task = News | Text


def train_(model: Any, task: Task, job: Any, steps: int, rate: float, seed: int) -> None:
    """Train a model in place at a peak learning rate; a job changes the loss."""
    groups = (
        ()
        if job is None
        else tuple(
            OptimGroup(glob, **options)  # type: ignore[arg-type]
            for method in job.methods
            for glob, options in getattr(method, "optim_groups", dict)().items()
        )
    )
    config = OptimConfig(lr=rate, weight_decay=task.rate.decay, groups=groups)
    (optimizer,) = build_optimizers(model.train(), config)
    schedule = build_schedule(ScheduleConfig(warmup_steps=max(1, steps // 10)), steps)
    objective, stream = _plain if job is None else job.objective(_plain), task.stream(seed)
    for step in range(steps):
        set_learning_rate_([optimizer], schedule(step))
        with torch.autocast("cpu", torch.bfloat16):
            batch = next(stream)
            labels = batch["labels"]
            loss = objective(model, batch, (labels[:, 1:] if labels.dim() == 2 else labels).numel())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if job is not None:
            job.after_step_()
        if (step + 1) % 50 == 0:
            print(f"    step {step + 1} of {steps}, loss {loss.item():.4f}", file=sys.stderr)
    model.eval()


def _plain(model: Any, batch: Batch, num_items: float) -> torch.Tensor:
    return model(**batch, num_items_in_batch=num_items).loss  # type: ignore[no-any-return]


class Bench:
    """The models and results of one task in a directory.

    Args:
        task: the task.
        out: directory of the models and results.
        steps: training steps of a recipe.
    """

    def __init__(self, task: Task, out: Path, steps: int) -> None:
        self.task, self.out, self.steps = task, out / task.name, steps

    def place(self, seed: int, name: str) -> Path:
        """Return the directory of a model."""
        return self.out / f"{seed}-{name.replace(' ', '-').replace(':', '')}"

    def dense(self, seed: int) -> Path:
        """Return the directory of the trained dense model."""
        place = self.place(seed, "dense")
        if not place.exists():
            model, rate = self.task.make(seed), self.task.rate
            torch.manual_seed(seed)
            train_(model, self.task, None, rate.steps, rate.first, seed)
            model.save_pretrained(place)
        return place

    def measure(self, seed: int, name: str, make: Callable[[], tuple[Any, dict[str, Any]]]) -> Any:
        """Return the stored results of a model, or create, measure and save the model."""
        place = self.place(seed, name)
        record = place.with_suffix(".json")
        key = {"steps": self.steps, "recipe": repr(RECIPES.get(name)), "rate": repr(self.task.rate)}
        if record.exists():
            stored = json.loads(record.read_text())
            if stored["key"] == key:
                return stored
        start = time.process_time()
        torch.manual_seed(seed)
        model, facts = make()
        facts |= {"key": key, "seconds": time.process_time() - start}
        model = model.eval()
        facts["value"] = self.task.measure(model)
        model.save_pretrained(place, overwrite=True)
        record.write_text(json.dumps(facts))
        return facts

    def measure_dense(self, seed: int, further: int) -> Any:
        """Return the results of the dense model after further steps."""

        def make() -> tuple[Any, dict[str, Any]]:
            model = AutoModel.from_pretrained(self.dense(seed))
            if further:
                train_(model, self.task, None, further, self.task.rate.further, seed + 1)
            return model, {"bytes": measure_sizes(model).size_bytes}

        return self.measure(seed, f"dense-{further}", make)

    def measure_recipe(self, seed: int, name: str, recipe: Recipe) -> Any:
        """Return the results of a recipe."""
        return self.measure(seed, name, lambda: self.compress_model(seed, recipe))

    def compress_model(self, seed: int, recipe: Recipe) -> tuple[Any, dict[str, Any]]:
        """Run the phases of a recipe; return the model and its facts."""
        task, dense, facts = self.task, self.dense(seed), dict[str, Any]()
        model: Any = AutoModel.from_pretrained(dense)
        config, steps = recipe.build(task.shapes, self.steps)
        for phase in split_phases(config, steps):
            teacher = AutoModel.from_pretrained(dense) if phase.config.distill else None
            samples = task.calibration(seed) if phase.config.is_calibrated else None
            job = compress(model, phase.config, teacher=teacher, batches=samples)
            if phase.steps:
                rate = task.rate.further * recipe.faster
                train_(model, task, job, phase.steps, rate, seed + 1)
                model.train()
            facts[phase.name] = job.finish_().format()
            model = job.model.eval()
        for scheme, where in recipe.then:
            quantize(model, scheme, where=where)
        return model, facts | {"bytes": measure_sizes(model).size_bytes}


def show_quality(bench: Bench, names: list[str], seeds: list[int]) -> None:
    """Print a row for every recipe."""
    task = bench.task
    columns = ["recipe", "steps", task.unit, "dense", task.of_dense, "target", "MB", "CPU, s"]
    print(f"\n{task.name}, seeds {seeds}\n\n" + table(columns, []), flush=True)
    for name in names:
        recipe = RECIPES[name]
        compressed, dense = [], []
        for seed in seeds:
            further = bench.steps if recipe.trains else 0
            dense.append(bench.measure_dense(seed, further))
            compressed.append(bench.measure_recipe(seed, name, recipe))
        pairs = zip(compressed, dense, strict=True)
        compared = [task.compare(a["value"], b["value"]) for a, b in pairs]
        target = recipe.wanted.get(task.name)
        line = [
            name,
            str(bench.steps if recipe.trains else 0),
            " ".join(f"{run['value']:.4g}" for run in compressed),
            " ".join(f"{run['value']:.4g}" for run in dense),
            f"{statistics.mean(compared):.2f}",
            "" if target is None else f"{target:g}",
            f"{dense[0]['bytes'] / 1e6:.1f} -> {compressed[0]['bytes'] / 1e6:.1f}",
            f"{statistics.mean(run['seconds'] for run in compressed):.0f}",
        ]
        print("| " + " | ".join(line) + " |", flush=True)


@torch.inference_mode()
def show_speed(bench: Bench, names: list[str], seed: int, rounds: int) -> None:
    """Print the speed of the stored models compared with the dense model."""
    places = {name: bench.place(seed, name) for name in names}
    models = {n: AutoModel.from_pretrained(p).eval() for n, p in places.items() if p.exists()}
    models["dense"] = AutoModel.from_pretrained(bench.dense(seed)).eval()
    runs = {name: bench.task.runs(model) for name, model in models.items()}
    seconds = {
        what: time_runs({name: each[what] for name, each in runs.items()}, rounds)
        for what in runs["dense"]
    }
    rows = [
        [name, *(f"{paired_ratio(times, name, 'dense'):.2f}" for times in seconds.values())]
        for name in models
    ]
    print(f"\n{bench.task.name}: speed, recipe / dense\n")
    print(table(["recipe", *seconds], rows), flush=True)


def main() -> None:
    """Measure the tasks."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", nargs="+", choices=["news", "text"], default=["news", "text"])
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    print(header(threads, ["torch"]))
    for name in options.task:
        bench = Bench(
            {"news": News, "text": Text}[name](options.data, options.out),
            options.out,
            options.steps,
        )
        if options.speed:
            show_speed(bench, options.only, options.seeds[0], options.rounds)
        else:
            show_quality(bench, options.only, options.seeds)


if __name__ == "__main__":
    main()
