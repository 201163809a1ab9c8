"""Rows of conversations against transformers' `apply_chat_template`, by template traits."""

from __future__ import annotations

import csv
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from chat_traits import TEMPLATES, write_bpe
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import write_jsonl

from bmforge.data.sources.conversations import ChatExample, read_conversations
from bmforge.data.sources.preferences import read_preferences
from bmforge.data.tasks.user_tasks import make_task
from bmforge.errors import DataError
from bmforge.recipes.inputs.conversation_rows import encode_turns, render_conversation
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_named import NAMED_TEMPLATES
from bmforge.tokenizers.chat_template import ChatTemplate, find_template
from bmforge.tokenizers.chat_turns import split_thought

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": "北京"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "北京"}}}
TEXTS = st.sampled_from(["hi", "What is a list?", "你好，世界。", "1 < 2\n\nand more", "'quoted'"])
THOUGHTS = st.sampled_from([None, "add them", "first\nthen"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bpe(tmp_path_factory.mktemp("bpe"))


@st.composite
def conversations(draw: st.DrawFn) -> ChatExample:
    """Draw one to three rounds, some with thoughts, some with a call of a function."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    has_thoughts, has_tools = draw(st.booleans()), draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        if has_tools and draw(st.booleans()):
            messages.append({"role": "assistant", "content": "", "tool_calls": [CALL]})
            messages.append({"role": "tool", "content": draw(TEXTS)})
        thought = draw(THOUGHTS) if has_thoughts else None
        answer = draw(TEXTS)
        if thought is not None:
            answer = f"<think>\n{thought}\n</think>\n\n{answer}"
        messages.append({"role": "assistant", "content": answer})
    return ChatExample("line 1", messages, [TOOL] if has_tools else None)


def check_rows(name: str, conversation: ChatExample, folder: Path) -> None:
    """Compare the rows of a conversation with transformers' ids of it, cut after each answer."""
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = TEMPLATES[name]
    template = ChatTemplate(source, tokenizer)
    ignore = () if "tools" in template.variables else ("tools",)
    turns = render_conversation(conversation, template, ignore=ignore)
    rows = encode_turns(turns, tokenizer)
    messages, tools = conversation.messages, None if ignore else conversation.tools

    def ids_of(count: int, asks: bool) -> list[int]:
        return list(
            theirs.apply_chat_template(
                messages[:count],
                tools=tools,
                chat_template=source,
                add_generation_prompt=asks,
                return_dict=False,
            )
        )

    answers = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    assert [turn.number for turn in turns] == answers
    learned = 0
    for turn in turns:
        prompt = ids_of(turn.number, True)
        whole = tokenizer.encode(turn.prompt + turn.answer)
        thought, text = split_thought(messages[turn.number])
        if name != "thoughts stripped, prompt opens one" or not thought:
            assert whole == ids_of(turn.number + 1, False)
        if name != "thoughts stripped, prompt opens one" or thought:
            assert whole[: len(prompt)] == prompt == tokenizer.encode(turn.prompt)
        assert thought in turn.answer
        assert text in turn.answer
        row = next(row for row in rows if row.ids[: len(whole)] == whole)
        start = len(tokenizer.encode(turn.prompt))
        assert row.labels[start : len(whole)] == whole[start:]
        learned += len(whole) - start
    assert sum(label != -100 for row in rows for label in row.labels) == learned
    assert all(label in (id, -100) for row in rows for id, label in zip(*row, strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
@given(conversation=conversations())
@settings(max_examples=8, deadline=None)
def test_rows_equal_transformers(name: str, conversation: ChatExample, folder: Path) -> None:
    check_rows(name, conversation, folder)


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
@given(conversation=conversations())
@settings(max_examples=300, deadline=None)
def test_many_rows_equal_transformers(name: str, conversation: ChatExample, folder: Path) -> None:
    check_rows(name, conversation, folder)


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_named_templates_render_several_turns(name: str, folder: Path) -> None:
    """transformers writes the same text, and every answer is separated from its prompt."""
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(NAMED_TEMPLATES[name], tokenizer)
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "ciao"},
    ]
    turns = render_conversation(ChatExample("line 1", messages), template)
    want = theirs.apply_chat_template(messages, chat_template=template.source, tokenize=False)
    assert turns[-1].prompt + turns[-1].answer == want
    assert ["hello" in turns[0].answer, "ciao" in turns[1].answer] == [True, True]
    assert "be kind" in turns[0].prompt
    assert len(encode_turns(turns, tokenizer)) == 1


def test_lost_parts_are_refused(folder: Path) -> None:
    """What a template leaves out is refused, not silently unlearned."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = ChatTemplate(None, tokenizer)
    hi = {"role": "user", "content": "hi"}
    cases = [
        ({"content": "2", "reasoning_content": "add"}, None, "thoughts of message 2"),
        ({"content": "", "tool_calls": [CALL]}, None, "tool calls of message 2"),
        ({"content": "2", "train": False}, None, "the field 'train'"),
        ({"content": "2", "weight": 0.5}, None, "weight=0.5"),
        ({"content": "2"}, [TOOL], "--data.ignore tools"),
    ]
    for message, tools, text in cases:
        conversation = ChatExample("line 1", [hi, {"role": "assistant", **message}], tools)
        with pytest.raises(DataError, match=text):
            render_conversation(conversation, plain)
    unknown = ChatExample("line 1", [hi, {"role": "assistant", "content": "2"}], None, {"a": 1})
    with pytest.raises(DataError, match=r"line 1 has the fields a, .*--data.ignore a"):
        render_conversation(unknown, plain)
    assert render_conversation(unknown, plain, ignore=("a",))


def test_roles_without_effect_are_refused(folder: Path) -> None:
    """A role that the template omits, or a role in the wrong case, is an error in its message."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    omits = ChatTemplate(
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }};{% endif %}"
        "{% endfor %}",
        tokenizer,
    )
    copies = ChatTemplate(TEMPLATES["plain ChatML"], tokenizer)
    answer = {"role": "assistant", "content": "yes"}
    user = {"role": "user", "content": "a"}
    for role, template, is_refused in (
        ("system", omits, True),
        ("critic", omits, True),
        ("User", copies, True),
        ("critic", copies, False),
        ("system", copies, False),
    ):
        for first in (user, {"role": role, "content": "b"}):  # the role may come later
            chat = ChatExample("line 1", [first, {"role": role, "content": "b"}, user, answer])
            if is_refused:
                number = 2 if first is user else 1
                words = f"line 1: message {number} has the role '{role}'"
                with pytest.raises(DataError, match=words):
                    render_conversation(chat, template)
            else:
                assert "b" in render_conversation(chat, template)[0].prompt


def test_names_of_messages(folder: Path) -> None:
    """Names that the template omits are refused; the name of a tool or a tool call is no use."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    call_only = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    users = call_only.replace(
        "{{ m.content", "{% if m.role != 'system' %}{{ m.name }}{% endif %}{{ m.content"
    )
    reply = {"role": "assistant", "content": "yes"}
    for role in ("system", "user", "assistant"):
        named = {"role": role, "name": "bob", "content": "hi"}
        messages = (
            [named, reply] if role == "user" else [{"role": "user", "content": "a"}, named, reply]
        )
        if role == "system":
            messages = [named, {"role": "user", "content": "a"}, reply]
        conversation = ChatExample("line 1", messages)
        for source in (call_only, TEMPLATES["plain ChatML"]):
            template = ChatTemplate(source, tokenizer)
            with pytest.raises(DataError, match=rf"'name'.*role '{role}'.*--data.ignore name"):
                render_conversation(conversation, template)
            assert render_conversation(conversation, template, ignore=("name",))
        if role != "system":
            (turn, *_) = reversed(render_conversation(conversation, ChatTemplate(users, tokenizer)))
            assert "bob" in turn.prompt
    tool = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "x"},
        reply,
    ]
    template = ChatTemplate(users, tokenizer)
    want = render_conversation(ChatExample("line 1", tool), template)
    assert "tool:weather" in want[-1].prompt
    assert render_conversation(ChatExample("line 1", tool), template, ignore=("name",)) == want
    assert render_conversation(ChatExample("line 1", tool), ChatTemplate(call_only, tokenizer))


def test_template_variables_reach_the_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(TEMPLATES["thoughts of the last answer alone"], tokenizer)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "2"}]
    for fields in (
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        (turn,) = render_conversation(ChatExample("line 1", messages, None, fields), template)
        assert turn.prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ("{% set first = messages[0].role %}", []),
        (
            "{% if 'user' not in messages | map(attribute='role') %}"
            "{{ raise_exception('no user') }}{% endif %}",
            [{"role": "system", "content": "be kind"}],
        ),
    ],
)
def test_an_answer_without_context_is_context(
    source: str, start: list[dict[str, str]], folder: Path
) -> None:
    """A greeting before which nothing can be rendered is in the prompt of the next answer."""
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(source + TEMPLATES["plain ChatML"], tokenizer)
    messages = [
        *start,
        {"role": "assistant", "content": "welcome"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]
    untrained: list[str] = []
    turns = render_conversation(ChatExample("line 1", messages), template, untrained=untrained)
    assert untrained == ["line 1"]
    (row,) = encode_turns(turns, tokenizer)
    want = theirs.apply_chat_template(messages, chat_template=template.source, return_dict=False)
    assert row.ids == list(want)
    assert tokenizer.decode([x for x in row.labels if x != -100]) == "yes<|im_end|>\n"

    with pytest.raises(DataError, match="line 2: the chat template cannot render"):
        render_conversation(
            ChatExample("line 2", messages),
            ChatTemplate("{{ raise_exception('no') }}", tokenizer),
        )


def test_weights_and_the_last_answer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(TEMPLATES["plain ChatML"], tokenizer)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "wrong", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "right", "weight": 1},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "last"},
    ]
    conversation = ChatExample("line 1", messages)
    for answers, want in (
        ("all", "right<|im_end|>\nlast<|im_end|>\n"),
        ("last", "last<|im_end|>\n"),
    ):
        (row,) = encode_turns(render_conversation(conversation, template, answers), tokenizer)
        assert tokenizer.decode([label for label in row.labels if label != -100]) == want


RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "parts": (
        {"messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "yo"}]},
        ]},
        "user:hi assistant:yo",
    ),
    "prompt and completion": ({"prompt": "hi", "completion": "yo"}, "user:hi assistant:yo"),
    "messages as prompt": (
        {"prompt": [{"role": "user", "content": "hi"}],
         "completion": [{"role": "assistant", "content": "yo"}]},
        "user:hi assistant:yo",
    ),
    "Firefly": ({"kind": "NLI", "input": "hi", "target": "yo"}, "user:hi assistant:yo"),
    "exchanges": (
        {"conversation": [{"human": "hi", "assistant": "yo"}, {"human": "a", "assistant": "b"}]},
        "user:hi assistant:yo user:a assistant:b",
    ),
    "XTuner": (
        {"conversation": [{"system": "be", "input": "hi", "output": "yo"}]},
        "system:be user:hi assistant:yo",
    ),
    "question and answer": ({"question": "hi", "answer": "yo"}, "user:hi assistant:yo"),
    "dolly": (
        {"instruction": "hi", "context": "x", "response": "yo"}, "user:hi\nx assistant:yo",
    ),
    "calls": (
        {"messages": [
            {"role": "developer", "content": "be"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function",
                 "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
            {"role": "assistant", "content": "yo"},
        ], "functions": [{"name": "f"}]},
        "system:be user:hi assistant:f{'a': 1} tool:x assistant:yo",
    ),
    "ShareGPT's calls": (
        {"system": "be", "tools": "[{\"name\": \"f\"}]", "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"a\": 1}}"},
            {"from": "observation", "value": "x"},
            {"from": "gpt", "value": "yo"},
        ]},
        "system:be user:hi assistant:f{'a': 1} tool:x assistant:yo",
    ),
}  # fmt: skip


def describe(conversation: ChatExample) -> str:
    """Write a conversation in one line."""
    return " ".join(
        f"{m['role']}:{m['content']}"
        + "".join(f"{c['function']['name']}{c['function']['arguments']}" for c in m["tool_calls"])
        if "tool_calls" in m
        else f"{m['role']}:{m['content']}"
        for m in conversation.messages
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
@pytest.mark.parametrize("name", RECORDS)
def test_forms_and_encodings(name: str, encoding: str, tmp_path: Path) -> None:
    record, want = RECORDS[name]
    filler = {
        "prompt": "请用中文回答这个问题，谢谢。" * 4,
        "completion": "好的，我们现在就开始学习。" * 4,
    }
    lines = "\n".join(json.dumps(r, ensure_ascii=False) for r in (record, filler))
    (tmp_path / "a.jsonl").write_bytes(lines.encode(encoding))
    found, other = read_conversations(tmp_path / "a.jsonl")
    assert describe(found) == want
    assert other.messages[0]["content"] == filler["prompt"]
    if "f{" in want:
        assert found.tools == [{"type": "function", "function": {"name": "f"}}] or found.tools == [
            {"name": "f"}
        ]


@pytest.mark.parametrize("name", RECORDS)
def test_parquet_and_folders(name: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    record, want = RECORDS[name]
    table = pyarrow.Table.from_pylist([record, record])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.json").write_text(json.dumps([record]))
    (tmp_path / "notes.txt").write_text("not read")
    assert [describe(c) for c in read_conversations(tmp_path)] == [want] * 3


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".csv", ";"), (".tsv", "\t")])
def test_tables_of_conversations(suffix: str, delimiter: str, tmp_path: Path) -> None:
    """Python's writer quotes; columns are those of records, and a list of messages is JSON."""
    long = 'a, b; c\td "quoted"\n' * 20_000  # more than csv's usual limit
    answers = [{"role": "user", "content": "q"}, {"role": "assistant", "content": long}]
    for name, rows in {
        "pairs": [("prompt", "completion"), ("q", long)],
        "chats": [("messages",), (json.dumps(answers),)],
    }.items():
        with (tmp_path / f"{name}{suffix}").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)
        (read,) = read_conversations(tmp_path / f"{name}{suffix}")
        assert read.messages == answers
    for text, problem in {
        "prompt,completion\na\n": "has 1 values, but the header has 2",
        "a,a\n1,2\n": "distinct column names",
        'prompt,completion\n"a"b,c\n': "not a valid table row",
    }.items():
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(DataError, match=problem):
            read_conversations(tmp_path / "bad.csv")


def test_folders_saved_by_datasets(tmp_path: Path) -> None:
    """The files that state.json lists, but no cache; several splits are not joined."""
    pyarrow = pytest.importorskip("pyarrow")
    record, want = RECORDS[next(iter(RECORDS))]
    table = pyarrow.Table.from_pylist([record, record])
    for split in ("train", "test"):
        folder = tmp_path / split
        folder.mkdir()
        for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
            with (
                pyarrow.OSFile(str(folder / name), "wb") as file,
                pyarrow.ipc.new_stream(file, table.schema) as writer,
            ):
                writer.write_table(table)
        (folder / "dataset_info.json").write_text("{}")
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (folder / "state.json").write_text(json.dumps(state))
    assert [describe(c) for c in read_conversations(tmp_path / "train")] == [want] * 2
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"has the splits train, test. Pass one of them"):
        read_conversations(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert len(read_conversations(tmp_path)) == 2
    state = {**state, "_indices_data_files": [{"filename": "indices.arrow"}]}
    (tmp_path / "test" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="flatten_indices"):
        read_conversations(tmp_path)


def test_exchanges_of_other_fields_are_refused(tmp_path: Path) -> None:
    for turn in ({"human": "a"}, {"human": "a", "assistant": "b", "score": 1}, "a"):
        write_jsonl(tmp_path / "a.jsonl", [{"conversation": [turn]}])
        with pytest.raises(DataError, match="a turn of 'conversation' is"):
            read_conversations(tmp_path / "a.jsonl")
    write_jsonl(tmp_path / "a.jsonl", [{"conversation": [{"human": "a", "assistant": 1}]}])
    with pytest.raises(DataError, match="assistant=1 must be a string"):
        read_conversations(tmp_path / "a.jsonl")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the file .*nofile.jsonl"):
        read_conversations(tmp_path / "nofile.jsonl")
    with pytest.raises(DataError, match="contains no conversation file"):
        read_conversations(tmp_path)
    (tmp_path / "dpo.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    with pytest.raises(DataError, match="preference data"):
        read_conversations(tmp_path / "dpo.jsonl")


def test_pipes_are_refused(tmp_path: Path) -> None:
    """A named pipe, and with it /dev/stdin, is not called a folder."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for read in (read_conversations, read_preferences, partial(make_task, ["a", "b"])):
        with pytest.raises(DataError, match=r"input '.*pipe.jsonl' is a pipe or a device"):
            read(pipe)


def test_several_templates_are_joined(folder: Path, tmp_path: Path) -> None:
    """With tools transformers renders by the template named tool_use."""
    write_bpe(tmp_path / "several")
    file = tmp_path / "several" / "tokenizer_config.json"
    named = {"default": TEMPLATES["no end mark"], "tool_use": TEMPLATES["plain ChatML"]}
    config = json.loads(file.read_text())
    config["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    file.write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "several")
    template = ChatTemplate(
        find_template(tmp_path / "several"), AutoTokenizer.from_pretrained(folder)
    )
    for tools in (None, [TOOL]):
        messages = [{"role": "user", "content": "hi"}]
        want = theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert template.render(messages, True, tools) == want
