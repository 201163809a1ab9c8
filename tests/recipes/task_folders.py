"""Tiny task folders, a vocabulary for them, and runs of the fine-tuning recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from small_runs import settings, wait_for_all, write_jsonl

from bmforge.models.bert import BertConfig
from bmforge.models.gpt2 import GPT2Config
from bmforge.models.llama import LlamaConfig
from bmforge.models.t5 import T5Config
from bmforge.recipes.inputs.task_data import TaskDataConfig
from bmforge.recipes.registry import RECIPES

NOUNS = ["sky", "sea", "mud", "fire", "stone", "leaf"]
GOOD = {"sky", "fire", "leaf"}
WORDS = """
    sky sea mud fire stone leaf No Yes Maybe because so is it the a good what : . ? , passage
    question answer Question Answer Context rose fell happened @placeholder Which entity was Ann Bob
    Cleo
"""
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "</s>", "<extra_id_0>", "<extra_id_1>"]
ROLES = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "eos_token": "</s>",
}
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
MODELS: dict[str, Any] = {
    "bert": BertConfig(**SIZES, intermediate_size=64, max_seq_len=64),
    "gpt2": GPT2Config(**SIZES, max_seq_len=64),
    "llama": LlamaConfig(**SIZES, intermediate_size=64, num_kv_heads=1, max_seq_len=64),
    "t5": T5Config(**SIZES, intermediate_size=64, head_dim=16, eos_token_id=4),
}


def write_words(folder: Path) -> Path:
    """A tokenizer of words with the marks of BERT and T5; returns its directory."""
    vocabulary = {word: id for id, word in enumerate([*MARKS, *WORDS.split()])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(r"([.?:,])"), r" $1 ")
    fast.add_special_tokens(MARKS)
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(ROLES))
    return folder


def write_boolq(folder: Path, train: int = 24, dev: int = 7) -> Path:
    """Whether the thing asked for is one of the good ones."""

    def rows(count: int) -> list[dict[str, Any]]:
        asked = [NOUNS[i % len(NOUNS)] for i in range(count)]
        passages = [f"the {NOUNS[(i * 5 + 2) % 6]} is a {NOUNS[i % 5]}" for i in range(count)]
        return [
            {"passage": passages[i], "question": f"is {n} good", "label": n in GOOD, "idx": i}
            for i, n in enumerate(asked)
        ]

    return write_splits(folder / "BoolQ", rows(train), rows(dev))


def write_copa(folder: Path) -> Path:
    """The good one of two things happened."""
    pairs = [(a, b) for a in NOUNS for b in NOUNS if (a in GOOD) != (b in GOOD)]
    rows = [
        {
            "premise": "it happened",
            "question": ("cause", "effect")[i % 2],
            "choice1": f"the {a} rose",
            "choice2": f"the {b} rose",
            "label": int(b in GOOD),
            "idx": i,
        }
        for i, (a, b) in enumerate(pairs)
    ]
    return write_splits(folder / "COPA", rows, rows[:5])


def write_record(folder: Path) -> Path:
    """Ann is the right entity, wherever she stands."""
    rows = []
    for number, names in enumerate((["Ann", "Bob"], ["Bob", "Ann"], ["Cleo", "Ann"])):
        text = " , ".join(names)
        entities = [{"start": text.index(n), "end": text.index(n) + len(n) - 1} for n in names]
        answer = {"text": "Ann", "start": text.index("Ann"), "end": text.index("Ann") + 2}
        query = {"query": "@placeholder is good", "idx": 0, "answers": [answer]}
        rows.append(
            {"passage": {"text": text, "entities": entities}, "qas": [query], "idx": number}
        )
    return write_splits(folder / "ReCoRD", rows, rows)


def write_squad(folder: Path) -> Path:
    """What is asked for is the name in the text."""
    paragraphs = [
        {
            "context": f"{name} was the {noun}",
            "qas": [
                {
                    "question": f"what is the {noun}",
                    "id": f"{name}-{noun}",
                    "answers": [{"text": name, "answer_start": 0}],
                }
            ],
        }
        for name in ("Ann", "Bob", "Cleo")
        for noun in NOUNS[:3]
    ]
    text = json.dumps({"version": "1.1", "data": [{"title": "x", "paragraphs": paragraphs}]})
    (folder / "SQuAD").mkdir(parents=True)
    for split in ("train", "dev"):
        (folder / "SQuAD" / f"{split}-v1.1.json").write_text(text)
    return folder / "SQuAD"


def write_splits(folder: Path, train: Sequence[Any], dev: Sequence[Any]) -> Path:
    """The two files of a task; returns its folder."""
    folder.mkdir(parents=True)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "val.jsonl", dev)
    return folder


def task_config(
    recipe: str, task: str, folder: Path, words: Path, run_dir: Path, steps: int, **changes: Any
) -> Any:
    """A recipe's config for a tiny model."""
    found = RECIPES[recipe].config(
        run_dir=run_dir,
        model=MODELS[recipe.partition("-")[0]],
        data=TaskDataConfig(
            task=task,
            paths=(str(folder),),
            tokenizer=str(words),
            seq_len=32,
            global_batch_size=8,
            micro_batch_size=4,
        ),
        train=settings(steps, lr=0.003),
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def run_task(recipe: str, config: Any) -> tuple[float, dict[str, float]]:
    """Run a recipe; return its held-out loss and the metrics in results.json."""
    result = RECIPES[recipe].run(config)
    assert result.evaluation is not None
    wait_for_all()
    told = json.loads((config.run_dir / "results.json").read_text())
    return result.evaluation.loss, {
        name: numbers["model"] for name, numbers in told.items() if name != "validation loss"
    }
