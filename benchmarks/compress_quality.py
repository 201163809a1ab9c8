"""What making a model small does to its quality, beside the whole model trained as long.

    python benchmarks/compress_quality.py DATA --out DIR [--task news text] [--seeds 0]
        [--only int8 "2:4" ...] [--steps 120] [--speed]

DATA holds `ag_news/test.csv` and `tinyshakespeare.txt`. Two models, each made small from the same
trained one by every recipe of `compress_recipes.py`:

- news: the all-MiniLM-L6-v2 of the development environment (22M) with a classifier of AG News,
  5,000 items to learn from, 2,000 others held out; accuracy, of that of the whole model.
- text: an OPT of 11M, trained here on the news and tinyshakespeare; bits per byte of held-out
  documents, against those of the whole model.

The whole model is trained once a seed, and kept in DIR with every small model and every result, so
that the same command goes on where it was stopped. A recipe's steps all count: the whole model
beside it has as many more, at the same rate. Training is in bf16 (autocast), quality is measured in
fp32. `--speed` times the small models beside the whole one instead, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from compress_recipes import NEWS, RECIPES, TEXT, Recipe  # noqa: E402
from compress_speed import in_turns, ratio  # noqa: E402
from delta_ag_news import ENCODER, Item, batches, read_items  # noqa: E402
from harness import header, table  # noqa: E402

from bmforge.compress import compress, measure_sizes, quantize  # noqa: E402
from bmforge.compress.phases import split_phases  # noqa: E402
from bmforge.data import PrepareConfig, TokenStore, prepare  # noqa: E402
from bmforge.infer.decoder import Decoder  # noqa: E402
from bmforge.models import OPT, AutoModel, Bert, OPTConfig  # noqa: E402
from bmforge.tokenizers import AutoTokenizer  # noqa: E402
from bmforge.train import OptimConfig, OptimGroup, ScheduleConfig, build_schedule  # noqa: E402
from bmforge.train.optim.build import build_optimizers  # noqa: E402
from bmforge.train.schedule import set_learning_rate_  # noqa: E402

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rate:
    """How a model is trained: steps of the whole one, peak rates of it and of what follows."""

    steps: int
    first: float
    further: float
    decay: float


class News:
    """Classes of news, by an encoder that was trained by others."""

    name, shapes, rate = "news", NEWS, Rate(157, 1e-4, 1e-4, 0.01)
    unit, of_dense = "accuracy, %", "of the dense model's, %"

    def __init__(self, data: Path, out: Path) -> None:
        spec = find_spec(ENCODER)
        assert spec is not None
        assert spec.submodule_search_locations
        self.place = Path(spec.submodule_search_locations[0]) / "model"
        items = read_items(data / "ag_news", AutoTokenizer.from_pretrained(self.place), 48)
        self.learn: list[Item] = items[:5000]
        self.held_out: list[Item] = items[5000:7000]

    def make(self, seed: int) -> Any:
        """Return the encoder with a classifier drawn from a seed."""
        told = {"head": "sequence_classification", "new_head": True, "num_labels": 4}
        model: Any = Bert.from_pretrained(self.place, **told)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.classifier.weight.normal_(std=0.02, generator=draw)
        return model

    def stream(self, seed: int) -> Iterator[Batch]:
        """Yield batches to learn from, for ever."""
        return batches(self.learn, 32, seed)

    def look(self, seed: int) -> list[Batch]:
        """Return batches for what looks at real inputs."""
        stream = batches(self.learn, 32, seed + 1000)
        return [next(stream) for _ in range(12)]

    @torch.no_grad()
    def measure(self, model: Any) -> float:
        """Return the accuracy on what was held out, in per cent."""
        right = 0
        for batch in batches(self.held_out, 50, None):
            labels = batch.pop("labels")
            right += int((model(**batch).logits.argmax(-1) == labels).sum())
        return 100 * right / len(self.held_out)

    def compare(self, value: float, dense: float) -> float:
        """Return how much of the dense model's quality is left, in per cent."""
        return 100 * value / dense

    def runs(self, model: Any) -> dict[str, Callable[[], Any]]:
        """Return what is timed of a model."""
        items = {f"{count} texts": next(batches(self.held_out, count, None)) for count in (1, 32)}
        return {what: lambda b=batch: model(**b) for what, batch in items.items()}


class Text:
    """The next token, by a decoder that is trained here."""

    name, shapes, rate = "text", TEXT, Rate(400, 2e-3, 1e-3, 0.1)
    unit, of_dense = "bits per byte", "above the dense model's, %"

    def __init__(self, data: Path, out: Path) -> None:
        corpus, source = out / "corpus", out / "texts.jsonl"
        if not source.exists():
            source.write_text("".join(_documents(data)), encoding="utf-8")
        given = PrepareConfig(vocab_size=2048, validation_fraction=0.05)
        report = prepare(source, corpus, given)
        held_out = report.validation
        self.tokens_per_byte = held_out.tokens / held_out.text_bytes
        self.rows = {side: _rows(corpus, side, 256) for side in ("train", "validation")}

    def make(self, seed: int) -> Any:
        """Return a decoder drawn from a seed."""
        sizes = {"hidden_size": 384, "num_layers": 6, "num_heads": 6}
        config = OPTConfig(vocab_size=2048, max_seq_len=256, pad_token_id=None, **sizes)  # type: ignore[arg-type]
        torch.manual_seed(seed)
        return OPT.from_config(config)

    def stream(self, seed: int) -> Iterator[Batch]:
        """Yield batches to learn from, for ever."""
        draw = torch.Generator().manual_seed(seed)
        rows = self.rows["train"]
        while True:
            for part in rows[torch.randperm(len(rows), generator=draw)].split(8):
                yield {"input_ids": part, "labels": part}

    def look(self, seed: int) -> list[Batch]:
        """Return batches for what looks at real inputs."""
        stream = self.stream(seed + 1000)
        return [next(stream) for _ in range(8)]

    @torch.no_grad()
    def measure(self, model: Any) -> float:
        """Return the bits per byte of what was held out."""
        rows = self.rows["validation"]
        losses = [float(model(input_ids=r, labels=r).loss) * len(r) for r in rows.split(8)]
        return sum(losses) / len(rows) / math.log(2) * self.tokens_per_byte

    def compare(self, value: float, dense: float) -> float:
        """Return by how much there are more bits than with the dense model, in per cent."""
        return 100 * (value / dense - 1)

    def runs(self, model: Any) -> dict[str, Callable[[], Any]]:
        """Return what is timed of a model."""
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
    """Yield every news item, and the play in pieces, as lines of JSON."""
    import csv

    with open(data / "ag_news" / "test.csv", encoding="utf-8", newline="") as file:
        for _, title, text in csv.reader(file):
            yield json.dumps({"text": f"{title}. {text}"}) + "\n"
    play = (data / "tinyshakespeare.txt").read_text(encoding="utf-8").split("\n\n")
    for start in range(0, len(play), 12):
        yield json.dumps({"text": "\n\n".join(play[start : start + 12])}) + "\n"


def _rows(corpus: Path, side: str, length: int) -> torch.Tensor:
    """Return the tokens of one side as rows: (rows, length)."""
    store = TokenStore(corpus / side / "tokens")
    ids = torch.cat([torch.from_numpy(store[i].astype("int64")) for i in range(len(store))])
    count = len(ids) // length
    return ids[: count * length].view(count, length)


Task = News | Text


def train_(model: Any, task: Task, job: Any, steps: int, rate: float, seed: int) -> None:
    """Train so many steps, with what a job adds to the loss, in place."""
    groups = (
        ()
        if job is None
        else tuple(
            OptimGroup(glob, **given)  # type: ignore[arg-type]
            for method in job.methods
            for glob, given in getattr(method, "optim_groups", dict)().items()
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
        task: which.
        out: where all of it is kept.
        steps: of every recipe that trains.
    """

    def __init__(self, task: Task, out: Path, steps: int) -> None:
        self.task, self.out, self.steps = task, out / task.name, steps

    def place(self, seed: int, name: str) -> Path:
        """Return the directory of a model."""
        return self.out / f"{seed}-{name.replace(' ', '-').replace(':', '')}"

    def dense(self, seed: int) -> Path:
        """Return the directory of the trained whole model."""
        place = self.place(seed, "dense")
        if not place.exists():
            model, rate = self.task.make(seed), self.task.rate
            torch.manual_seed(seed)
            train_(model, self.task, None, rate.steps, rate.first, seed)
            model.save_pretrained(place)
        return place

    def measure(self, seed: int, name: str, make: Callable[[], tuple[Any, dict[str, Any]]]) -> Any:
        """Return what was measured of a model; make it, and save it, where that was not done."""
        place = self.place(seed, name)
        record = place.with_suffix(".json")
        key = {"steps": self.steps, "recipe": repr(RECIPES.get(name)), "rate": repr(self.task.rate)}
        if record.exists():
            found = json.loads(record.read_text())
            if found["key"] == key:
                return found
        start = time.process_time()
        torch.manual_seed(seed)
        model, facts = make()
        facts |= {"key": key, "seconds": time.process_time() - start}
        model = model.eval()
        facts["value"] = self.task.measure(model)
        model.save_pretrained(place, overwrite=True)
        record.write_text(json.dumps(facts))
        return facts

    def whole(self, seed: int, further: int) -> Any:
        """Return what was measured of the whole model after so many more steps."""

        def make() -> tuple[Any, dict[str, Any]]:
            model = AutoModel.from_pretrained(self.dense(seed))
            if further:
                train_(model, self.task, None, further, self.task.rate.further, seed + 1)
            return model, {"bytes": measure_sizes(model).size_bytes}

        return self.measure(seed, f"dense-{further}", make)

    def small(self, seed: int, name: str, recipe: Recipe) -> Any:
        """Return what was measured of the model after a recipe."""
        return self.measure(seed, name, lambda: self.make_small(seed, recipe))

    def make_small(self, seed: int, recipe: Recipe) -> tuple[Any, dict[str, Any]]:
        """Carry out a recipe, phase by phase; return the small model and facts of it."""
        task, dense, facts = self.task, self.dense(seed), dict[str, Any]()
        model: Any = AutoModel.from_pretrained(dense)
        config, steps = recipe.build(task.shapes, self.steps)
        for phase in split_phases(config, steps):
            teacher = AutoModel.from_pretrained(dense) if phase.config.distill else None
            look = task.look(seed) if phase.config.is_calibrated else None
            job = compress(model, phase.config, teacher=teacher, batches=look)
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
    """Print a line for every recipe."""
    task = bench.task
    columns = ["recipe", "steps", task.unit, "dense", task.of_dense, "wanted", "MB", "CPU s"]
    print(f"\n{task.name}, seeds {seeds}\n\n" + table(columns, []), flush=True)
    for name in names:
        recipe = RECIPES[name]
        found, dense = [], []
        for seed in seeds:
            further = bench.steps if recipe.trains else 0
            dense.append(bench.whole(seed, further))
            found.append(bench.small(seed, name, recipe))
        compared = [task.compare(a["value"], b["value"]) for a, b in zip(found, dense, strict=True)]
        wanted = recipe.wanted.get(task.name)
        line = [
            name,
            str(bench.steps if recipe.trains else 0),
            " ".join(f"{one['value']:.4g}" for one in found),
            " ".join(f"{one['value']:.4g}" for one in dense),
            f"{statistics.mean(compared):.2f}",
            "" if wanted is None else f"{wanted:g}",
            f"{dense[0]['bytes'] / 1e6:.1f} -> {found[0]['bytes'] / 1e6:.1f}",
            f"{statistics.mean(one['seconds'] for one in found):.0f}",
        ]
        print("| " + " | ".join(line) + " |", flush=True)


@torch.inference_mode()
def show_speed(bench: Bench, names: list[str], seed: int, rounds: int) -> None:
    """Print how many times as fast as the dense model the small ones are."""
    places = {name: bench.place(seed, name) for name in names}
    models = {n: AutoModel.from_pretrained(p).eval() for n, p in places.items() if p.exists()}
    models["dense"] = AutoModel.from_pretrained(bench.dense(seed)).eval()
    runs = {name: bench.task.runs(model) for name, model in models.items()}
    found = {
        what: in_turns({name: each[what] for name, each in runs.items()}, rounds)
        for what in runs["dense"]
    }
    rows = [
        [name, *(f"{ratio(times[name], times['dense']):.2f}x" for times in found.values())]
        for name in models
    ]
    print(f"\n{bench.task.name}, times as fast as the dense model\n")
    print(table(["recipe", *found], rows), flush=True)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", nargs="+", choices=["news", "text"], default=["news", "text"])
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    print(
        header(
            "python benchmarks/compress_quality.py " + " ".join(sys.argv[1:]), threads, ["torch"]
        )
    )
    for name in given.task:
        bench = Bench(
            {"news": News, "text": Text}[name](given.data, given.out), given.out, given.steps
        )
        if given.speed:
            show_speed(bench, given.only, given.seeds[0], given.rounds)
        else:
            show_quality(bench, given.only, given.seeds)


if __name__ == "__main__":
    main()
