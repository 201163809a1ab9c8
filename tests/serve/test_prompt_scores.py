"""Scores of prompts against transformers, token ids, similarities and rankings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from bmforge.infer.engine.request import TokenLogprob
from bmforge.serve.answers import TextLogprobs

PROMPTS = ["Once upon a time", "天气 is fine", "ab"]


def post(server: Any, path: str, **fields: Any) -> httpx.Response:
    body = {"model": server.serving.name, **fields}
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> Any:
    """Log-probabilities of transformers, (T - 1, V), of token ids."""
    model = LlamaForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()

    def read(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)[:-1]

    return read


def test_echo_with_logprobs(start: Any, engine: Any, reference: Any) -> None:
    rows = [engine.tokenizer.encode_prompt(text) for text in PROMPTS]
    with start() as server:
        for prompt in (PROMPTS, rows):
            found = post(server, "/v1/completions", prompt=prompt, echo=True, logprobs=3,
                         max_tokens=0, prompt_logprobs=2).json()  # fmt: skip
            assert [choice["text"] for choice in found["choices"]] == PROMPTS
            for choice, ids in zip(found["choices"], rows, strict=True):
                check(choice, ids, reference(ids))
            tokens = sum(map(len, rows))
            assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == tokens


def check(choice: dict[str, Any], ids: list[int], scores: torch.Tensor) -> None:
    told, targets = choice["logprobs"], torch.tensor(ids[1:])
    want = scores.gather(1, targets[:, None])[:, 0]
    assert told["token_logprobs"][0] is None is told["top_logprobs"][0]
    torch.testing.assert_close(torch.tensor(told["token_logprobs"][1:]), want, rtol=0, atol=1e-4)
    assert len(told["tokens"]) == len(told["text_offset"]) == len(ids)
    best = scores.max(1).values.tolist()
    assert [max(top.values()) for top in told["top_logprobs"][1:]] == pytest.approx(best, abs=1e-4)
    rows = choice["prompt_logprobs"]
    assert rows[0] is None
    ranks = (scores > want[:, None]).sum(1) + 1
    for row, id, value, rank in zip(rows[1:], ids[1:], want.tolist(), ranks.tolist(), strict=True):
        assert row[str(id)]["logprob"] == pytest.approx(value, abs=1e-4)
        assert row[str(id)]["rank"] == rank
        assert {entry["rank"] for entry in row.values()} >= {1, 2}


def test_echo_in_front_of_an_answer(start: Any) -> None:
    with start() as server:
        fields = {"prompt": "abc", "temperature": 0, "max_tokens": 4, "logprobs": 1}
        plain = post(server, "/v1/completions", **fields).json()["choices"][0]
        echo = post(server, "/v1/completions", **fields, echo=True).json()["choices"][0]
        assert echo["text"] == "abc" + plain["text"]
        assert echo["logprobs"]["tokens"][3:] == plain["logprobs"]["tokens"]
        assert echo["logprobs"]["token_logprobs"][3:] == plain["logprobs"]["token_logprobs"]
        assert echo["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]
        for wrong in (
            {"max_tokens": 0}, {"echo": True, "stream": True}, {"prompt_logprobs": 99},
            {"prompt_logprobs": 1, "stream": True}, {"max_tokens": -1},
        ):  # fmt: skip
            assert post(server, "/v1/completions", prompt="a", **wrong).status_code == 400, wrong


def test_tokens_that_are_parts_of_characters() -> None:
    """Each has its own name, the chosen one its own score; offsets count whole characters."""
    data = ["é".encode()[:1], "é".encode()[1:], b"x"]
    tops = (TokenLogprob(1, -0.1, data[0]), TokenLogprob(2, -9.0, b"\xe5"))
    found = TextLogprobs().write(
        [TokenLogprob(number, -0.1, part, tops) for number, part in enumerate(data)]
    )
    assert found["tokens"] == [r"bytes:\xc3", r"bytes:\xa9", "x"]
    assert found["top_logprobs"][0] == {r"bytes:\xc3": -0.1, r"bytes:\xe5": -9.0}
    assert found["text_offset"] == [0, 0, 1]


def test_tokenize_and_back(start: Any, engine: Any) -> None:
    with start() as server:
        for text in PROMPTS:
            found = post(server, "/tokenize", prompt=text, return_token_strs=True).json()
            assert found["tokens"] == engine.tokenizer.encode_prompt(text)
            assert found["count"] == len(found["token_strs"]) == len(found["tokens"])
            assert found["max_model_len"] == 1024
            assert post(server, "/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
        said = [{"role": "user", "content": "hi"}]
        found = post(server, "/tokenize", messages=said).json()
        chat = post(server, "/v1/chat/completions", messages=said, max_tokens=1).json()
        assert found["count"] == chat["usage"]["prompt_tokens"]
        for path, fields in (
            ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": said}),
            ("/tokenize", {"prompt": "a" * 100_000}), ("/detokenize", {"tokens": [99_999]}),
            ("/detokenize", {"tokens": []}),
        ):  # fmt: skip
            assert post(server, path, **fields).status_code == 400, (path, fields)


def test_scores_and_rankings_are_cosines_of_embeddings(start: Any) -> None:
    with start() as server:
        texts = ["apple", "a longer text", "天气", "apple"]
        data = post(server, "/v1/embeddings", input=texts).json()["data"]
        rows = torch.tensor([entry["embedding"] for entry in data])
        cosines = torch.nn.functional.cosine_similarity(rows[:1], rows[1:]).tolist()
        found_scores = post(server, "/v1/score", text_1=texts[0], text_2=texts[1:]).json()
        assert [one["score"] for one in found_scores["data"]] == pytest.approx(cosines, abs=1e-5)
        pairs = post(server, "/v1/score", text_1=texts[:2], text_2=texts[2:]).json()["data"]
        both = torch.nn.functional.cosine_similarity(rows[:2], rows[2:]).tolist()
        assert [one["score"] for one in pairs] == pytest.approx(both, abs=1e-5)
        found = post(server, "/v1/rerank", query=texts[0], documents=[*texts[1:3],
                     {"text": texts[3]}], top_n=2).json()  # fmt: skip
        best = sorted(range(3), key=lambda number: -cosines[number])[:2]
        assert [one["index"] for one in found["results"]] == best
        assert found["results"][0]["document"] == {"text": "apple"}
        for one, two in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            other = post(server, "/score", **{one: texts[0], two: texts[1:]}).json()
            assert other["data"] == found_scores["data"]
            uneven = post(server, "/v1/score", **{one: ["a", "b"], two: ["a"]})
            assert uneven.status_code == 400
            assert uneven.json()["error"]["param"] == one
        assert post(server, "/v1/score", text_1=["a", "b"], text_2=["a"]).status_code == 400
        for fields in ({"text_1": "a"}, {"text_1": "a", "documents": "b"},
                       {"queries": "a", "documents": "b", "items": "c"}):  # fmt: skip
            error = post(server, "/v1/score", **fields).json()["error"]
            assert "text_1 and text_2, or queries and documents, or" in error["message"]
        single = post(server, "/v1/rerank", query="a", documents="b").json()["results"]
        assert [one["document"] for one in single] == [{"text": "b"}]
        assert post(server, "/v1/rerank", query="a", documents=[]).status_code == 400
