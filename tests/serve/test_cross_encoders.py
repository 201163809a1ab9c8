"""Reranking by a cross-encoder: the scores are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from bmforge.infer import Engine
from bmforge.serve.app import create_app
from bmforge.serve.settings import ServeConfig

QUERY, DOCUMENTS = "what is a panda", ["a panda is a bear", "paris", "a b", "bear what paris is"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *["what", "is", "a", "b", "panda", "bear", "paris"]]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def write_cross_encoder(folder: Path, kind: str, num_labels: int = 1) -> Any:
    """Write a classifier of transformers with its tokenizer; return it as a scoring function."""
    torch.manual_seed(0)
    if kind == "bert":
        config, pair = transformers.BertConfig(**SIZES), "[CLS] $A [SEP] $B:1 [SEP]:1"
    else:
        config = transformers.XLMRobertaConfig(**SIZES, type_vocab_size=1)
        pair = "[CLS] $A [SEP] [SEP] $B [SEP]"
    config.num_labels = num_labels
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    spelled = tokenizers.Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    spelled.pre_tokenizer = Whitespace()
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    spelled.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=marks
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=spelled, unk_token="[UNK]", **names
    )
    tokenizer.save_pretrained(folder)

    def score(first: str, second: str) -> float:
        types = kind == "bert"  # as in BertTokenizer and XLMRobertaTokenizer
        inputs = tokenizer(first, second, return_tensors="pt", return_token_type_ids=types)
        with torch.no_grad():
            return model(**inputs).logits[0, 0].sigmoid().item()

    return score


@pytest.mark.parametrize("place", ["main", "second"])
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_scores_are_those_of_transformers(
    kind: str, place: str, tmp_path: Path, start: Any
) -> None:
    score = write_cross_encoder(tmp_path / "ranker", kind)
    want = [score(QUERY, document) for document in DOCUMENTS]
    assert max(want) - min(want) > 1e-3
    with Engine(tmp_path / "ranker") as engine:
        roles = {"other": engine, "place": tmp_path / "ranker"}
        if place == "second":
            roles = {"embedder": engine, "embedding_name": "ranker"}
        with start(**roles) as server:
            body = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS}
            results = httpx.post(f"{server.url}/v1/rerank", json=body).json()["results"]
            order = sorted(range(len(want)), key=lambda number: -want[number])
            assert [entry["index"] for entry in results] == order
            scores = [entry["relevance_score"] for entry in results]
            assert scores == pytest.approx([want[number] for number in order], abs=1e-5)
            body = {"model": "ranker", "text_1": DOCUMENTS, "text_2": [QUERY] * len(DOCUMENTS)}
            data = httpx.post(f"{server.url}/v1/score", json=body).json()["data"]
            other = [score(document, QUERY) for document in DOCUMENTS]
            assert [entry["score"] for entry in data] == pytest.approx(other, abs=1e-5)
            body = {"model": "ranker", "text_1": "a " * 90, "text_2": "b"}
            assert httpx.post(f"{server.url}/v1/score", json=body).status_code == 400


def test_classifiers_with_several_classes_compare_embeddings(tmp_path: Path) -> None:
    write_cross_encoder(tmp_path / "classes", "bert", num_labels=3)
    with Engine(tmp_path / "classes") as engine:
        app = create_app(engine, ServeConfig(log_requests=False), directory=tmp_path / "classes")
        assert app.state.serving.main.abilities == ("embeddings",)
