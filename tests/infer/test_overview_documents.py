"""The documents that CPM-Bee's overview shows, and bad ones, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.cli.main import main
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.testing.character_tokenizer import BEE_MARKS
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

OVERVIEW: dict[str, dict[str, Any]] = {
    "text generation": {
        "input": "今天天气很好，我和妈妈一起去公园，<mask>",
        "prompt": "往后写两句话",
        "<ans>": "",
    },
    "translation": {"input": "北京是中国的首都", "prompt": "中翻英", "<ans>": ""},
    "scoring": {
        "input": "之前多次聚餐都选择这里，有各种大小的包房同时能容纳很多人，环境好有特色还有表演",
        "question": "评分是多少？(1-5)",
        "<ans>": "",
    },
    "multiple choice": {
        "input": "父母都希望自己的孩子诚实、勇敢、有礼貌。要想这样，父母首先得从自己做起",
        "options": {
            "<option_0>": "少提要求",
            "<option_1>": "降低标准",
            "<option_2>": "自己先做好",
            "<option_3>": "让孩子拿主意",
        },
        "question": "教育孩子时，父母应该：",
        "<ans>": "",
    },
}
BAD = {
    "no answer to write": ({"input": "好"}, "has no '<ans>'"),
    "nested too deep": (
        {"input": json.loads('{"a":' * 20 + '"b"' + "}" * 20), "<ans>": ""},
        "nested deeper than max_nesting=16",
    ),
    "a slot without a blank": (
        {"input": "<mask_0>", "<ans>": {"<mask_1>": ""}},
        "<mask_1> has no blank",
    ),
    "an unknown special": ({"input": "好<masc_0>", "<ans>": ""}, "unknown special token <masc_0>"),
    "a list": ({"input": ["好"], "<ans>": ""}, "of type list"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vocabulary of the documents' characters."""
    text = json.dumps(OVERVIEW, ensure_ascii=False)
    tokenizer = CPMBeeTokenizer(
        [*BEE_MARKS, *sorted({c for c in text if c.isalnum()} | set("12345"))]
    )
    config = CPMBeeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2,
        head_dim=16, num_buckets=16, num_relations=64, max_seq_len=32,
    )  # fmt: skip
    built = CPMBee.from_config(config)
    with torch.no_grad():
        built.embed.weight.mul_(100.0)
    folder = tmp_path_factory.mktemp("bee")
    built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fill(model: Path, file: Path, documents: list[dict[str, Any]]) -> int:
    """Run the command on documents."""
    lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
    file.write_text("".join(lines), encoding="utf-8")
    return main(["generate", str(model), "--document", str(file), "--max-new-tokens", "5"])


def test_the_overviews_documents_come_back_filled(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is the same document with a text as its answer; held to ratings and options."""
    assert fill(model, tmp_path / "documents.jsonl", list(OVERVIEW.values())) == 0
    filled = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{**document, "<ans>": ""} for document in filled] == list(OVERVIEW.values())
    answers = dict(zip(OVERVIEW, (document["<ans>"] for document in filled), strict=True))
    assert all(isinstance(answer, str) for answer in answers.values())
    assert answers["text generation"] or answers["translation"]
    assert answers["scoring"] in {"1", "2", "3", "4", "5"}
    assert answers["multiple choice"] in OVERVIEW["multiple choice"]["options"]


@pytest.mark.parametrize("kind", BAD)
def test_bad_documents_are_told(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with 2 and says which line and why; the other one is answered."""
    document, message = BAD[kind]
    assert fill(model, tmp_path / "documents.jsonl", [OVERVIEW["translation"], document]) == 2
    said = capsys.readouterr()
    (answered,) = said.out.splitlines()
    assert {**json.loads(answered), "<ans>": ""} == OVERVIEW["translation"]
    assert "line 2" in said.err
    assert message in said.err
