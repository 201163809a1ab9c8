"""The ModelCenter quick-start as it was published, and folders for it to run on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.dataset import DistributedDataLoader
from bmforge.compat.model_center.dataset.bertdataset import DATASET
from bmforge.compat.model_center.layer import Linear
from bmforge.compat.model_center.model import Bert, BertConfig
from bmforge.compat.model_center.tokenizer import BertTokenizer

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "is",
    "was",
    "it",
    "on",
    "under",
    "mat",
    "tree",
    "true",
    "false",
    "?",
    ".",
    "yes",
    "no",
    "who",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class BertModel(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = Bert.from_pretrained("bert-base-uncased")
        self.dense = Linear(config.dim_model, 2)
        bmt.init_parameters(self.dense)

    def forward(self, input_ids, attention_mask):
        pooler_output = self.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        logits = self.dense(pooler_output)
        return logits


def quick_start(batch_size=64, max_encoder_length=512, epochs=5, start_lr=1e-5, warmup_iter=100):
    """The program, in one function that returns what it prints: losses and accuracies."""
    from sklearn.metrics import accuracy_score

    bmt.init_distributed(seed=0)
    config = BertConfig.from_pretrained("bert-base-uncased")
    model = BertModel(config)

    tokenizer = BertTokenizer.from_pretrained("bert-base-uncased")
    splits = ["train", "dev"]
    dataset = {}
    for split in splits:
        dataset[split] = DATASET["BoolQ"](
            "path",
            split,
            bmt.rank(),
            bmt.world_size(),
            tokenizer,
            max_encoder_length=max_encoder_length,
        )
    train_dataloader = DistributedDataLoader(dataset["train"], batch_size=batch_size, shuffle=True)
    dev_dataloader = DistributedDataLoader(dataset["dev"], batch_size=batch_size, shuffle=False)

    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters())
    lr_scheduler = bmt.lr_scheduler.Noam(
        optimizer, start_lr=start_lr, warmup_iter=warmup_iter, end_iter=-1
    )
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    optim_manager = bmt.optim.OptimManager(loss_scale=1024)
    optim_manager.add_optimizer(optimizer, lr_scheduler)

    losses, accuracies, counts = [], [], []
    for _epoch in range(epochs):
        model.train()
        for data in train_dataloader:
            input_ids = data["input_ids"]
            attention_mask = data["attention_mask"]
            labels = data["labels"]

            logits = model(input_ids, attention_mask)
            loss = loss_func(logits.view(-1, logits.shape[-1]), labels.view(-1))
            global_loss = bmt.sum_loss(loss).item()

            optim_manager.zero_grad()
            optim_manager.backward(loss)
            grad_norm = optim_manager.clip_grad_norm(
                optimizer.param_groups, max_norm=10.0, norm_type=2
            )
            optim_manager.step()
            bmt.print_rank(
                f"loss: {global_loss:.4f} | lr: {lr_scheduler.current_lr:.4e} | "
                f"grad_norm: {grad_norm:.4f}"
            )
            losses.append(global_loss)

        model.eval()
        with torch.no_grad():
            pd = []
            gt = []
            for data in dev_dataloader:
                logits = model(data["input_ids"], data["attention_mask"])
                labels = data["labels"]
                pd.extend(logits.argmax(dim=-1).cpu().tolist())
                gt.extend(labels.cpu().tolist())
            pd = bmt.gather_result(torch.tensor(pd).int()).cpu().tolist()
            gt = bmt.gather_result(torch.tensor(gt).int()).cpu().tolist()
            acc = accuracy_score(gt, pd)
            bmt.print_rank(f"accuracy: {acc * 100:.2f}")
            accuracies.append(acc)
            counts.append(len(gt))
    return losses, accuracies, counts


def write_bert(folder: Path, seed: int = 0, **changes: object) -> None:
    """Write a tiny BERT with its vocabulary, as transformers writes it."""
    from transformers import BertConfig as TheirConfig
    from transformers import BertModel as TheirModel

    vocabulary = SPECIAL + WORDS
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(seed)
    TheirModel(TheirConfig(**sizes, **off, **changes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))


def write_boolq(folder: Path, train: int, dev: int, seed: int = 0) -> None:
    """Write questions that can be answered from their passages, in SuperGLUE's form."""
    draw = random.Random(seed)
    for name, count in (("train", train), ("val", dev)):
        rows = []
        for idx in range(count):
            label = draw.random() < 0.5
            noise = " ".join(draw.choices(WORDS[:13], k=draw.randrange(3, 12)))
            passage = f"{noise} {'true' if label else 'false'} ."
            question = f"is it {draw.choice(WORDS[2:4])}"
            row = {"question": question, "passage": passage, "idx": idx, "label": label}
            rows.append(json.dumps(row) + "\n")
        path = folder / "BoolQ" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(rows), encoding="utf-8")
