"""CPM-1 with a vocab.txt, as ModelCenter publishes it, against the plain algorithm on jieba."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmforge.compat.model_center.tokenizer import CPM1Tokenizer
from bmforge.errors import DataError
from bmforge.tokenizers import AutoTokenizer

pytest.importorskip("rjieba", reason="needs the extra zh")
pytest.importorskip("jieba", reason="the original cuts with jieba").setLogLevel("WARNING")
import plain_tokenizers  # noqa: E402

SPECIAL = ["<unk>", "<pad>", "<eod>", "</n>", "</_>"]
PIECES = [*SPECIAL, "今天", "天气", "很", "好", "。", "，", "hello", "wor", "ld", "1", "2", "ＡＢ"]
PARTS = st.sampled_from([*PIECES, " ", "\n", "\t", "未知", "天", "气", "x" * 201, "world", "！"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cpm1")
    (path / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (path / "config.json").write_text(json.dumps({"model_type": "cpm1"}))
    return path


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(parts=st.lists(PARTS, max_size=12))
def test_ids_are_those_of_the_plain_algorithm(folder: Path, parts: list[str]) -> None:
    text = "".join(parts)
    tokenizer = CPM1Tokenizer.from_pretrained(str(folder))
    ids = tokenizer.encode(text)
    assert ids == plain_tokenizers.cpm1_words(folder)(text)
    if tokenizer.unk_id not in ids:
        assert tokenizer.decode(ids) == text.replace("</_>", " ").replace("</n>", "\n")


def test_special_ids_and_saving(folder: Path, tmp_path: Path) -> None:
    tokenizer = CPM1Tokenizer.from_pretrained(str(folder))
    assert (tokenizer.unk_id, tokenizer.pad_id, tokenizer.eod_id) == (0, 1, 2)
    assert (tokenizer.line_id, tokenizer.space_id, tokenizer.vocab_size) == (3, 4, len(PIECES))
    opened = AutoTokenizer.from_pretrained(folder)
    opened.save_pretrained(tmp_path)
    text = "今天 天气\n很好"
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == tokenizer.encode(text)


def test_a_vocabulary_without_a_required_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("<unk>\n<pad>\n<eod>\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"lacks the tokens \['</_>', '</n>'\]"):
        CPM1Tokenizer.from_pretrained(str(tmp_path))
