"""Rollouts with tools: calls run between turns, ids are kept, results are not trained on."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from bmforge.align.rewards import ToolProcess
from bmforge.align.rollout_batches import RolloutAnswer, collate_answers
from bmforge.align.rollout_config import PromptRow, RolloutConfig
from bmforge.align.tool_schema import describe_function
from bmforge.align.tool_turns import FunctionCall, ToolTurns
from bmforge.data.sources.prompts import PromptRecord
from bmforge.errors import ConfigError, DataError
from bmforge.infer import Completion
from bmforge.models import Llama, LlamaConfig
from bmforge.recipes.inputs.prompt_rows import PromptConfig, encode_prompts
from bmforge.recipes.registry import find_recipe
from bmforge.recipes.rollout_tools import _encode_results, find_calls, open_functions, open_turns
from bmforge.serve.tool_formats import FORMATS
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.train import OptimConfig, TrainConfig, read_metrics

TOOLS = '''
import subprocess
import time

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: first number.
    """
    return a + b

async def later(a: int) -> dict:
    """Return it."""
    return {"a": a}

def fail():
    raise ValueError("no such page")

def hang():
    time.sleep(600)

def run(line: str) -> str:
    return subprocess.run(line, shell=True, capture_output=True, text=True).stdout

def ask() -> str:
    return input()
'''
# Calls have the marks of Hermes; results are messages of the role tool.
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools[0].function.name }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if quiet %}+{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "tools.py").write_text(TOOLS)
    marks = ["<pad>", "</s>", "<unk>", "<tool_call>", "</tool_call>"]
    letters = sorted(set('abcdefghijklmnopqrstuvwxyz_0123456789{}":, +=\n'))
    vocabulary = {token: number for number, token in enumerate([*marks, *letters])}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        max_seq_len=160,
    )
    Llama.from_config(config, seed=0).save_pretrained(folder / "model")
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens(marks[:3])
    fast.add_tokens(marks[3:])
    fast.save(str(folder / "model" / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(roles))
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1"}], "sum": n + 1} for n in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_schemas_are_those_of_signature_and_docstring() -> None:
    def look(query: str, limit: int | None = None, tags: list[str] = []) -> str:  # noqa: B006
        """Search pages.

        Args:
            query: words to find.
            limit: maximum number of pages.
        """
        return query

    function = describe_function(look)["function"]
    assert (function["name"], function["description"]) == ("look", "Search pages.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "words to find."},
            "limit": {"type": "integer", "description": "maximum number of pages."},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["query"],
    }


def test_functions_run_in_processes_that_a_limit_kills(place: Path) -> None:
    file = place / "tools.py"
    tools = {n: ToolProcess(f"{file}:{n}") for n in ("add", "later", "fail", "hang")}
    try:
        assert tools["add"].call({"a": 2}, 30) == "3"
        assert json.loads(tools["later"].call({"a": 2}, 30)) == {"a": 2}
        with pytest.raises(RuntimeError, match="no such page"):
            tools["fail"].call({}, 30)
        with pytest.raises(RuntimeError, match="unexpected keyword"):
            tools["add"].call({"c": 2}, 30)
        with pytest.raises(TimeoutError):
            tools["hang"].call({}, 0.2)
        assert tools["add"].call({"a": 2, "b": 5}, 30) == "7"
    finally:
        for tool in tools.values():
            tool.close()


def test_programs_of_a_function_neither_read_calls_nor_outlive_the_limit(
    place: Path, tmp_path: Path
) -> None:
    file = place / "tools.py"
    tools = {name: ToolProcess(f"{file}:{name}") for name in ("run", "ask")}
    try:
        assert tools["run"].call({"line": "cat; echo done"}, 30) == "done\n"
        with pytest.raises(RuntimeError, match="EOFError"):
            tools["ask"].call({}, 30)
        with pytest.raises(TimeoutError):
            tools["run"].call({"line": f"echo $$ > {tmp_path}/pid; sleep 600"}, 2)
        number = int((tmp_path / "pid").read_text())
        for _ in range(100):
            status = Path(f"/proc/{number}/stat")
            if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.05)
        else:
            pytest.fail("the program of the function is still running")
    finally:
        for tool in tools.values():
            tool.close()


SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}}}
UNREAD = ("", None)


@pytest.mark.parametrize(
    ("form", "text", "content", "wanted"),
    [
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            "",
            [("add", {"a": 1})],
        ),
        (
            "hermes",
            'x <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
            '<tool_call>{"name": "add", "arguments": "[2]"}</tool_call>',
            "x",
            [("add", {"a": 1}), ("add", None)],
        ),
        ("hermes", "no call", "no call", []),
        ("hermes", "<tool_call>{broken</tool_call>", "", [UNREAD]),
        (
            "hermes",
            '<tool_call>{"name": "other", "arguments": {}}</tool_call><tool_call>{',
            "",
            [("other", {}), UNREAD],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
            "",
            [("add", {"a": 1})],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=other><parameter=a>1</parameter></function></tool_call>",
            "",
            [("other", {"a": 1})],
        ),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_json", '<|python_tag|>{"name": "Bob"}', "", [("Bob", {})]),
        ("llama3_json", "plain", "plain", []),
    ],
)
def test_calls_are_read(form: str, text: str, content: str, wanted: list[Any]) -> None:
    """Between delimiters, everything is a call; a JSON answer is one if its function exists."""
    found = find_calls(FORMATS[form], SCHEMAS, text)
    assert found == (content, [FunctionCall(*call) for call in wanted])


def test_results_are_written_as_the_template_writes_them(place: Path) -> None:
    """Ids of prompt, answer and results are those of the whole conversation, the end once."""
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    template = ChatTemplate(TEMPLATE, tokenizer)
    user, answer = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "abc"}
    result = {"role": "tool", "name": "add", "content": "2"}
    written = [*tokenizer.encode_chat("abc"), tokenizer.eos_id]
    encode = partial(_encode_results, tokenizer, template, frozenset([tokenizer.eos_id]))
    prompt = template.encode([user])[1]
    assert [*prompt, *written, *encode([result], 1, {})] == template.encode([user, answer, result])[
        1
    ]
    # Variables of the prompt apply to all turns, as in enable_thinking=False.
    ids = encode([result], 1, {"quiet": True})
    assert ids == [*encode([result], 1, {}), *tokenizer.encode_chat("+")]
    forged = {**result, "name": "a</s>", "content": "2</s>"}
    assert encode([forged], 1, {}).count(tokenizer.eos_id) == 1


class _Writer:
    """Writes the turns of a script and records the prompts."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns, self.prompts = turns, []

    def write_on(self, prompts: Any, seeds: Any, limits: Any) -> list[Completion]:
        self.prompts.append([list(prompt) for prompt in prompts])
        assert len(set(seeds)) == len(seeds)
        ids = [self.turns.pop(0)[:limit] for limit in limits]
        return [_completion(each) for each in ids]


def _completion(ids: list[int]) -> Any:
    class _Token:
        logprob = -1.0

    class _Answer:
        finish_reason = "stop" if ids[-1] == 1 else "length"
        logprobs = [_Token() for _ in ids]  # noqa: RUF012

    _Answer.ids = ids
    return _Answer()


class _Adder:
    def call(self, arguments: Any, timeout_s: float) -> str:
        if arguments["a"] == 9:
            raise TimeoutError("no result after 1 seconds")
        return str(arguments["a"] + 1)

    def close(self) -> None: ...


def _turns(max_turns: int = 3) -> ToolTurns:
    """A turn [7, a, 1] calls add(a), and [4, 1] another one; results are [8, value]."""

    def parse(text: str) -> tuple[str, list[FunctionCall]]:
        words = text.split()
        calls = {"7": [FunctionCall("add", {"a": int(words[1])})], "4": [FunctionCall("no", {})]}
        return "", calls.get(words[0], [])

    def encode(results: Any, last: int, options: Any) -> list[int]:
        assert last == 1
        assert options == {"tools": None}
        return [t for r in results for t in (8, len(r["content"]))]

    def decode(ids: Any) -> str:
        return " ".join(map(str, ids))

    return ToolTurns({"add": _Adder()}, parse, encode, decode, max_turns, 1.0)


ROW = PromptRow((3, 4), [], {}, {"tools": None})


def _answer(ids: list[int]) -> RolloutAnswer:
    return RolloutAnswer(0, [3, 4], list(ids), " ".join(map(str, ids)), [-1.0] * len(ids), "stop")


def test_special_tokens_delimit_calls_but_are_not_in_the_messages() -> None:
    words = {1: "", 6: "a", 7: "<call>", 8: "<pad>", 9: "b"}

    def decode(ids: Any) -> str:
        return "".join(words[n] for n in ids if n not in (7, 8))

    def parse(text: str) -> tuple[str, list[FunctionCall]]:
        content, mark, _ = text.partition("<call>")
        return content, [FunctionCall("add", {"a": 5})] if mark else []

    def encode(results: Any, last: int, options: Any) -> list[int]:
        return [30]

    def decode_special(ids: Any) -> str:
        return "".join(words[n] for n in ids)

    turns = ToolTurns({"add": _Adder()}, parse, encode, decode, 3, 1.0, decode_special)
    answer = _answer([6, 8, 9, 8, 7, 9, 1])
    answer.text = decode(answer.ids)
    turns.continue_answers(
        [answer], [ROW], _Writer([[9, 8, 7, 9, 1], [8, 6, 1]]), 40, lambda n, turn: 0
    )
    contents = [m["content"] for m in answer.messages if m["role"] == "assistant"]
    assert contents == ["ab", "b", "a"]
    assert (answer.tool_calls, answer.tool_failures) == (2, 0)


def test_turns_follow_each_other_and_results_are_masked() -> None:
    answers = [_answer([7, 5, 1]), _answer([6, 1]), _answer([7, 9, 1])]
    writer: Any = _Writer([[7, 2, 1], [5, 1], [6, 6, 1]])
    _turns().continue_answers(answers, [ROW] * 3, writer, 20, lambda index, turn: 10 * index + turn)
    first, second, third = answers
    assert first.ids == [7, 5, 1, 8, 1, 7, 2, 1, 8, 1, 6, 6, 1]
    assert [i for i, w in zip(first.ids, first.is_written, strict=True) if not w] == [8, 1, 8, 1]
    assert second.ids == [6, 1]
    assert (first.tool_calls, second.tool_calls, third.tool_calls) == (2, 0, 1)
    assert (third.tool_failures, third.ids[-2:]) == (1, [5, 1])
    assert writer.prompts[0][0] == [3, 4, 7, 5, 1, 8, 1]
    assert [m["role"] for m in first.messages] == ["assistant", "tool"] * 2 + ["assistant"]
    called = first.messages[0]["tool_calls"][0]
    assert called["function"] == {"name": "add", "arguments": {"a": 5}}
    assert first.messages[1]["tool_call_id"] == called["id"]
    assert first.messages[-1] == {"role": "assistant", "content": "6 6 1"}
    assert third.messages[1]["content"].startswith("error: no result")
    batch = collate_answers(answers, ("sampler",))
    assert batch["labels"][0, 2:15].tolist() == [
        id if own else -100 for id, own in zip(first.ids, first.is_written, strict=True)
    ]
    assert int((batch["labels"] != -100).sum()) == 9 + 2 + 5


@pytest.mark.parametrize(("max_turns", "limit", "calls"), [(2, 20, 1), (3, 5, 1), (3, 20, 2)])
def test_turns_and_tokens_are_limited(max_turns: int, limit: int, calls: int) -> None:
    answers = [_answer([7, 5, 1])]
    writer: Any = _Writer([[7, 2, 1], [7, 3, 1]])
    _turns(max_turns).continue_answers(answers, [ROW], writer, limit, lambda index, turn: turn)
    assert answers[0].tool_calls == calls
    assert len(answers[0].ids) <= limit
    assert answers[0].finish_reason == ("length" if limit == 5 else "stop")


def test_unknown_functions_and_unread_calls_fail() -> None:
    """The model gets the error as the result; a call that cannot be parsed stays text."""
    answers = [_answer([4, 1]), _answer([4, 1])]
    turns = _turns(2)
    turns._parse = lambda text: ("", [FunctionCall("no", {}), FunctionCall("", None)])
    turns.continue_answers(
        answers, [ROW] * 2, _Writer([[6, 1], [6, 1]]), 90, lambda *key: hash(key)
    )
    assert (answers[0].tool_calls, answers[0].tool_failures) == (2, 2)
    assert answers[0].messages[0] == {"role": "assistant", "content": "4 1"}
    assert [m["content"] for m in answers[0].messages[1:3]] == [
        "error: the function 'no' does not exist (functions: add)",
        "error: the call cannot be parsed",
    ]


def test_tools_that_cannot_be_used_are_refused(place: Path, tmp_path: Path) -> None:
    """Functions of equal names, templates without results, and records with other tools."""
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    (tmp_path / "more.py").write_text("def add(a: int) -> int:\n    return a\n")
    file = f"{place / 'tools.py'}:add"
    both = type("Config", (), {"rollout": RolloutConfig(tools=(file, f"{tmp_path}/more.py:add"))})
    template = ChatTemplate(TEMPLATE, tokenizer)
    with pytest.raises(ConfigError, match="several functions 'add'"):
        open_functions(both, template)
    config = type("Config", (), {"rollout": RolloutConfig(tools=(file,))})
    functions = open_functions(config, template)
    text = "{{ m.role }}:{{ m.content }}</s>"
    omits = f"{{% if m.role != 'tool' %}}{text}{{% endif %}}"
    raises = f"{{% if m.role == 'tool' %}}{{{{ raise_exception('no tools') }}}}{{% endif %}}{text}"
    for other, words in ((omits, "does not write results"), (raises, "no tools")):
        source = TEMPLATE.replace(text, other)
        with pytest.raises(ConfigError, match=words):
            open_turns(functions, config, tokenizer, ChatTemplate(source, tokenizer), [1])
    functions["add"].close()
    rows = [PromptRecord("line 1", [{"role": "user", "content": "1"}], tools=[{"name": "find"}])]
    with pytest.raises(DataError, match="describes find, but"):
        encode_prompts(rows, PromptConfig(), tokenizer, template, [functions["add"].schema])


def test_tools_without_conversations_are_refused(place: Path) -> None:
    rollout = RolloutConfig(tools=(f"{place / 'tools.py'}:add",))
    with pytest.raises(ConfigError, match="needs prompts that are conversations"):
        open_functions(type("Config", (), {"rollout": rollout}), None)
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    config = type("Config", (), {"rollout": RolloutConfig(tools=("exact:answer",))})
    with pytest.raises(ConfigError, match="must be module:function"):
        open_functions(config, ChatTemplate(TEMPLATE, tokenizer))


def test_a_run_with_tools(place: Path) -> None:
    """A model that is rewarded for calls makes them; metrics count calls and failures."""
    (place / "reward.py").write_text(
        "def calls(completions, **columns):\n"
        "    assert all(turns[0]['role'] == 'assistant' for turns in completions)\n"
        "    return [float(len(turns)) + len(set(turns[0]['content'])) for turns in completions]\n"
    )
    recipe = find_recipe("rl", str(place / "model"), None, None)
    loop = TrainConfig(steps=2, disable_dropout=True, optim=OptimConfig(lr=1e-2))
    config = recipe.config(
        run_dir=place / "run",
        train=loop,
        data=PromptConfig(
            paths=(str(place / "prompts.jsonl"),),
            seq_len=60,
            global_batch_size=8,
            micro_batch_size=4,
        ),
        rollout=RolloutConfig(
            num_generations=4,
            max_new_tokens=40,
            tools=(f"{place / 'tools.py'}:add",),
        ),
        reward=(f"{place / 'reward.py'}:calls",),
    )
    recipe.run(config)
    rows = read_metrics(place / "run" / "metrics.jsonl")
    assert rows[0]["rewards/calls/failures"] == 0
    assert rows[0]["tools/call_frequency"] >= 0
    logged = (place / "run" / "completions.jsonl").read_text().splitlines()
    assert json.loads(logged[0])["completion"][0]["role"] == "assistant"
