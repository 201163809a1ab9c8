"""Token stores of CPM-Pretrain: shares of a store, and spans cut in advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import HEAD, SIZES, examples, settings, write_counting, write_vocabulary

from bmforge.data import TokenStore, TokenStoreWriter
from bmforge.data.store.token_store import DTYPE_CODES, HEADER, MAGIC
from bmforge.errors import ConfigError, DataError
from bmforge.models.gpt2 import GPT2Config
from bmforge.models.t5 import T5Config
from bmforge.parallel import World
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.inputs.span_corpus import SpanCorpus
from bmforge.recipes.inputs.splitting import StorePart
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.recipes.spans import T5SpansConfig, _open_data, train_spans
from bmforge.train import read_metrics

WORLD = World(0, 1, torch.device("cpu"))
VOCAB, SENTINELS = 40, [30, 31, 32, 33, 34, 35, 36, 37]


def write_raw(prefix: Path, sequences: list[list[int]], code: int = 4) -> None:
    """An MMIDIDX store written byte by byte, every sequence a document."""
    dtype = np.dtype(DTYPE_CODES[code])
    sizes = np.array([len(s) for s in sequences], "<i4")
    pointers = (np.cumsum(sizes) - sizes).astype("<i8") * dtype.itemsize
    marks = np.arange(len(sequences) + 1, dtype="<i8")
    head = HEADER.pack(MAGIC, 1, code, len(sequences), len(marks))
    Path(f"{prefix}.idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + marks.tobytes())
    Path(f"{prefix}.bin").write_bytes(np.concatenate([np.array(s, dtype) for s in sequences]))


def cut_spans(texts: list[list[int]]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """As the old program stored them: in every text, tokens 2 and 3 and token 6 are cut out."""
    contexts, targets, offsets = [], [], []
    for ids in texts:
        contexts.append([*ids[:2], VOCAB, *ids[4:6], VOCAB + 1, *ids[7:]])
        targets.append([VOCAB, *ids[2:4], VOCAB + 1, ids[6]])
        offsets.append([0, 3, 3, 2])
    return contexts, targets, offsets


def write_spans(prefix: Path, count: int = 12) -> str:
    texts = [[10 + (number + i) % 10 for i in range(9)] for number in range(count)]
    for name, part in zip(("context", "target", "target_offset"), cut_spans(texts), strict=True):
        write_raw(Path(f"{prefix}_{name}"), part)
    return str(prefix)


def span_config(prefix: str, vocabulary: Path | None = None, **changes: Any) -> T5SpansConfig:
    data = examples([Path(prefix)], vocabulary, seq_len=16, **changes)
    model = T5Config(vocab_size=VOCAB, intermediate_size=48, head_dim=16, **SIZES)
    return T5SpansConfig(data=data, model=model, target_len=20)


def test_rows_of_spans_cut_before(tmp_path: Path) -> None:
    """Row 1 begins inside a text; sentinels are numbered by row, targets found by text."""
    config = span_config(write_spans(tmp_path / "corpus"))
    corpus = SpanCorpus(config.data.paths, (), 0, config, SENTINELS, VOCAB)
    assert len(corpus) == 12 * 8 // 16
    a, b, c, d, e, f = SENTINELS[:6]
    row = corpus.make(0, ())
    assert row["input_ids"] == [10, 11, a, 14, 15, b, 17, 18, 11, 12, c, 15, 16, d, 18, 19]
    assert row["labels"] == [a, 12, 13, b, 16, c, 13, 14, d, 17, e]
    config.data.seq_len = 20
    row = SpanCorpus(config.data.paths, (), 0, config, SENTINELS, VOCAB).make(1, ())
    # From the middle of the third text on: its second span, and two whole texts.
    assert row["input_ids"][:4] == [17, a, 19, 10]
    assert row["labels"] == [a, 18, b, 15, 16, c, 19, d, 16, 17, e, 10, f]


def test_shares_of_a_span_corpus(tmp_path: Path) -> None:
    config = span_config(write_spans(tmp_path / "corpus"))
    paths, split = config.data.paths, (8, 4)
    parts = [SpanCorpus(paths, split, i, config, SENTINELS, VOCAB) for i in (0, 1)]
    assert [len(part) for part in parts] == [4, 2]
    whole = SpanCorpus(paths, (), 0, config, SENTINELS, VOCAB)
    assert parts[1].make(0, ()) == whole.make(4, ())
    assert parts[0].fingerprint != parts[1].fingerprint


def test_damaged_span_corpora(tmp_path: Path) -> None:
    config = span_config(write_spans(tmp_path / "corpus"))
    paths = config.data.paths
    short = T5SpansConfig(data=config.data, model=config.model)
    with pytest.raises(ConfigError, match="target_len is not set"):
        SpanCorpus(paths, (), 0, short, SENTINELS, VOCAB)
    with pytest.raises(DataError, match="more spans than the tokenizer has sentinel tokens"):
        SpanCorpus(paths, (), 0, config, SENTINELS[:3], VOCAB).make(0, ())
    with pytest.raises(DataError, match=r"text 0: span 1 does not .*tokenizer of 39 tokens"):
        SpanCorpus(paths, (), 0, config, SENTINELS, VOCAB - 1).make(0, ())
    write_raw(tmp_path / "corpus_target", [[VOCAB, 1]] * 11)
    with pytest.raises(DataError, match="12 contexts, 11 targets and 12 offsets"):
        SpanCorpus(paths, (), 0, config, SENTINELS, VOCAB)


def test_t5_learns_from_spans_cut_before(tmp_path: Path) -> None:
    """The recipe finds the three stores, and the sentinels of CPM's vocabulary."""
    pytest.importorskip("jieba", reason="needs the extra zh")
    tail = [f"<s_{i}>" for i in range(8)]
    folder = write_vocabulary(tmp_path / "vocabulary", [*HEAD, "▁", "<x>"], *tail)
    size = len((folder / "vocab.txt").read_text("utf-8").splitlines())
    assert size == VOCAB - 1
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text("utf-8") + "<y>\n", "utf-8")
    config = span_config(write_spans(tmp_path / "corpus"), folder)
    config.run_dir, config.train = tmp_path / "run", settings(30)
    config.noise_density = 0.3
    with pytest.raises(ConfigError, match="noise_density have no effect"):
        train_spans(config)
    config.noise_density = 0.15
    result = train_spans(config)
    losses = [row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl")]
    assert losses[-1] < 0.7 * losses[0]
    assert result.evaluation is not None


def test_spans_of_plain_text_with_the_vocabulary_of_cpm(tmp_path: Path) -> None:
    """The sentinels are <s_0>, <s_1>, ...; with their spans, the sources are the texts again."""
    pytest.importorskip("jieba", reason="needs the extra zh")
    names = [f"<s_{i}>" for i in range(8)]
    folder = write_vocabulary(tmp_path / "vocabulary", [*HEAD, "▁"], *names)
    first = (folder / "vocab.txt").read_text("utf-8").splitlines().index(names[0])
    store = TokenStore(write_counting(tmp_path / "tokens", 11, end=7))
    held_out = _open_data(span_config(str(store.prefix), folder), WORLD).held_out
    batches = [batch for open_batches in held_out.values() for batch in open_batches()]
    restored = []
    for batch in batches:
        for row, target in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            source, spans = row[: row.index(7) + 1], dict[int, list[int]]()
            for id in target[: target.index(7)]:
                spans.setdefault(id, []) if id >= first else spans[max(spans)].append(id)
            assert [*spans] == [*range(first, first + len(spans))]
            restored.append([x for id in source for x in spans.get(id, [id])])
    assert sorted(restored) == sorted(store.tokens[a:b].tolist() for a, b in store.documents())


def test_part_of_a_store(tmp_path: Path) -> None:
    store = TokenStore(write_counting(tmp_path / "tokens", 11, end=7, count=20))
    documents = [store.tokens[a:b].tolist() for a, b in store.documents()]
    parts = [StorePart(store.prefix, (949, 50, 1), i) for i in (0, 1)]
    found = [[part.tokens[a:b].tolist() for a, b in part.documents()] for part in parts]
    assert found == [documents[:19], documents[19:]]
    assert [part.num_documents for part in parts] == [19, 1]
    assert parts[1].map_for_random_access().tolist() == documents[19]
    assert sum(part.num_tokens for part in parts) == store.num_tokens
    with pytest.raises(DataError, match=r"20 documents, too few for .*: entry 2 selects none"):
        StorePart(store.prefix, (949, 50, 1), 2)


def test_pretraining_on_a_share(tmp_path: Path) -> None:
    """The held-out share is evaluated, and is not what was learned from."""
    with TokenStoreWriter(tmp_path / "tokens", vocab_size=40) as writer:
        for number in range(20):
            first = 10 if number < 15 else 25  # the last quarter has tokens of its own
            writer.add_item([*(first + i % 3 for i in range(9)), 7])
            writer.end_document()
    data = CorpusConfig(
        paths=(str(tmp_path / "tokens"),),
        split=(75, 25),
        seq_len=10,
        global_batch_size=4,
        micro_batch_size=2,
        eos_id=7,
    )
    model = GPT2Config(vocab_size=40, max_seq_len=16, **SIZES)
    config = GPT2PretrainConfig(
        run_dir=tmp_path / "run", model=model, data=data, train=settings(20), export=False
    )
    result = pretrain(config)
    last = read_metrics(config.run_dir / "metrics.jsonl")[-1]["loss"]
    assert result.evaluation is not None
    assert result.evaluation.tokens == 49  # 5 documents of 10; the very first is not predicted
    assert last < 2.0 < 4.0 < result.evaluation.loss


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": (0.0, 1.0)}, "the first above 0"),
        ({"split": (1.0, 1.0, 1.0, 1.0)}, "at most three"),
        ({"split": (9.0, 1.0), "validation": "."}, "cannot be used together"),
    ],
)
def test_bad_shares(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    store = write_counting(tmp_path / "tokens", 11, end=7)
    config = GPT2PretrainConfig(
        run_dir=tmp_path / "run", data=CorpusConfig(paths=(str(store),), **changes)
    )
    with pytest.raises(ConfigError, match=words):
        pretrain(config)
