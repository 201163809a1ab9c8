"""Accuracy of prompts and adapters on Chinese reviews (eprstmt) with a small encoder.

    python -m benchmarks.prompts.eprstmt DATA --out DIR [--minutes 15] [--stage all] [--seeds 3]

DATA has `eprstmt/` and `tang_poetry.jsonl`. The stages are:

- body: trains a BERT with 4 blocks of hidden size 256 and one token per character on masked poems
  and reviews, without those of the test file.
- prompt: trains on the 32 reviews of train_0 and tests on the 610 of test_public: zero shot, the
  prompt, and a new head on the same encoder.
- delta: trains on three quarters of all reviews and tests on the rest: full fine-tuning and every
  type of adapter, each with a new classifier.

Learning rates and steps are those of AG News; they were not tuned for this task.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.adapters.ag_news import ALSO, TYPES
from benchmarks.harness import header, make_parser, table
from benchmarks.prompts.ag_news import accuracy, learn, pad_rows
from bmforge.data.tasks import TaskExample, read_task
from bmforge.device import fast_products
from bmforge.models import Bert, BertConfig
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.prompt import (
    ManualVerbalizer,
    PromptClassifier,
    Template,
    calibrate,
)
from bmforge.tune.prompt.published_templates import read_published

# Tokens of a text; a prompt adds up to 16 tokens.
LENGTH = 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZE = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 4, "num_heads": 4}
# Learning rate and steps from `ag_news.py`.
FEW = {"lr": 1e-4, "steps": 60}
STEPS, BATCH = 160, 32


def read_poems(data: Path) -> list[str]:
    """Return the texts of the poems."""
    lines = (data / "tang_poetry.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def write_tokenizer(texts: Sequence[str], out: Path) -> None:
    """Write a vocabulary of the characters that occur at least twice."""
    counts = Counter(character for text in texts for character in text if not character.isspace())
    characters = sorted(c for c, count in counts.items() if count > 1)
    out.mkdir(parents=True, exist_ok=True)
    words = "\n".join((*SPECIAL, *characters)) + "\n"
    (out / "vocab.txt").write_text(words, encoding="utf-8")
    (out / "config.json").write_text(json.dumps({"model_type": "bert"}))


def mask_rows(batch: Tensor, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return masked ids and the labels: 15 % of the tokens, of which BERT masks 80 %."""
    chance = torch.rand(batch.shape, generator=draw)
    hidden = (chance < 0.15) & (batch >= len(SPECIAL))
    other = torch.randint(len(SPECIAL), size, batch.shape, generator=draw)
    mask = SPECIAL.index("[MASK]")
    seen = torch.where(chance < 0.12, mask, torch.where(chance < 0.135, other, batch))
    return torch.where(hidden, seen, batch), batch.where(hidden, -100)


def train_body(data: Path, out: Path, minutes: float) -> None:
    """Train the encoder and its masked-token head, and write both with the tokenizer."""
    reviews = [row.fields["sentence"] for part in ("train_few_all", "dev_0")
               for row in read_task("eprstmt", data / "eprstmt", part)]  # fmt: skip
    texts = [*read_poems(data), *reviews * 10]
    write_tokenizer(texts, out / "start")
    tokenizer = AutoTokenizer.from_pretrained(out / "start")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), max_seq_len=LENGTH + 16, **SIZE)  # type: ignore[arg-type]
    model = Bert.from_config(config).train()
    cls, sep = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
    ids = [[cls, *row[: LENGTH - 2], sep] for row in tokenizer.encode_plain(texts)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    draw, begun, losses = torch.Generator().manual_seed(0), time.process_time(), []
    while (spent := (time.process_time() - begun) / (60 * minutes)) < 1:
        chosen = torch.randint(len(ids), (32,), generator=draw).tolist()
        rows, mask = pad_rows([ids[n] for n in chosen])
        seen, labels = mask_rows(rows, len(tokenizer), draw)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, 20 * spent) * (1 - spent)
        loss = model(input_ids=seen, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 200 == 0:
            print(f"step {len(losses)}, loss {statistics.fmean(losses[-200:]):.3f}", flush=True)
    model.save_pretrained(out / "model", overwrite=True)
    tokenizer.save_pretrained(out / "model")
    print(f"{len(losses)} steps in {minutes} minutes of CPU time, {len(tokenizer)} tokens, "
          f"last loss {statistics.fmean(losses[-200:]):.3f}")  # fmt: skip


def open_body(out: Path, seed: int, head: str) -> Any:
    """Open the model; a classifier is initialized from the seed."""
    if head == "masked_lm":
        return Bert.from_pretrained(out / "model", head=head)
    model: Any = Bert.from_pretrained(out / "model", head=head, new_head=True, num_labels=2)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.classifier.weight.normal_(std=0.02, generator=draw)
    return model


def encode(out: Path, rows: Sequence[TaskExample]) -> list[list[int]]:
    """Return the token ids of the reviews."""
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    texts = [row.fields["sentence"] for row in rows]
    cls, sep = tokenizer.role_id("cls"), tokenizer.role_id("sep")
    return [[cls, *ids[: LENGTH - 2], sep] for ids in tokenizer.encode_plain(texts)]


@torch.no_grad()
def judge(model: Any, ids: Sequence[list[int]], rows: Sequence[TaskExample]) -> float:
    """Return the accuracy of a classifier."""
    parts = (pad_rows(ids[n : n + 64]) for n in range(0, len(ids), 64))
    return accuracy(torch.cat([model.eval()(i, m).logits for i, m in parts]), rows)


def train_classifier(
    model: Any, ids: Sequence[list[int]], rows: Sequence[TaskExample], settings: Any, seed: int
) -> None:
    """Train the parameters that are not frozen on labeled reviews."""
    labels = torch.tensor([row.label for row in rows])

    def loss(step: int) -> Tensor:
        chosen = torch.randperm(len(ids))[: settings.get("batch", 16)]
        batch, mask = pad_rows([ids[n] for n in chosen.tolist()])
        return F.cross_entropy(model.train()(batch, mask).logits, labels[chosen])

    parameters = [p for p in model.parameters() if p.requires_grad]
    learn(parameters, loss, settings["lr"], settings["steps"], seed)


def run_prompts(data: Path, out: Path, seeds: int) -> list[list[str]]:
    """Return the rows of the prompts, zero shot and with 32 reviews, and of a new head."""
    few = read_task("eprstmt", data / "eprstmt", "train_0")
    test = read_task("eprstmt", data / "eprstmt", "test")
    tokenizer, published = AutoTokenizer.from_pretrained(out / "model"), read_published()["eprstmt"]
    words, accuracies = ManualVerbalizer(published.words, tokenizer), {}
    for choice, text in enumerate(published.templates):
        for seed in range(seeds):
            model = open_body(out, seed, "masked_lm")
            classifier = PromptClassifier(model, Template(text, tokenizer, model), words)
            calibrate(classifier, few, max_seq_len=LENGTH)
            if seed == 0:
                scores = classifier.classify(test, size=64, max_seq_len=LENGTH)
                accuracies[f"template {choice}, zero shot, calibrated"] = [accuracy(scores, test)]
            asked = [classifier.ask(row, max_seq_len=LENGTH) for row in few]

            def loss(step: int, classifier: Any = classifier, asked: Any = asked) -> Tensor:
                chosen = torch.randperm(len(few))[:16].tolist()
                labels = [few[n].label for n in chosen]
                batch = classifier.collate([asked[n] for n in chosen], labels)
                return classifier.train()(**batch).loss  # type: ignore[no-any-return]

            learn(list(model.parameters()), loss, **FEW, seed=seed)
            scores = classifier.classify(test, size=64, max_seq_len=LENGTH)
            accuracies.setdefault(f"template {choice}, 32 reviews", []).append(
                accuracy(scores, test)
            )
    own, ids = encode(out, few), encode(out, test)
    for seed in range(seeds):
        model = open_body(out, seed, "sequence_classification")
        train_classifier(model, own, few, FEW, seed)
        accuracies.setdefault("new head, 32 reviews", []).append(judge(model, ids, test))
    larger = max(Counter(row.label for row in test).values()) / len(test)
    accuracies["majority class"] = [larger]
    return [_line(name, scores) for name, scores in accuracies.items()]


def run_deltas(data: Path, out: Path, seeds: int) -> list[list[str]]:
    """Return the rows of full fine-tuning and of every adapter."""
    parts = ("train_few_all", "dev_0", "test")
    every = [row for part in parts for row in read_task("eprstmt", data / "eprstmt", part)]
    unique = list({row.fields["sentence"]: row for row in every}.values())
    random.Random(0).shuffle(unique)
    cut = len(unique) * 3 // 4
    rows, test = unique[:cut], unique[cut:]
    own, ids, lines = encode(out, rows), encode(out, test), []
    for name, (build, rate) in TYPES.items():
        scores, share = [], "100"
        for seed in range(seeds):
            model = open_body(out, seed, "sequence_classification")
            total = sum(p.numel() for p in model.parameters())
            if build is not None:
                delta = build(model, seed=seed, modules_to_save=ALSO)
                also = sum(p.numel() for n, p in model.named_parameters() if n.startswith(ALSO))
                trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
                share = f"{100 * (trained - also) / total:.3f}"
                assert delta.places()
            settings = {"lr": rate, "steps": STEPS, "batch": BATCH}
            train_classifier(model, own, rows, settings, seed)
            scores.append(judge(model, ids, test))
        lines.append([*_line(name, scores), share])
        print(" | ".join(lines[-1]), flush=True)
    print(f"{len(rows)} training reviews, {len(test)} test reviews")
    return lines


def _line(name: str, scores: Sequence[float]) -> list[str]:
    each = " ".join(f"{score:.3f}" for score in scores)
    return [name, f"{statistics.fmean(scores):.3f}", each]


def main() -> None:
    """Run the stages."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--stage", choices=["all", "body", "prompt", "delta"], default="all")
    parser.add_argument("--minutes", type=float, default=15, help="CPU time of the training, min")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(header(torch.get_num_threads(), ["torch"]))
    if options.stage in ("all", "body"):
        train_body(options.data, options.out, options.minutes)
    if options.stage in ("all", "prompt"):
        lines = run_prompts(options.data, options.out, options.seeds)
        print(table(["method", "accuracy", "each seed"], lines))
    if options.stage in ("all", "delta"):
        lines = run_deltas(options.data, options.out, options.seeds)
        print(table(["type", "accuracy", "each seed", "trained, %"], lines))


if __name__ == "__main__":
    with fast_products():
        main()
