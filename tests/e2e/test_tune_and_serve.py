"""The main job in three commands: tune on chats, quantize, serve; the trained answers come back."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from small_runs import write_jsonl
from test_adapter_runs import write_qwen3

from bmforge.cli import main
from bmforge.cli.chat import run_chat_session
from bmforge.cli.serve import _open_engine
from bmforge.cli.serve_options import ServeCommand
from bmforge.infer.conversation import ChatSessionConfig
from bmforge.models import AutoModel
from bmforge.recipes.adapter_dirs import find_source, merge_adapter
from bmforge.serve.app import create_app
from bmforge.serve.settings import ServeConfig
from bmforge.testing import assert_close

ANSWERS = {"hi": "hello there", "what is a list?": "a sequence", "你好": "您好"}


def write_chats(path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in ANSWERS.items()
    ]
    return write_jsonl(path, rows)


def ask(directory: Path, context: int = 256) -> dict[str, str]:
    """Ask a served model each question over its protocol, greedily."""
    testclient = pytest.importorskip("fastapi.testclient")
    source = find_source(directory)
    with _open_engine(ServeCommand(model=str(directory), context=context), source, None) as engine:
        app = create_app(engine, ServeConfig(log_requests=False), directory=source.tokenizer)
        with testclient.TestClient(app, base_url="http://127.0.0.1") as client:
            (name,) = [card["id"] for card in client.get("/v1/models").json()["data"]]
            found = {}
            for question in ANSWERS:
                body = {
                    "model": name,
                    "messages": [{"role": "user", "content": question}],
                    "temperature": 0,
                    "max_tokens": 24,
                }
                reply = client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                found[question] = reply.json()["choices"][0]["message"]["content"]
    return found


def test_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)
    base = write_qwen3(tmp_path / "base")
    chats = write_chats(tmp_path / "chats.jsonl")
    train = ["train", "conversations", "--model", str(base), "--data", str(chats)]
    train += ["--adapter", "lora", "--run-dir", "runs/mine"]
    fast = ["--seq-len", "64", "--batch-size", "2", "--micro-batch-size", "1", "--lr", "0.02"]
    fast += ["--adapter.rank", "16", "--train.schedule.kind", "constant"]
    assert main([*train, *fast, "--steps", "30"]) == 0
    assert main([*train, *fast, "--steps", "70"]) == 0  # a run that goes on
    assert main(["quantize", "runs/mine/export", "mine-int4", "--scheme", "int4"]) == 0
    for place in (Path("mine-int4"), Path("runs/mine")):
        for question, reply in ask(place).items():
            assert reply.rpartition("</think>")[2].strip() == ANSWERS[question]
    merged = merge_adapter("runs/mine", "mine")
    theirs = AutoPeftModelForCausalLM.from_pretrained("runs/mine/export").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("runs/mine/export")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt",
        return_dict=False,
    )  # fmt: skip
    with torch.no_grad():
        want = theirs(prompt).logits
        got = transformers.AutoModelForCausalLM.from_pretrained(merged)(prompt).logits
        assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert_close(AutoModel.from_pretrained(merged)(prompt).logits, want, rtol=1e-4, atol=1e-5)
    out = theirs.generate(prompt, do_sample=False, max_new_tokens=24)[0, prompt.shape[1] :]
    assert "hello there" in tokenizer.decode(out, skip_special_tokens=True)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO("hi\n"))
        run_chat_session("runs/mine", ChatSessionConfig(num_beams=2), shows_thoughts=False)
    assert capsys.readouterr().out.strip() == "hello there"
