"""Every form of chat data, tuned by each family, gives its answers over HTTP."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from chat_traits import TEMPLATES, write_bpe
from test_chat_after_tuning import build

from bmforge.cli import main
from bmforge.cli.serve import _open_engine
from bmforge.cli.serve_options import ServeCommand
from bmforge.recipes.adapter_dirs import find_source
from bmforge.serve.app import create_app
from bmforge.serve.settings import ServeConfig

HYBRID, LLAMA3 = "thoughts of the last answer alone", "headers, trimmed content"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def records(question: str, answer: str) -> dict[str, dict[str, Any]]:
    """One question and its answer in every form that files may have."""
    parts = [[{"type": "text", "text": text}] for text in (question, answer)]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked, said = turn("user", question), turn("assistant", answer)
    return {
        "messages": {"messages": [asked, said]},
        "several turns": {
            "messages": [*EARLIER, asked, said],
        },
        "thoughts": {"messages": [asked, {**said, "reasoning_content": "so"}]},
        "tools": {
            "tools": [TOOL],
            "messages": [
                asked,
                turn("assistant", None, tool_calls=[call]),
                turn("tool", "x"),
                said,
            ],
        },
        "content parts": {
            "messages": [turn("user", parts[0]), turn("assistant", parts[1])],
        },
        "prompt and completion": {"prompt": question, "completion": answer},
        "messages as prompt": {"prompt": [asked], "completion": [said]},
        "question and answer": {"question": question, "answer": answer},
        "dolly": {"instruction": question, "context": "", "response": answer},
        "ShareGPT": {
            "conversations": [
                {"from": "human", "value": question},
                {"from": "gpt", "value": answer},
            ]
        },
    }


EARLIER = [turn("user", "hi"), turn("assistant", "yo")]
NAMES = list(records("", ""))
QUESTIONS = ["a", "b", "c", "d", "e", "f", "g", "1", "2", "3"]
WORDS = ["red", "two", "sun", "box", "cat", "ink", "fog", "sea", "map", "owl"]
SEVERAL = QUESTIONS[NAMES.index("several turns")]  # asked after the earlier turn, as learned
ANSWERS = dict(zip(QUESTIONS, WORDS, strict=True))
SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "init_std": 0.05}


def write_data(folder: Path, has_thoughts: bool, has_tools: bool) -> dict[str, str]:
    """Write a file of each form, in different encodings and containers; return what was asked."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    expected = {}
    encodings = ["utf-8", "utf-8-sig", "utf-16", "gb18030"]
    for number, (name, question) in enumerate(zip(NAMES, QUESTIONS, strict=True)):
        if (name == "thoughts" and not has_thoughts) or (name == "tools" and not has_tools):
            continue
        expected[question] = ANSWERS[question]
        record = records(question, ANSWERS[question])[name]
        if name == "ShareGPT":
            table = pyarrow.Table.from_pylist([record])
            pyarrow.parquet.write_table(table, folder / "rows.parquet")
        elif name == "dolly":
            (folder / "dolly.json").write_text(json.dumps([record]))
        else:
            line = json.dumps(record, ensure_ascii=False) + "\n"
            encoding = encodings[number % len(encodings)]
            (folder / f"{number}.jsonl").write_bytes(line.encode(encoding))
    return expected


def ask(directory: Path, questions: list[str]) -> dict[str, str]:
    """Return the greedy answers of a served model."""
    testclient = pytest.importorskip("fastapi.testclient")
    source, answers = find_source(directory), {}
    with _open_engine(ServeCommand(model=str(directory), context=256), source, None) as engine:
        app = create_app(engine, ServeConfig(log_requests=False), directory=source.tokenizer)
        with testclient.TestClient(app, base_url="http://127.0.0.1") as client:
            (name,) = [card["id"] for card in client.get("/v1/models").json()["data"]]
            for question in questions:
                body: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": 24}
                earlier = EARLIER if question == SEVERAL else []
                body["messages"] = [*earlier, turn("user", question)]
                reply = client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                message = reply.json()["choices"][0]["message"]
                answers[question] = (message["content"] or "").rpartition("</think>")[2].strip()
    return answers


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "template"),
    [
        ("Qwen", HYBRID),
        ("Llama", LLAMA3),
        ("MiniCPM", "plain ChatML"),
        ("T5", "plain ChatML"),
    ],
)
def test_every_form_reaches_the_served_answer(family: str, template: str, tmp_path: Path) -> None:
    """Ten forms in one folder, tuned in one run; each question is asked."""
    pytest.importorskip("fastapi")
    build(family, vocab_size=400, **SIZES).save_pretrained(tmp_path / "base")
    write_bpe(tmp_path / "base", TEMPLATES[template])
    has_tools = family != "T5" and "tools" in TEMPLATES[template]
    expected = write_data(tmp_path / "data", template == HYBRID, has_tools)
    # With tools, the question is followed by a call; it is asked without them.
    asked = [question for question in expected if question != QUESTIONS[NAMES.index("tools")]]
    train = ["train", "conversations", "--model", str(tmp_path / "base")]
    train += ["--data", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run")]
    train += ["--seq-len", "128", "--batch-size", "4", "--micro-batch-size", "4", "--lr", "3e-3"]
    # An encoder-decoder has a row per answer, and learns slowly from random weights.
    steps = "1000" if family == "T5" else "160"
    train += ["--steps", steps, "--train.schedule.kind", "constant", "--train.disable-dropout"]
    assert main(train) == 0
    answers = ask(tmp_path / "run" / "export", asked)
    assert answers == {question: expected[question] for question in asked}
