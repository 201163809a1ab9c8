"""Small models with their tokenizers, and the data of tasks, that the pages' commands name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, blocks

from bmforge.models.hub import find_preset

sys.path.insert(0, str(ROOT / "tests" / "recipes"))  # where tasks in small are written

from chat_traits import TEMPLATES, write_bpe
from small_runs import (
    ANT_HEAD,
    HEAD,
    bee_tokenizer,
    write_counting,
    write_jsonl,
    write_vocabulary,
)
from speech_models import write_audio, write_speech_model
from task_folders import write_boolq, write_copa, write_splits, write_squad, write_words
from vision_models import make_image, write_vision_model

Writer = Callable[[Path], None]

# Models that the pages start from: where, and of which kind they are.
STARTS = {
    "google-bert/bert-base-uncased": "bert-base-uncased",
    "google/t5-v1_1-small": "t5-v1_1-small",
    "meta-llama/Llama-3.2-1B": "llama-3.2-1b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "google/vit-base-patch16-224-in21k": "vit-base-patch16-224-in21k",
    "openbmb/cpm-bee-1b": "cpm-bee-1b",
    "cpm-bee-1b": "cpm-bee-1b",
    "eva2.0-base": "eva2.0-base",
    "my-model": "qwen3-0.6b",
    "models/cpm-ant": "cpm-ant-10b",
    "tiny": "llama-3.2-1b",  # written by a block of the page
    "runs/quickstart/export": "llama-3.2-1b",  # written by `bmforge quickstart`
    "models/eva2.0-base": "eva2.0-base",
    "sums/start": "llama-3.2-1b",  # written by examples/arithmetic.py
    "runs/small/export": "llama-3.2-1b",
    "runs/sft/export": "llama-3.2-1b",  # written by a command of the page
    "runs/dpo/export": "llama-3.2-1b",
}


def write_tiny(folder: Path, preset: str, vocabulary: int = 64, **ids: int) -> None:
    """A model of a preset's family that is small, for pages to start from."""
    family, sizes = find_preset(preset)
    heads = {"num_heads": 2, "num_kv_heads": 0, "head_dim": 16}
    wide = {"hidden_size": 32, "intermediate_size": 0, "num_layers": 1, **heads}
    text = {} if family.family_traits.has_images else {"vocab_size": vocabulary}
    small = {"intermediate_size": 64, "mask_modules": (), "num_buckets": 16}
    kept = {n: v for n, v in small.items() if hasattr(sizes, n)}
    family.from_config(sizes.replace(**{**wide, **text, **kept, **ids})).save_pretrained(folder)


def write_start(place: Path, name: str) -> None:
    """A model of `STARTS`, with a tokenizer of its kind beside it."""
    pytest.importorskip("jieba", reason="needs the extra zh")
    from bmforge.tokenizers import AutoTokenizer

    words = place / f".{name.replace('/', '-')}"
    vocabulary, ids = 0, {}
    if "vit" not in name:
        TOKENIZERS.get(STARTS[name], write_words)(words)
        tokenizer = AutoTokenizer.from_pretrained(words)
        vocabulary = len(tokenizer) + 20 * ("t5" in name)  # which is padded
        if "eva" in name:
            ids["decoder_start_token_id"] = tokenizer.sentinel_id(0)
    write_tiny(place / name, STARTS[name], vocabulary, **ids)
    if words.exists():
        shutil.copytree(words, place / name, dirs_exist_ok=True)


def write_qwen_words(folder: Path) -> None:
    """Byte-level BPE with a chat template like Qwen3's, which describes tools and reasoning."""
    write_bpe(folder, TEMPLATES["thoughts of the last answer alone"])


def write_ant_words(folder: Path) -> None:
    """Letters of two scripts, and CPM-Ant's marks."""
    write_vocabulary(folder, ANT_HEAD, *LETTERS)
    name_class(folder, "CPMAntTokenizer")


def write_eva_words(folder: Path) -> None:
    """Letters of two scripts, and EVA's marks."""
    write_vocabulary(folder, HEAD, *LETTERS, "<s_0>", "<s_1>")
    name_class(folder, "EVATokenizer")


def name_class(folder: Path, name: str) -> None:
    config = json.dumps({"tokenizer_class": name})
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def write_bee_words(folder: Path) -> None:
    """Letters, digits and CPM-Bee's marks."""
    bee_tokenizer().save_pretrained(folder)


LETTERS = "abcdefghijklmnopqrstuvwxyz.,()"
TOKENIZERS: dict[str, Callable[[Path], Any]] = {  # of presets; others have words
    "cpm-ant-10b": write_ant_words,
    "eva2.0-base": write_eva_words,
    "cpm-bee-1b": write_bee_words,
    "qwen3-0.6b": write_qwen_words,
}


def write_superglue(place: Path) -> None:
    """Three tasks, with words that the tokenizer of `write_words` has."""
    write_boolq(place / "superglue")
    write_copa(place / "superglue")
    things = ["sky", "sea", "mud", "fire"]
    rows = [
        {
            "premise": f"the {a} is good",
            "hypothesis": f"the {b} is good",
            "label": "entailment" if a == b else "not_entailment",
            "idx": i,
        }
        for i, (a, b) in enumerate((a, b) for a in things for b in things)
    ]
    write_splits(place / "superglue" / "RTE", rows, rows)


def write_questions(place: Path) -> None:
    """SQuAD in small, as it is published."""
    shutil.move(write_squad(place / "of-squad"), place / "squad")


def write_photos(place: Path) -> None:
    """Bright and dark pictures, to learn from and held out."""
    images = pytest.importorskip("PIL.Image", reason="needs the extra images")
    for part in ("train", "dev"):
        for name, light in (("bright", 220), ("dark", 20)):
            folder = place / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(8):
                images.new("RGB", (64, 64), (light, light - number, light)).save(
                    folder / f"{number}.png"
                )


def write_vision(place: Path) -> None:
    """A vision-language model."""
    write_vision_model(place / "Qwen" / "Qwen2.5-VL-3B-Instruct", "qwen2_5_vl")


def write_speech(place: Path) -> None:
    """A speech model with a window of a second."""
    write_speech_model(place / "openai" / "whisper-tiny")


def write_talk(place: Path) -> None:
    """Audio of less than a second."""
    write_audio(place / "speech.wav", 0.8)


def write_recordings(place: Path) -> None:
    """The record that the page shows, and its audio file."""
    text = blocks(ROOT / "docs" / "howto" / "speech.md", "json")[0]
    (place / "recordings.jsonl").write_text(text * 2, encoding="utf-8")
    write_talk(place)


def write_picture(name: str) -> Writer:
    return lambda place: make_image(40, 30, ord(name[0])).save(place / name)


def write_pictures(place: Path) -> None:
    """The conversations that the page shows."""
    text = blocks(ROOT / "docs" / "howto" / "images.md", "json")[0]
    (place / "pictures.jsonl").write_text(text * 4, encoding="utf-8")
    if not (place / "cat.jpg").exists():
        write_picture("cat.jpg")(place)


def write_lines(name: str, *rows: Any) -> Writer:
    def write(place: Path) -> None:
        write_jsonl(place / name, rows)

    return write


def write_documents(place: Path) -> None:
    """The documents of CPM-Bee that its page shows."""
    text = blocks(ROOT / "docs" / "guides" / "cpm.md", "json")[0]
    (place / "documents.jsonl").write_text(text, encoding="utf-8")


def write_gpt2_data(place: Path) -> None:
    """A token store of CPM-Pretrain's GPT-2."""
    write_counting(place / "gpt2_data" / "CPM-train" / "data", 8, end=7, count=900)


def write_t5_data(place: Path) -> None:
    """A preprocessed corpus of CPM-Pretrain's T5, with the vocabulary of its 40 tokens."""
    from test_cpm_pretrain_stores import write_spans

    folder = place / "t5_data"
    sentinels = [f"<s_{number}>" for number in range(8)]
    write_vocabulary(folder / "bpe_new", [*HEAD, "▁", "<x>", "<y>"], *sentinels)
    (folder / "pretrain_data").mkdir()
    write_spans(folder / "pretrain_data" / "baike_small_document", count=400)


def write_t5_script(place: Path) -> None:
    """A start script in the shape of CPM-Pretrain's."""
    from test_migrate import script

    (place / "run_t5.sh").write_text(script(), encoding="utf-8")


def write_ds_config(place: Path) -> None:
    """The settings of DeepSpeed that CPM-Pretrain's scripts name."""
    from test_ds_config import PUBLISHED

    (place / "ds_config_gpt2.json").write_text(json.dumps(PUBLISHED), encoding="utf-8")


def write_dialogues(place: Path) -> None:
    """Two utterances a line."""
    lines = ["good day\tgood day to you", "how are you\twell, and you"] * 8
    (place / "dialogues.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"is the {thing} good"},
            {"role": "assistant", "content": "Yes" if thing in ("sky", "fire") else "No"},
        ]
    }
    for thing in ("sky", "sea", "mud", "fire")
] * 4
PAIRS = [
    {
        "prompt": chat["messages"][:1],
        "chosen": chat["messages"][1:],
        "rejected": [{"role": "assistant", "content": "Maybe"}],
    }
    for chat in CHATS
]
STEPS = [
    {
        "prompt": f"Compute {n} + 1.",
        "completions": [f"{n} + 1", str(n + 2)],
        "labels": [True, False],
    }
    for n in range(8)
]
DOCUMENTS = [{"input": f"count to {n}", "<ans>": str(n)} for n in range(24)]

PLACES: dict[str, Writer] = {
    **{name: (lambda place, name=name: write_start(place, name)) for name in STARTS},
    "superglue": write_superglue,
    "squad": write_questions,
    "photos": write_photos,
    "Qwen/Qwen2.5-VL-3B-Instruct": write_vision,
    "openai/whisper-tiny": write_speech,
    "cat.jpg": write_picture("cat.jpg"),
    "dog.jpg": write_picture("dog.jpg"),
    "pictures.jsonl": write_pictures,
    "speech.wav": write_talk,
    "recordings.jsonl": write_recordings,
    "chats.jsonl": write_lines("chats.jsonl", *CHATS),
    "pairs.jsonl": write_lines("pairs.jsonl", *PAIRS),
    "steps.jsonl": write_lines("steps.jsonl", *STEPS),
    "held-out.jsonl": write_lines("held-out.jsonl", *CHATS[:4]),
    "train.jsonl": write_lines("train.jsonl", *DOCUMENTS),
    "held.jsonl": write_lines("held.jsonl", *DOCUMENTS[:6]),
    "questions.jsonl": write_lines("questions.jsonl", {"input": "count to 3", "<ans>": ""}),
    "dialogues.txt": write_dialogues,
    "documents.jsonl": write_documents,
    "gpt2_data": write_gpt2_data,
    "t5_data": write_t5_data,
    "run_t5.sh": write_t5_script,
    "ds_config_gpt2.json": write_ds_config,
}
