"""From raw text to generated text for OpenBMB's models, by the commands alone."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_calls import call

from bmforge.models.t5 import T5, T5Config
from bmforge.tokenizers import AutoTokenizer, CPM1Tokenizer

POEM = "天上人好，地下你他。一二三四五，六七八九十。"
SPECIAL = {
    "ant": ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<d>", "</d>"],
    "bee": ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<root>", "<ans>",
            "<option>"],
    "cpm2": ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<eod>", "▂", "▁"],
    "eva": ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<eod>", "▂", ""],
}  # fmt: skip
TINY: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "head_dim": 16}
SIZES = ("--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2")
SEQ2SEQ = (*SIZES, "--model.intermediate-size", "48", "--model.head-dim", "16")
LIVE = (*SEQ2SEQ, "--model.num-buckets", "16", "--model.max-seq-len", "64")
PROMPTS = ("--model.prompt-types", "4", "--model.prompt-length", "3", "--model.segment-types", "4")
BEE = (*LIVE, "--model.num-relations", "80")
REST = ("--shortest", "8", "--noise-density", "0.8", "--mean-span-length", "30")
ROWS = ("--data.seq-len", "40", "--data.global-batch-size", "4", "--data.micro-batch-size", "4")


def run(*arguments: object) -> str:
    """Run a command in this process; return what it printed."""
    said = call([str(argument) for argument in arguments])
    assert said.status == 0, said
    return said.out


def write_tokenizer(folder: Path, kind: str) -> Path:
    """A tokenizer of the characters of the poem; returns its directory."""
    letters = [*dict.fromkeys(POEM), *"往后写约0:"]
    folder.mkdir()
    if kind == "cpm1":
        trainer = pytest.importorskip("sentencepiece", reason="needs the extra zh")
        model = io.BytesIO()
        trainer.SentencePieceTrainer.train(
            sentence_iterator=iter(letters * 4), model_writer=model, model_type="char",
            vocab_size=60, hard_vocab_limit=False, user_defined_symbols=["<eod>", "▂", "▃"],
            control_symbols=["<sep>", "<pad>", "<mask>"], character_coverage=1.0, minloglevel=2,
        )  # fmt: skip
        CPM1Tokenizer(model.getvalue()).save_pretrained(folder)
    elif kind != "bpe":
        spans = [f"<s_{n}>" for n in range(8)]
        head = SPECIAL[kind]
        tokens = [*head, *letters, *(spans if kind in ("cpm2", "eva") else ())]
        (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder


def prepare(folder: Path, kind: str) -> tuple[Path, int]:
    """Prepare the poem many times over; return the directory and the number of token ids."""
    file = folder / "text.jsonl"
    lines = [json.dumps({"text": POEM + "一" * number}) for number in range(8)]
    file.write_text("\n".join(lines), encoding="utf-8")
    told = ("--vocab-size", "300")
    if kind != "bpe":
        told = ("--tokenizer", str(write_tokenizer(folder / "tokenizer", kind)))
    run("prepare", file, "--out", folder / "corpus", "--validation-fraction", "0", *told)
    return folder / "corpus", len(AutoTokenizer.from_pretrained(folder / "corpus" / "tokenizer"))


def train(task: str, folder: Path, options: Sequence[str], *paths: Path, steps: int = 60) -> Path:
    """Train on what is there; return the export."""
    run(
        "train", task, "--run-dir", folder / "run", "--data.paths", *paths, *ROWS, *options,
        "--train.steps", steps, "--train.optim.lr", "0.01", "--train.schedule.kind", "constant",
    )  # fmt: skip
    return folder / "run" / "export"


def follow(kind: str, family: str, folder: Path, steps: int) -> str:
    """Prepare, train and continue a beginning of the poem; return what was printed."""
    corpus, size = prepare(folder, kind)
    task, options = {
        "cpm1": ("cpm1-pretrain", (*SIZES, "--model.max-seq-len", "64")),
        "ant": ("cpm-ant-train", (*LIVE, *PROMPTS, "--shortest", "8")),
        "cpm2": ("cpm2-pretrain", (*SEQ2SEQ, "--model.init-std", "0.05", *REST)),
    }[family]
    export = train(task, folder, (*options, "--model.vocab-size", str(size)), corpus, steps=steps)
    greedy = ("--do-sample", "False") if family == "cpm1" else ()
    return run("generate", export, "--prompt", POEM[:4], "--max-new-tokens", "14", *greedy)


TEXTS = [("cpm1", "cpm1"), ("bpe", "cpm1"), ("ant", "ant"), ("bpe", "ant"), ("cpm2", "cpm2")]


@pytest.mark.parametrize(("kind", "family"), TEXTS)
def test_text_to_text(kind: str, family: str, tmp_path: Path) -> None:
    """With the family's own tokenizer, and with one that `prepare` trains."""
    pytest.importorskip("rjieba", reason="needs the extra zh")
    written = follow(kind, family, tmp_path, steps=2)
    assert family == "cpm2" or written.startswith(POEM[:4])


@pytest.mark.long
@pytest.mark.parametrize(("kind", "family"), TEXTS)
def test_the_poem_is_learned(kind: str, family: str, tmp_path: Path) -> None:
    written = follow(kind, family, tmp_path, steps=400)
    assert "地下你他。一二" in "".join(written.split())


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def follow_dialogues(folder: Path, steps: int) -> str:
    """Train an EVA on raw dialogues; return its answer."""
    tokenizer = write_tokenizer(folder / "tokenizer", "eva")
    said = write_lines(folder / "said.txt", ["天上\t人好", "一二\t三四五", "地下\t你他"])
    size = len(AutoTokenizer.from_pretrained(tokenizer))
    start = str(AutoTokenizer.from_pretrained(tokenizer).sentinel_id(0))
    options = (*SEQ2SEQ, "--model.vocab-size", str(size), "--model.decoder-start-token-id", start)
    told = ("--data.tokenizer", str(tokenizer), "--target-len", "8", "--model.init-std", "0.3")
    export = train("eva-dialogue", folder, (*options, *told), said, steps=steps)
    return run("generate", export, "--prompt", "一二", "--max-new-tokens", "6")


def follow_documents(folder: Path, steps: int) -> tuple[str, list[dict[str, Any]]]:
    """Train a CPM-Bee on raw documents; return what it makes of a prompt and of a document."""
    tokenizer = write_tokenizer(folder / "tokenizer", "bee")
    asked = {"prompt": "往后写约100字"}
    pairs = [("天上", "人好"), ("一二", "三四五"), ("地下", "你他")]
    documents = [json.dumps({"input": a, **asked, "<ans>": b}) for a, b in pairs]
    file = write_lines(folder / "documents.jsonl", documents)
    size = str(len(AutoTokenizer.from_pretrained(tokenizer)))
    told = ("--data.tokenizer", str(tokenizer), "--model.vocab-size", size)
    export = train("cpm-bee-train", folder, (*BEE, *told), file, steps=steps)
    out = run("generate", export, "--document", file, "--max-new-tokens", "6")
    filled = [json.loads(line) for line in out.splitlines()]
    return run("generate", export, "--prompt", "一二", "--max-new-tokens", "6"), filled


def test_dialogues_to_answers(tmp_path: Path) -> None:
    pytest.importorskip("rjieba", reason="needs the extra zh")
    assert len(follow_dialogues(tmp_path, steps=2).rstrip("\n")) <= 6 * len("<mask>")


def test_documents_to_answers(tmp_path: Path) -> None:
    answer, filled = follow_documents(tmp_path, steps=2)
    assert filled[1]["<ans>"] == answer.rstrip("\n")
    assert [one["input"] for one in filled] == ["天上", "一二", "地下"]


@pytest.mark.long
def test_answers_are_learned(tmp_path: Path) -> None:
    (tmp_path / "eva").mkdir()
    (tmp_path / "bee").mkdir()
    assert follow_dialogues(tmp_path / "eva", steps=120) == "三四五\n"
    answer, filled = follow_documents(tmp_path / "bee", steps=120)
    assert answer == "三四五\n"
    assert [one["<ans>"] for one in filled] == ["人好", "三四五", "你他"]


def test_t5_with_a_spiece_model_alone(tmp_path: Path) -> None:
    """Raw text is prepared with it, spans are learned, and the export opens without it."""
    trainer, model = pytest.importorskip("sentencepiece"), io.BytesIO()
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([POEM] * 20), model_writer=model, vocab_size=30, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    given = tmp_path / "t5"
    T5.from_config(T5Config(vocab_size=160, intermediate_size=48, **TINY)).save_pretrained(given)
    (given / "spiece.model").write_bytes(model.getvalue())
    text = write_lines(tmp_path / "text.txt", [POEM] * 4)
    run("prepare", text, "--out", tmp_path / "corpus", "--tokenizer", given,
        "--validation-fraction", "0")  # fmt: skip
    told = ("--init-from", str(given), "--shortest", "4")
    export = train("t5-pretrain", tmp_path, told, tmp_path / "corpus", steps=2)
    asked = ("--prompt", "天上<extra_id_0>", "--max-new-tokens", "4")
    assert run("generate", given, *asked)
    assert run("generate", export, *asked)
