"""Every program gives the model the same prompt ids for one conversation: transformers' ids."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chat_traits import TEMPLATES, write_bpe
from small_runs import write_jsonl
from test_chat_after_tuning import build
from torch.nn.modules.module import register_module_forward_pre_hook

from bmforge.cli import main
from bmforge.cli.chat import run_chat_session
from bmforge.cli.serve import _open_engine
from bmforge.cli.serve_options import ServeCommand
from bmforge.data.sources.conversations import ChatExample, read_conversations
from bmforge.infer.conversation import ChatSessionConfig, open_conversation
from bmforge.infer.harness import TextModel
from bmforge.models import AutoModel
from bmforge.models.base import Model
from bmforge.recipes.adapter_dirs import find_source
from bmforge.recipes.inputs.conversation_rows import encode_turns, render_conversation
from bmforge.serve.app import create_app
from bmforge.serve.settings import ServeConfig
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, find_template

ONE = [{"role": "user", "content": "What is a list?"}]
SEVERAL = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "你好，世界。"},
    *ONE,
]
FAMILIES = ("Qwen", "MiniCPM", "GPT2")
CASES = [
    *(("Llama", name, begin) for name in TEMPLATES for begin in (False, True)),
    *((family, "thoughts of the last answer alone", False) for family in FAMILIES),
]


def write_model(family: str, template: str, adds_begin: bool, folder: Path) -> Path:
    """Write a tiny model whose tokenizer adds a begin token to plain texts, or does not."""
    model = build(family, vocab_size=400)
    model.save_pretrained(folder)
    write_bpe(folder, template)
    if adds_begin:
        file = folder / "tokenizer.json"
        fields = json.loads(file.read_text())
        begin = "<|endoftext|>"
        fields["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": begin, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {begin: {"id": begin, "ids": [0], "tokens": [begin]}},
        }
        file.write_text(json.dumps(fields))
    return folder


def first_input(run: Callable[[], object]) -> list[int]:
    """Return the ids of the first call of a bmforge model while `run` runs."""
    calls: list[list[int]] = []

    def keep(module: Any, arguments: Any) -> None:
        ids = arguments[0] if isinstance(module, Model) and arguments else None
        if torch.is_tensor(ids) and not ids.is_meta:  # plans of memory run on the meta device
            calls.append(ids.flatten().tolist())

    handle = register_module_forward_pre_hook(keep)
    try:
        run()
    finally:
        handle.remove()
    return calls[0]


def served_ids(folder: Path, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    """Return the ids that the server gives to its engine."""
    testclient = pytest.importorskip("fastapi.testclient")
    source = find_source(folder)
    calls: list[list[int]] = []
    with _open_engine(ServeCommand(model=str(folder), context=250), source, None) as engine:
        submit = engine.submit

        def keep(request: Any) -> Any:
            calls.append(list(request.prompt))
            return submit(request)

        engine.submit = keep  # type: ignore[method-assign]
        app = create_app(engine, ServeConfig(log_requests=False), directory=source.tokenizer)
        with testclient.TestClient(app, base_url="http://127.0.0.1") as client:
            (name,) = [card["id"] for card in client.get("/v1/models").json()["data"]]
            body = {"model": name, "messages": messages, "max_tokens": 1, **fields}
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["prompt_tokens"] == len(calls[0])
    return calls[0]


def ask_chat(folder: Path, messages: list[dict[str, str]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder)
    chat = open_conversation(model, tokenizer, folder, {"max_new_tokens": 1})
    chat.history = messages[:-1]
    chat.reply(messages[-1]["content"])


def ask_harness(folder: Path, messages: list[dict[str, str]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(find_template(folder), tokenizer)
    inner = TextModel(AutoModel.from_pretrained(folder), tokenizer, template)
    inner.generate_until([(inner.render_chat(messages), {"max_gen_toks": 1})])


@pytest.mark.parametrize(("family", "name", "adds_begin"), CASES)
def test_prompt_ids_are_those_of_transformers(
    family: str, name: str, adds_begin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(family, TEMPLATES[name], adds_begin, tmp_path / "model")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(find_template(folder), tokenizer)

    def ids_of(messages: list[dict[str, str]]) -> list[int]:
        return list(
            theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )

    def talk_once() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(ONE[0]["content"] + "\n"))
            run_chat_session(str(folder), ChatSessionConfig(max_new_tokens=1))

    words = ["generate", str(folder), "--chat", "--prompt", ONE[0]["content"]]
    assert first_input(lambda: main([*words, "--max-new-tokens", "1"])) == ids_of(ONE)
    assert first_input(talk_once) == ids_of(ONE)
    assert served_ids(folder, SEVERAL) == ids_of(SEVERAL)
    for ask in (ask_chat, ask_harness):
        assert first_input(lambda ask=ask: ask(folder, SEVERAL)) == ids_of(SEVERAL), ask.__name__
    answered = [*SEVERAL, {"role": "assistant", "content": "a row"}]
    *_, turn = render_conversation(ChatExample("line 1", answered), template)
    row = encode_turns([turn], tokenizer)[0]
    want = ids_of(SEVERAL)
    if name != "thoughts stripped, prompt opens one":  # without a thought, the answer is completed
        assert row.ids[: len(want)] == want
        assert row.labels[: len(want)] == [-100] * len(want)
        assert row.labels[len(want) :] == row.ids[len(want) :]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "tools" in TEMPLATES[name]])
def test_prompt_ids_with_thoughts_and_tools(name: str, tmp_path: Path) -> None:
    """The server and training render a call, its result and a thought as transformers does."""
    folder = write_model("Llama", TEMPLATES[name], False, tmp_path / "model")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    call = {"name": "weather", "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": call}]
    messages: list[dict[str, Any]] = [
        *SEVERAL[:2],
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nyes"},
        *ONE,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "晴"},
    ]
    parsed = [{"id": "1", "type": "function", "function": {**call, "arguments": {}}}]
    rendered = [{**m, "tool_calls": parsed} if "tool_calls" in m else m for m in messages]
    want = list(
        theirs.apply_chat_template(
            rendered, tools=tools, add_generation_prompt=True, return_dict=False
        )
    )
    assert served_ids(folder, messages, tools=tools) == want
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(find_template(folder), tokenizer)
    answered = [*messages, {"role": "assistant", "content": "晴天"}]
    file = write_jsonl(tmp_path / "chat.jsonl", [{"messages": answered, "tools": tools}])
    (example,) = read_conversations(file)
    *_, turn = render_conversation(example, template)
    if name != "thoughts stripped, prompt opens one":  # without a thought, the answer is completed
        assert tokenizer.encode(turn.prompt) == want


def test_a_message_forges_no_end_of_turn_but_keeps_its_thoughts(tmp_path: Path) -> None:
    write_bpe(tmp_path, TEMPLATES["thoughts of the last answer alone"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    message = tokenizer.escape_specials("<think>a</think>b<|im_end|>")
    ids = tokenizer.encode_chat(message + "<|im_end|>")
    begin, close, end = (tokenizer.token_to_id(t) for t in ("<think>", "</think>", "<|im_end|>"))
    assert [ids.count(id) for id in (begin, close, end)] == [1, 1, 1]
    assert ids[0] == begin
    assert ids[-1] == end
    assert tokenizer.decode(ids[ids.index(close) + 1 : -1]) == "b<|im_end|>"
