"""From raw text to a trained model with tokenizers that are no tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import ANT_HEAD, HEAD, SIZES, settings, train_cpm1_tokenizer

from bmforge.data import PrepareConfig, TokenStore, TokenStoreWriter, prepare, python_topics
from bmforge.models.cpm1 import CPM1Config
from bmforge.models.cpm2 import CPM2Config
from bmforge.models.cpm_ant import CPMAntConfig
from bmforge.recipes.cpm_ant import CPMAntTrainConfig, train_ant
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.inputs.examples import ExampleConfig
from bmforge.recipes.pretrain import CPM1PretrainConfig, pretrain
from bmforge.recipes.spans import CPM2SpansConfig, train_spans
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import read_metrics

CHINESE = "天上不好，地下你我他。一二三四，五六七八九十；人人你好。"
ROWS = {"seq_len": 24, "global_batch_size": 8, "micro_batch_size": 4}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Help topics of Python, and Chinese sentences: documents of a few hundred characters."""
    folder = tmp_path / "texts"
    folder.mkdir()
    pieces = [topic.text[:200] for topic, _ in zip(python_topics(), range(8), strict=False)]
    pieces += [CHINESE[number:] + CHINESE * 3 for number in range(8)]
    for number, piece in enumerate(pieces):
        (folder / f"{number}.txt").write_text(piece, encoding="utf-8")
    return folder


def write_characters(folder: Path, texts: Path, head: list[str], *tail: str) -> Path:
    """A vocab.txt of the characters of all texts; returns its directory."""
    folder.mkdir()
    letters = {letter for path in texts.iterdir() for letter in path.read_text("utf-8")}
    tokens = [*head, *sorted(letters - {" ", "\n", *head}), *tail]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder


def check_learning(config: Any, run: Any, kind: str) -> None:
    result = run(config)
    losses = [row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl")]
    assert losses[-1] < 0.8 * losses[0], losses
    assert result.evaluation is not None
    assert type(AutoTokenizer.from_pretrained(config.run_dir / "export")).__name__ == kind


def prepared(texts: Path, out: Path, tokenizer: Path) -> tuple[str, int]:
    """The directory of the prepared texts, and the number of token ids."""
    settled = PrepareConfig(tokenizer=str(tokenizer), validation_fraction=0.2)
    return str(out), prepare(str(texts), out, settled).vocab_size


def test_cpm1_learns_raw_text(texts: Path, tmp_path: Path) -> None:
    train_cpm1_tokenizer().save_pretrained(tmp_path / "given")
    path, size = prepared(texts, tmp_path / "corpus", tmp_path / "given")
    model = CPM1Config(vocab_size=size, max_seq_len=32, **SIZES)
    config = CPM1PretrainConfig(
        run_dir=tmp_path / "run",
        model=model,
        data=CorpusConfig(paths=(path,), **ROWS),
        train=settings(15),
    )
    check_learning(config, pretrain, "CPM1Tokenizer")


def test_ant_learns_raw_text(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("jieba", reason="needs the extra zh")
    folder = write_characters(tmp_path / "given", texts, ANT_HEAD)
    path, size = prepared(texts, tmp_path / "corpus", folder)
    model = CPMAntConfig(
        vocab_size=size, intermediate_size=48, head_dim=16, num_buckets=16, max_seq_len=32,
        prompt_types=4, prompt_length=3, segment_types=4, **SIZES,
    )  # fmt: skip
    data = ExampleConfig(paths=(path,), **ROWS)
    config = CPMAntTrainConfig(
        run_dir=tmp_path / "run", model=model, data=data, train=settings(15, lr=0.05), shortest=8
    )
    check_learning(config, train_ant, "CPMAntTokenizer")


def test_cpm2_learns_raw_text(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("jieba", reason="needs the extra zh")
    sentinels = [f"<s_{number}>" for number in range(8)]
    folder = write_characters(tmp_path / "given", texts, [*HEAD, "▁"], *sentinels)
    path, size = prepared(texts, tmp_path / "corpus", folder)
    model = CPM2Config(
        vocab_size=size, intermediate_size=48, head_dim=16, init_std=0.05, eos_token_id=7, **SIZES
    )
    config = CPM2SpansConfig(
        run_dir=tmp_path / "run",
        model=model,
        data=ExampleConfig(paths=(path,), **ROWS),
        train=settings(15),
    )
    check_learning(config, train_spans, "CPM2Tokenizer")


def test_a_bare_store_takes_its_end_from_the_tokenizer(texts: Path, tmp_path: Path) -> None:
    """`data.tokenizer` says what a store of somebody else's was made with, and is exported."""
    train_cpm1_tokenizer().save_pretrained(tmp_path / "given")
    path, size = prepared(texts, tmp_path / "corpus", tmp_path / "given")
    whole = TokenStore(f"{path}/train/tokens")
    with TokenStoreWriter(tmp_path / "bare", vocab_size=size) as writer:
        for first, end in whole.documents():
            writer.add_item(whole.tokens[first:end])
            writer.end_document()
    data = CorpusConfig(
        paths=(str(tmp_path / "bare"),), tokenizer=str(tmp_path / "given"),
        validation=str(tmp_path / "bare"), reset_at_documents=True, **ROWS,
    )  # fmt: skip
    model = CPM1Config(vocab_size=size, max_seq_len=32, **SIZES)
    config = CPM1PretrainConfig(
        run_dir=tmp_path / "run", model=model, data=data, train=settings(15)
    )
    check_learning(config, pretrain, "CPM1Tokenizer")
