"""Masking by the training tasks: CPM-Ant's tokens, spans of CPM-2 and T5, idioms of CPM-1."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from small_runs import train_cpm1_tokenizer, write_counting

from bmforge.errors import ConfigError
from bmforge.infer.openbmb.chat import join_history
from bmforge.recipes.cpm1 import encode_chid
from bmforge.recipes.cpm_ant import hide_tokens
from bmforge.recipes.inputs.document_segments import DocumentSegments
from bmforge.recipes.spans import corrupt_spans, count_spans


def original_targets(ids: list[int], context: list[int]) -> list[int]:
    """The targets as CPM-Live's dataset writes them: np.where over neighbours."""
    given = np.array(context, dtype=bool)
    wanted = np.full(len(ids), -100)
    wanted[:-1] = np.where(given[1:], -100, np.array(ids)[1:])
    return wanted.tolist()


@pytest.mark.parametrize("task", ["mlm", "lm"])
def test_hidden_tokens(task: str) -> None:
    ids = list(range(100, 112))
    hidden = Counter()
    counts = Counter()
    for number in range(600):
        row = hide_tokens(ids, task, ("test", number))
        context = row["context"]
        assert row == hide_tokens(ids, task, ("test", number))
        assert row["input_ids"] == ids
        assert set(row["segment"]) == {1 if task == "mlm" else 2}
        assert context[0] == 1
        assert row["labels"] == original_targets(ids, list(context))
        places = [i for i, given in enumerate(context) if not given]
        if task == "lm":
            assert places == list(range(len(ids) - len(places), len(ids)))
        hidden.update(places)
        counts[len(places)] += 1
    assert set(counts) == set(range(1, 12))
    assert max(counts.values()) < 2 * min(counts.values())  # 55 each, give or take 7
    if task == "mlm":
        assert max(hidden.values()) < 1.3 * min(hidden.values())


@pytest.mark.parametrize(
    ("length", "density", "mean"), [(40, 0.15, 3.0), (200, 0.5, 5.0), (2, 0.15, 3.0)]
)
def test_spans_put_back_give_the_text(length: int, density: float, mean: float) -> None:
    ids = list(range(1000, 1000 + length))
    sentinels = list(range(500))
    first = set()
    for number in range(40):
        source, target = corrupt_spans(ids, sentinels, ("s", number), density, mean)
        marks = [id for id in source if id < 500]
        assert marks == sentinels[: len(marks)]
        assert [id for id in target if id < 500] == sentinels[: len(marks) + 1]
        assert target[-1] == len(marks)
        spans: dict[int, list[int]] = {}
        for id in target:
            if id < 500:
                spans[current := id] = []
            else:
                spans[current].append(id)
        whole = [i for id in source for i in (spans[id] if id < 500 else [id])]
        assert whole == ids
        assert all(spans[mark] for mark in marks)
        assert source[0] == ids[0]  # the text begins with what is kept
        noise = sum(map(len, spans.values()))
        assert noise == min(max(round(length * density), 1), length - 1)
        assert len(marks) == max(1, round(noise / mean))
        assert (noise, len(marks)) == count_spans(length, density, mean)
        first.add(tuple(source))
    assert len(first) > (20 if length > 2 else 0)


def test_pieces_of_documents(tmp_path: Path) -> None:
    """Documents without their ends, long ones cut, short ones and ends left out."""
    prefix = write_counting(tmp_path / "tokens", 11, end=7, count=9)
    segments = DocumentSegments([prefix, prefix], shortest=3, longest=6, end_id=7)
    want = []
    for number in range(9):
        text = [11 + (number + i) % 10 for i in range(10 + number % 7)]
        want += [text[i : i + 6] for i in range(0, len(text), 6) if len(text[i : i + 6]) >= 3]
    assert [segments[i].tolist() for i in range(len(segments))] == want + want


def test_chid_is_written_as_the_original_writes_it() -> None:
    tokenizer = train_cpm1_tokenizer()
    tokens = {id: token for token, id in tokenizer.get_vocab().items()}
    text = "天下#idiom01#我他#idiom02#。"
    places = list(re.finditer(r"#idiom\d+#", text))
    for place, want in zip(places, ("天下<mask>我他。", "天下我他<mask>。"), strict=True):
        ids = encode_chid(text, place, ["一人", "上下"], tokenizer)
        shown = "".join(tokens[id] for id in ids).replace("\u2581", "")
        options = "选项0:一人<sep>选项1:上下<sep>"
        assert shown == f"上下文:{want}<eod>{options}<mask>答案是:"


def test_history_is_cut_to_the_window() -> None:
    said = [[1, 2, 3], [4], [5, 6]]
    assert join_history(said, 0, 99, 10) == [1, 2, 3, 0, 4, 0, 5, 6, 0, 99]
    assert join_history(said, 0, 99, 9) == [4, 0, 5, 6, 0, 99]
    assert join_history(said, 0, 99, 5) == [5, 6, 0, 99]
    assert join_history([list(range(20))], 0, 99, 6) == [16, 17, 18, 19, 0, 99]
    assert join_history([[1], list(range(20)), [7]], 0, 99, 6) == [7, 0, 99]


def test_more_spans_than_sentinels_is_refused(tmp_path: Path) -> None:
    from small_runs import HEAD, SIZES, examples, settings, write_vocabulary

    from bmforge.models.cpm2 import CPM2Config
    from bmforge.recipes.spans import CPM2SpansConfig, train_spans

    pytest.importorskip("jieba", reason="needs the extra zh")
    folder = write_vocabulary(tmp_path / "vocabulary", [*HEAD, "▁"], "<s_0>", "<s_1>")
    store = write_counting(tmp_path / "tokens", 11, end=7)
    config = CPM2SpansConfig(
        run_dir=tmp_path / "run",
        model=CPM2Config(vocab_size=40, intermediate_size=32, head_dim=8, **SIZES),
        data=examples([store], folder, seq_len=40),
        train=settings(1),
    )
    with pytest.raises(ConfigError, match=r"2 spans.*the tokenizer has 2 \(<s_0>"):
        train_spans(config)
