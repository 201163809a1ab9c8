"""The quick-start on real data against transformers' Trainer: same weights, same batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, SequentialSampler

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.dataset import DistributedDataLoader
from bmforge.compat.model_center.dataset.bertdataset import DATASET
from bmforge.compat.model_center.layer import Linear
from bmforge.compat.model_center.model import Bert
from bmforge.compat.model_center.tokenizer import BertTokenizer
from bmforge.data.tasks import TASKS, read_task
from bmforge.data.tasks.metrics import accuracy
from bmforge.parallel import shutdown_distributed

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
STEPS, WARMUP, BATCH, LR = 100, 10, 16, 1e-3

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not DATA.is_dir(), reason="real data is not on this machine"),
]


def write_model(folder: Path, texts: list[str], is_chinese: bool, num_labels: int) -> None:
    """Write a BERT with a classifier, and a vocabulary of the texts' commonest words."""
    from transformers import BertConfig, BertForSequenceClassification

    counts = Counter(
        unit for text in texts for unit in (text if is_chinese else text.lower().split())
    )
    units = [unit for unit, _ in counts.most_common(3000) if unit.strip()]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(units),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=num_labels,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(SPECIAL + units) + "\n", encoding="utf-8")


class Classifier(torch.nn.Module):
    """The quick-start's model."""

    def __init__(self, folder: Path, num_labels: int) -> None:
        super().__init__()
        self.bert = Bert.from_pretrained(folder)
        self.dense = Linear(64, num_labels, bias=True)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.dense(self.bert(input_ids, attention_mask=attention_mask).pooler_output)


def train_ours(folder: Path, head: Any, train: Any, test: Any) -> tuple[list[float], float, Any]:
    """Run the program; return its losses, its accuracy and the batches it saw."""
    model = Classifier(folder, len(head.weight))
    model.dense.load_state_dict(head.state_dict())
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=LR)
    schedule = bmt.lr_scheduler.Linear(
        optimizer, start_lr=LR, warmup_iter=WARMUP, end_iter=STEPS, num_iter=0
    )
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer, schedule)
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    losses, batches = [], []
    loader = DistributedDataLoader(train, shuffle=True, batch_size=BATCH, drop_last=True)
    while len(losses) < STEPS:
        for batch in loader:
            logits = model(batch["input_ids"], batch["attention_mask"])
            loss = loss_func(logits, batch["labels"])
            manager.zero_grad()
            manager.backward(loss)
            manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            manager.step()
            losses.append(loss.item())
            batches.append(batch)
            if len(losses) == STEPS:
                break
    model.eval()
    found, wanted = [], []
    with torch.no_grad():
        for batch in DistributedDataLoader(test, batch_size=64):
            found += model(batch["input_ids"], batch["attention_mask"]).argmax(-1).tolist()
            wanted += batch["labels"].tolist()
    return losses, accuracy(found, wanted), batches


class Rows(Dataset[dict[str, Any]]):
    """The examples of given batches, in their order."""

    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self.tensors = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}

    def __len__(self) -> int:
        return len(self.tensors["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        names = ("input_ids", "attention_mask", "labels")
        return {name: self.tensors[name][index] for name in names}


def train_theirs(folder: Path, out: Path, batches: Any, test: Any) -> tuple[list[float], float]:
    """Train the same model on the same batches with transformers' Trainer."""
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    losses: list[float] = []

    def record(module: Any, _: Any, result: Any) -> None:
        if module.training:
            losses.append(result.loss.item())

    arguments = TrainingArguments(
        str(out),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        learning_rate=LR,
        warmup_steps=WARMUP,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        weight_decay=0.0,
        seed=0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = BertForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    model.register_forward_hook(record)
    trainer = InOrder(model, arguments, train_dataset=Rows(batches))
    trainer.train()
    rows = Rows([{name: value[None] for name, value in test[n].items()} for n in range(len(test))])
    predicted = trainer.predict(rows)  # type: ignore[arg-type]
    found = predicted.predictions.argmax(-1).tolist()
    return losses, accuracy(found, rows.tensors["labels"].tolist())


@pytest.mark.parametrize(
    ("task", "splits", "width"),
    [("eprstmt", ("train_few_all", "test"), 64), ("ag_news", ("train", "test"), 48)],
)
def test_the_same_curve_as_transformers_trainer(
    task: str, splits: tuple[str, str], width: int, tmp_path: Path
) -> None:
    """100 steps: every loss within 1e-4, accuracies within a point, and better than guessing."""
    from transformers import BertForSequenceClassification

    data = DATA
    if task == "ag_news":  # only its test file is here: 6,000 items to train on, 1,600 to test
        lines = (DATA / task / "test.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        data = tmp_path / "data"
        (data / task).mkdir(parents=True)
        (data / task / "train.csv").write_text("".join(lines[:6000]), encoding="utf-8")
        (data / task / "test.csv").write_text("".join(lines[6000:]), encoding="utf-8")
    texts = [" ".join(e.fields.values()) for e in read_task(task, data, splits[0])]
    num_labels = len(TASKS[task].label_names)
    write_model(tmp_path / "bert", texts, task == "eprstmt", num_labels)
    try:
        bmt.init_distributed(seed=0)
        tokenizer = BertTokenizer.from_pretrained(tmp_path / "bert")
        train, test = (
            DATASET[task](str(data), split, 0, 1, tokenizer, max_encoder_length=width)
            for split in splits
        )
        head = BertForSequenceClassification.from_pretrained(tmp_path / "bert").classifier
        losses, accuracy_here, batches = train_ours(tmp_path / "bert", head, train, test)
    finally:
        shutdown_distributed()
    theirs, accuracy_there = train_theirs(tmp_path / "bert", tmp_path / "out", batches, test)
    apart = [abs(a - b) for a, b in zip(losses, theirs, strict=True)]
    worst = max(apart)
    print(
        f"{task}: first loss {losses[0]:.4f}, last {losses[-1]:.4f}, worst difference {worst:.1e} "
        f"({max(apart[:10]):.1e} in 10 steps), "
        f"accuracy {accuracy_here:.4f} here and {accuracy_there:.4f} there on {len(test)}"
    )
    assert worst < 1e-4
    assert abs(accuracy_here - accuracy_there) < 0.01
    assert accuracy_here > 1.2 / num_labels
