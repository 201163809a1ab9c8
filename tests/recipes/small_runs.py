"""Tiny vocabularies, corpora and settings for the tests of recipes."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bmforge.batch import IGNORE_INDEX
from bmforge.data import TokenStoreWriter
from bmforge.models import GPT2, GPT2Config
from bmforge.recipes.inputs.examples import ExampleConfig
from bmforge.testing.character_tokenizer import BEE_MARKS
from bmforge.tokenizers import CPM1Tokenizer
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig

CHARACTERS = "一二三四五六七八九十天地人你我他好不上下"
HEAD = ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<eod>", "▂"]
ANT_HEAD = ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<d>", "</d>"]
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2}


def settings(steps: int, lr: float = 0.01, **changes: Any) -> TrainConfig:
    """A loop of few steps at a constant rate."""
    optim = OptimConfig(lr=lr, weight_decay=0.0)
    constant = ScheduleConfig(kind="constant")
    return TrainConfig(
        steps=steps, save_every_steps=None, optim=optim, schedule=constant, **changes
    )


def examples(paths: Sequence[Path], vocabulary: Path | None, **changes: Any) -> ExampleConfig:
    """What a run reads: the same to learn from and held out."""
    names = tuple(map(str, paths))
    sizes = {"seq_len": 24, "global_batch_size": 8, "micro_batch_size": 4, **changes}
    where = None if vocabulary is None else str(vocabulary)
    return ExampleConfig(paths=names, validation=names, tokenizer=where, **sizes)


def write_vocabulary(folder: Path, head: Sequence[str], *tail: str) -> Path:
    """A vocab.txt of characters; returns its directory."""
    folder.mkdir(parents=True)
    text = "\n".join([*head, *CHARACTERS, *tail]) + "\n"
    (folder / "vocab.txt").write_text(text, encoding="utf-8")
    return folder


def write_counting(prefix: Path, first: int, end: int, count: int = 24) -> Path:
    """A store whose documents count up in a circle of ten ids from `first` on, `end` behind."""
    with TokenStoreWriter(prefix, vocab_size=first + 10) as writer:
        for number in range(count):
            length = 10 + number % 7
            writer.add_item([*(first + (number + i) % 10 for i in range(length)), end])
            writer.end_document()
    return prefix


def bee_tokenizer() -> CPMBeeTokenizer:
    """Letters, digits and the special tokens."""
    return CPMBeeTokenizer([*BEE_MARKS, *"abcdefghijklmnopqrstuvwxyz0123456789?()-._"])


def wait_for_all() -> None:
    """Come back once the first process has written what the others are about to read."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """One JSON a line."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def train_cpm1_tokenizer() -> CPM1Tokenizer:
    """A sentencepiece model of single characters with CPM-1's special pieces."""
    trainer = pytest.importorskip("sentencepiece", reason="needs the extra zh")
    pytest.importorskip("jieba", reason="needs the extra zh")
    model = io.BytesIO()
    letters = CHARACTERS + "0123456789:选项答案是上下文对话回复。，"
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([*letters] * 4),
        model_writer=model,
        model_type="char",
        vocab_size=len(set(letters)) + 30,
        hard_vocab_limit=False,
        user_defined_symbols=["<eod>", "▂", "▃"],
        control_symbols=["<sep>", "<pad>", "<mask>"],
        character_coverage=1.0,
        minloglevel=2,
    )
    return CPM1Tokenizer(model.getvalue())


def losses_of_answers(model: Any, pairs: Sequence[Any]) -> list[float]:
    """The model's own mean loss of every answer behind its prompt, one at a time."""
    losses = []
    model.eval()
    with torch.no_grad():
        for prompt, answer in pairs:
            ids, labels = torch.tensor([prompt]), torch.tensor([answer])
            if model.traits.attention == "encoder-decoder":
                loss = model(input_ids=ids, labels=labels).loss
            else:
                hidden = torch.full_like(ids, IGNORE_INDEX)
                both, aimed = torch.cat((ids, labels), 1), torch.cat((hidden, labels), 1)
                if not model.shifts_labels:
                    aimed = torch.cat((aimed[:, 1:], hidden[:, :1]), 1)
                loss = model(both, labels=aimed).loss
            losses.append(float(loss))
    return losses


def write_start(root: Path, sizes: dict[str, int]) -> Path:
    """Write a GPT-2 of these sizes, `model`, and a store of eight documents, `tokens`."""
    GPT2.from_config(GPT2Config(**sizes)).save_pretrained(root / "model")
    with TokenStoreWriter(root / "tokens", vocab_size=50) as writer:
        for number in range(8):
            writer.add_item([(number + i) % 50 for i in range(40)])
            writer.end_document()
    return root
