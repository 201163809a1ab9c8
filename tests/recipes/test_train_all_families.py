"""Every family trains from the command line, on real text or images; what it exports opens."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import HEAD, bee_tokenizer, write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bmforge.cli import main
from bmforge.data import TokenStoreWriter, python_topics
from bmforge.infer import generate
from bmforge.infer.openbmb.documents import fill_documents
from bmforge.models import AutoModel
from bmforge.models.base import Model
from bmforge.models.hub import FAMILIES
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import read_metrics

SENTINELS = [name.format(i) for name in ("<extra_id_{}>", "<s_{}>") for i in range(12)]
MARKS = ["</s>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", *SENTINELS]
ROLES = {
    "eos_token": "</s>",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "bos_token": "<s>",
}
GLM_MARKS = ["[CLS]", "[MASK]", "<|startofpiece|>", "<|endofpiece|>", "[SEP]"]
VOCABULARY = 400
LOOP = """
    --train.optim.lr 0.01 --train.optim.weight-decay 0 --train.save-every-steps None
    --train.schedule.kind constant --data.global-batch-size 8 --data.micro-batch-size 8
"""


@dataclass(frozen=True)
class Trial:
    """How a family is tried: its task, where that reads, and its options beside the common ones."""

    task: str
    place: str
    options: str = ""
    steps: int = 24


NARROW = "--model.hidden-size 32 --model.num-layers 1 --model.num-heads 2"
WIDE = f"{NARROW} --model.intermediate-size 48"
GROUPED = f"{WIDE} --model.num-kv-heads 1 --model.head-dim 16 --model.max-seq-len 64"
MIXED = f"{GROUPED} --model.num-experts 4 --model.experts-per-token 2"
SHORT = f"{NARROW} --model.max-seq-len 64"
SPANS = f"{WIDE} --model.head-dim 16 --data.seq-len 40"
LIVE = f"{WIDE} --model.head-dim 16 --model.num-buckets 16 --data.seq-len 40"
TRIALS = {
    "Bert": Trial("pretrain", "store", f"{SHORT} --data.seq-len 40"),
    "Roberta": Trial("pretrain", "store", f"{SHORT} --data.seq-len 40"),
    "Longformer": Trial("pretrain", "store", f"{SHORT} --model.windows 8 --data.seq-len 40"),
    "T5": Trial("pretrain", "store", SPANS),
    "CPM2": Trial("pretrain", "store", f"{SPANS} --model.init-std 0.05"),
    "GPT2": Trial("pretrain", "prepared", f"{SHORT} --data.seq-len 40"),
    "GPTJ": Trial("pretrain", "prepared", f"{SHORT} --model.rotary-dim 8 --data.seq-len 40"),
    "OPT": Trial("pretrain", "prepared", f"{SHORT} --data.seq-len 40"),
    "CPM1": Trial("pretrain", "prepared", f"{SHORT} --data.seq-len 40"),
    "Llama": Trial("pretrain", "prepared", f"{GROUPED} --data.seq-len 40"),
    "Qwen": Trial("pretrain", "prepared", f"{GROUPED} --data.seq-len 40"),
    "MiniCPM": Trial("pretrain", "prepared", f"{GROUPED} --data.seq-len 40"),
    "Mixtral": Trial("pretrain", "prepared", f"{MIXED} --data.seq-len 40"),
    "Qwen2Moe": Trial("pretrain", "prepared", f"{MIXED} --model.expert-size 24 --data.seq-len 40"),
    "Qwen3Moe": Trial("pretrain", "prepared", f"{MIXED} --model.expert-size 24 --data.seq-len 40"),
    "GLM": Trial("pretrain", "glm", f"{SHORT} --data.seq-len 60"),
    "CPMAnt": Trial(
        "pretrain",
        "store",
        f"{LIVE} --model.prompt-types 4 --model.prompt-length 3 --model.segment-types 4 "
        "--shortest 10",
    ),
    "CPMBee": Trial("documents", "documents", f"{LIVE} --model.num-relations 64"),
    "EVA": Trial(
        "dialogue",
        "dialogues",
        f"{SPANS} --model.init-std 0.3 --model.attn-scale True --target-len 40",
    ),
    "ViT": Trial(
        "images",
        "images",
        f"{NARROW} --model.image-size 8 --model.patch-size 2 --model.num-channels 1 "
        "--data.mirror False --data.smallest-crop 1 --train.optim.lr 0.005 "
        "--data.global-batch-size 40 --data.micro-batch-size 40",
        steps=40,
    ),
}
# Decoders with Llama's block; one of them is tried in every run of the tests.
LIKE_LLAMA = (
    *("Cohere", "Granite", "InternLM3", "Mistral", "Phi", "Phi3", "SeedOss", "StableLM"),
    *("Starcoder2", "Cohere2", "Gemma", "Gemma2", "Gemma3", "OLMo2", "OLMo3", "SmolLM3", "GLM4"),
    *("GPTNeoX", "Falcon"),
)
TRIALS |= {name: replace(TRIALS["Llama"]) for name in LIKE_LLAMA}
_UNGROUPED = f"{WIDE} --model.head-dim 16 --model.max-seq-len 64"
TRIALS["GPTNeoX"] = Trial("pretrain", "prepared", f"{_UNGROUPED} --data.seq-len 40")
# Published factors on the logits let tiny models learn slowly.
for _name in ("Cohere", "Cohere2"):
    TRIALS[_name] = replace(
        TRIALS["Llama"], options=f"{TRIALS['Llama'].options} --model.logit-scale 1"
    )
_EXPERTS = "--model.num-experts 4 --model.experts-per-token 2 --model.expert-size 24"
_EXPERTS = f"{_EXPERTS} --model.expert-groups 1 --model.top-groups 1 --model.num-dense 0"
_LATENT = "--model.kv-rank 16 --model.q-rank 0 --model.plain-dim 8 --model.rope-dim 8"
_LATENT = f"{WIDE} {_LATENT} --model.value-dim 16 --model.max-seq-len 64 --data.seq-len 40"
TRIALS["GLM4Moe"] = Trial("pretrain", "prepared", f"{GROUPED} {_EXPERTS} --data.seq-len 40")
TRIALS["DeepSeekV2"] = Trial("pretrain", "prepared", f"{_LATENT} {_EXPERTS}")
TRIALS["DeepSeekV3"] = TRIALS["DeepSeekV2"]
TRIALS["MiniCPM3"] = Trial("pretrain", "prepared", f"{_LATENT}")
TRIALS["GptOss"] = Trial("pretrain", "prepared", f"{MIXED} --model.window 8 --data.seq-len 40")
TRIALS["XLMRoberta"] = TRIALS["Roberta"]
TRIALS["ModernBert"] = Trial(
    "pretrain",
    "store",
    f"{SHORT} --model.pad-token-id 0 --model.local-attention 8 --data.seq-len 40",
)
TRIALS["Bloom"] = TRIALS["OPT"]
LONG = {*LIKE_LLAMA, "XLMRoberta", "ModernBert", "Bloom", "GLM4Moe"} - {"Mistral"}
LONG |= {"DeepSeekV2", "GptOss", "MiniCPM3"}


def texts() -> Iterator[str]:
    """Paragraphs of Python's help, which every Python carries."""
    for document in islice(python_topics(), 30):
        for paragraph in document.text.split("\n\n"):
            words = " ".join(paragraph.split())
            if 60 < len(words) < 400:
                yield words


def write_store(folder: Path, encode, vocab_size: int, end: int) -> Path:
    with TokenStoreWriter(folder / "tokens", vocab_size=vocab_size) as writer:
        for text in texts():
            writer.add_item([*encode(text), end])
            writer.end_document()
    return folder / "tokens"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Name of a place -> the options that say where its data is and what the model must know."""
    root = tmp_path_factory.mktemp("places")
    for name in ("words", "glm", "eva", "bee"):
        (root / name).mkdir()
    pairs = train_pairs(MARKS)
    pairs.save(str(root / "words" / "tokenizer.json"))
    (root / "words" / "tokenizer_config.json").write_text(json.dumps(ROLES))
    end = pairs.token_to_id("</s>")
    store = write_store(root, lambda text: pairs.encode(text).ids, VOCABULARY, end)
    common = ["--data.paths", str(store), "--model.vocab-size", str(VOCABULARY)]
    tokenizer = ["--data.tokenizer", str(root / "words")]
    return {
        "prepared": [*common, "--data.validation", str(store), "--data.validation-batches", "1"],
        "store": [*common, *tokenizer],
        "glm": write_glm(root),
        "documents": write_documents(root),
        "dialogues": write_dialogues(root),
        "images": write_digits(root),
    }


def train_pairs(marks: list[str]) -> Tokenizer:
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs.train_from_iterator(texts(), trainer)
    return pairs


def write_glm(root: Path) -> list[str]:
    pairs = train_pairs(["<|endoftext|>"])
    pairs.model.save(str(root / "glm"))
    size = pairs.get_vocab_size()
    added = {mark: size + i for i, mark in enumerate(GLM_MARKS)}
    (root / "glm" / "added_tokens.json").write_text(json.dumps(added))
    kind = {"tokenizer_class": "GLMGPT2Tokenizer"}
    (root / "glm" / "tokenizer_config.json").write_text(json.dumps(kind))
    tokenizer = AutoTokenizer.from_pretrained(root / "glm")
    store = write_store(root / "glm", tokenizer.encode, len(tokenizer), tokenizer.eos_id)
    return [
        *("--data.paths", str(store), "--data.tokenizer", str(root / "glm")),
        *("--model.vocab-size", str(len(tokenizer))),
        *("--model.sop-token-id", str(added["<|startofpiece|>"])),
        *("--model.mask-token-id", str(added["[MASK]"])),
    ]


def write_documents(root: Path) -> list[str]:
    """The beginning of a paragraph, and its rest to be written."""
    tokenizer = bee_tokenizer()
    tokenizer.save_pretrained(root / "bee")
    rows = [{"input": t[:20].lower(), "<ans>": t[20:26].lower()} for t in islice(texts(), 100)]
    file = write_jsonl(root / "documents.jsonl", rows)
    return [
        *("--data.paths", str(file), "--data.tokenizer", str(root / "bee"), "--data.skip-bad"),
        *("True", "--model.vocab-size", str(len(tokenizer))),
    ]


def write_dialogues(root: Path) -> list[str]:
    """Two sentences that follow each other."""
    pytest.importorskip("jieba", reason="needs the extra zh")
    letters = [*"abcdefghijklmnopqrstuvwxyz.,()"]
    text = "\n".join([*HEAD, *letters, "<s_0>", "<s_1>"]) + "\n"
    (root / "eva" / "vocab.txt").write_text(text, encoding="utf-8")
    (root / "eva" / "tokenizer_config.json").write_text('{"tokenizer_class": "EVATokenizer"}')
    lines = [
        f"{t[:20]}\t{t[20:40]}".lower() for t in texts() if t[:20].strip() and t[20:40].strip()
    ]
    file = root / "dialogues.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(root / "eva")
    return [
        *("--data.paths", str(file), "--data.tokenizer", str(root / "eva")),
        *("--model.vocab-size", str(len(tokenizer))),
        *("--model.decoder-start-token-id", str(tokenizer.sentinel_id(0))),
    ]


def write_digits(root: Path) -> list[str]:
    datasets = pytest.importorskip("sklearn.datasets", reason="needs the extra tasks")
    images = pytest.importorskip("PIL.Image", reason="needs the extra images")
    digits = datasets.load_digits()
    for number in range(200):
        folder = root / "digits" / str(digits.target[number])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * 15).astype(np.uint8)
        images.fromarray(pixels).save(folder / f"{number}.png")
    return ["--data.paths", str(root / "digits")]


def test_all_families_are_tried() -> None:
    assert set(TRIALS) == set(FAMILIES)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in TRIALS]
)
def test_a_family_trains(name: str, places: dict[str, list[str]], tmp_path: Path) -> None:
    """The loss falls, and what was trained is what the export holds."""
    trial, run_dir = TRIALS[name], tmp_path / "run"
    command = ["train", trial.task, "--model", name.lower(), "--run-dir", str(run_dir)]
    command += ["--train.steps", str(trial.steps)]
    with redirect_stdout(io.StringIO()):
        status = main([*command, *places[trial.place], *LOOP.split(), *trial.options.split()])
    assert status == 0
    losses = [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl")]
    assert len(losses) == trial.steps
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4]), losses
    opened = AutoModel.from_pretrained(run_dir / "export")
    assert type(opened) is FAMILIES[name]
    if opened.traits.can_generate:
        write(opened)


def write(model: Model) -> None:
    """What a model that writes text writes is new tokens of its vocabulary."""
    if model.traits.objective == "documents":
        (filled,) = fill_documents(
            model,  # type: ignore[arg-type]
            bee_tokenizer(),
            [{"input": "the first line", "<ans>": ""}],
            max_new_tokens=3,
        )
        assert isinstance(filled["<ans>"], str)
        return
    prompt = torch.tensor([[20, 21, 22, 23]])
    out = generate(model, prompt, max_new_tokens=4, eos_token_id=())  # type: ignore[arg-type]
    assert out.shape[1] == (5 if model.traits.attention == "encoder-decoder" else 8)
    assert int(out.max()) < model.config.vocab_size
