"""Reward functions: results of verifiers and users' functions, and functions that misbehave."""

from __future__ import annotations

import json
import math
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bmforge.align.reward_names import name_rewards, read_weight
from bmforge.align.rewards import RewardProcess, open_rewards
from bmforge.align.verifiers import make_verifier
from bmforge.errors import ConfigError

FILE = """
import asyncio, os, threading

print("imported")

def length(completions, **kwargs):
    print("scoring", len(completions))
    return [float(len(c)) for c in completions]

def matches(prompts, completions, completion_ids, answer):
    return [1.0 if c == a else None for c, a in zip(completions, answer)]

async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return [2 for _ in completions]

def hangs(completions, **kwargs):
    threading.Event().wait()

def raises(completions, **kwargs):
    raise ValueError("no such column")

def dies(completions, **kwargs):
    os._exit(3)

def exits(completions, **kwargs):
    raise SystemExit(1)

def short(completions, **kwargs):
    return [1.0]

def strange(completions, **kwargs):
    return [float("nan"), float("inf"), None, "1.0", 3][: len(completions)]

def nothing(completions, **kwargs):
    return None
"""

BATCH = {
    "prompts": ["a", "a", "b", "b", "b"],
    "completions": ["1", "22", "333", "x", ""],
    "completion_ids": [[1], [2, 2], [3, 3, 3], [4], []],
    "answer": ["1", "2", "333", "y", None],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rewards") / "mine.py"
    place.write_text(textwrap.dedent(FILE), encoding="utf-8")
    return place


def test_functions_of_a_file_are_weighed_and_named(file: Path) -> None:
    rewards = open_rewards([f"{file}:length=0.5", f"{file}:matches", f"{file}:later=-2e-1"])
    try:
        found = rewards.score(BATCH)
    finally:
        rewards.close()
    assert rewards.weights == [0.5, 1.0, -0.2]
    assert found == {
        "length": [1.0, 2.0, 3.0, 1.0, 0.0],
        "matches": [1.0, None, 1.0, None, None],
        "later": [2.0] * 5,
    }
    assert set(rewards.failures.values()) == {0}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hangs", [None] * 5),
        ("raises", [None] * 5),
        ("dies", [None] * 5),
        ("exits", [None] * 5),
        ("short", [None] * 5),
        ("nothing", [None] * 5),
        ("strange", [None, None, None, None, 3.0]),
    ],
)
def test_a_function_that_misbehaves_gives_no_reward_and_is_counted(
    file: Path, name: str, wanted: list[float | None], caplog: pytest.LogCaptureFixture
) -> None:
    rewards = open_rewards([f"{file}:{name}", f"{file}:length"], timeout_s=20)
    rewards._timeout_s = 0.2 if name == "hangs" else 20
    try:
        for call in (1, 2):  # the run goes on, with a new process if need be
            found = rewards.score(BATCH) if name != "hangs" else _score_slowly(rewards)
            assert found[name] == wanted
            assert found["length"] == [1.0, 2.0, 3.0, 1.0, 0.0]
            assert rewards.failures == {name: call, "length": 0}
    finally:
        rewards.close()


def _score_slowly(rewards: Any) -> Any:
    """Score with a short limit for the first function alone: the second may need longer."""
    sources = dict(rewards._sources)
    found = {}
    for name, limit in (("hangs", 0.2), ("length", 20)):
        process = sources[name]
        if process._process is None:
            process._start(20)
        rewards._timeout_s = limit
        found[name] = rewards._score(name, BATCH, 5)[0]
    return found


def test_functions_of_this_process_may_hang_and_raise() -> None:
    def hangs(completions: list[str], **_: Any) -> list[float]:
        threading.Event().wait()
        return []

    async def counts(completions: list[str], **_: Any) -> list[float]:
        return [float(len(c)) for c in completions]

    def raises(**_: Any) -> list[float]:
        raise KeyError("x")

    rewards = open_rewards([hangs, counts, raises], timeout_s=0.2)
    found = rewards.score(BATCH)
    assert found["hangs"] == found["raises"] == [None] * 5
    assert found["counts"] == [1.0, 2.0, 3.0, 1.0, 0.0]
    assert rewards.failures == {"hangs": 1, "counts": 0, "raises": 1}


@contextmanager
def _server(answer: Any) -> Iterator[str]:
    calls = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            calls.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(answer(calls[-1])).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_gets_the_batch_and_gives_rewards() -> None:
    answers = [lambda b: {"rewards": [len(c) for c in b["completions"][:4]] + [None]}, lambda b: {}]
    wanted = [[1.0, 2.0, 3.0, 1.0, None], [None] * 5]
    for answer, expected in zip(answers, wanted, strict=True):
        with _server(answer) as address:
            rewards = open_rewards([address])
            try:
                assert list(rewards.score(BATCH).values()) == [expected]
            finally:
                rewards.close()
    assert list(rewards.failures.values()) == [1]


@pytest.mark.parametrize(
    ("kind", "answer", "right", "wanted"),
    [
        ("exact", " 42\n", "42", 1.0),
        ("exact", "42.", "42", 0.0),
        ("exact", "42", 42, 1.0),
        ("exact", "42", None, None),
        ("number", "It is 1,234.50.", 1234.5, 1.0),
        ("number", "3 + 4 = 7", "7", 1.0),
        ("number", "7 or 8", "#### 7", 0.0),
        ("number", "-2", 2, 0.0),
        ("number", "no idea", 2, 0.0),
        ("number", "0.10", "0.1", 1.0),
        ("number", "2e3", 2000, 1.0),
        ("choice", "The answer is (b).", "B", 1.0),
        ("choice", "A, no: C", "A", 0.0),
        ("choice", "Because", "B", 0.0),
        ("choice", "", "B", 0.0),
    ],
)
def test_verifiers_compare_with_a_column(kind: str, answer: str, right: Any, wanted: Any) -> None:
    reward = make_verifier(kind, "right")
    assert reward(completions=[answer], right=[right]) == [wanted]
    message = [{"role": "assistant", "content": answer}]
    assert reward(completions=[message], right=[right]) == [wanted]


def test_verifiers_of_form(tmp_path: Path) -> None:
    assert make_verifier("regex", r"^<think>.*</think>")(
        completions=["<think>a\nb</think> c", "c"]
    ) == [1.0, 0.0]
    assert make_verifier("length", "4")(completion_ids=[[1] * n for n in (0, 4, 6, 8, 9)]) == [
        *(1.0, 1.0, 0.5, 0.0, 0.0)
    ]
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "required": ["a"]}')
    found = make_verifier("json_schema", str(schema))(completions=['{"a": 1}', "{}", "{", "[1]"])
    assert found == [1.0, 0.0, 0.0, 0.0]


def test_a_pattern_of_exponential_time_is_stopped() -> None:
    rewards = open_rewards(["regex:^(a+)+$"], timeout_s=20)
    try:
        assert rewards.score({"completions": ["aaa"]}) == {"regex": [1.0]}
        rewards._timeout_s = 0.3
        assert rewards.score({"completions": ["a" * 60 + "b"]}) == {"regex": [None]}
        assert rewards.failures == {"regex": 1}
    finally:
        rewards.close()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing_here", "unknown reward"),
        ("exact", "needs a column"),
        ("exact:", "needs a column"),
        ("no_such_module:f", "cannot be imported"),
        ("missing.py:f", "cannot be imported"),
        ("json:no_function", "has no function"),
        ("regex:(", "not a valid regular expression"),
        ("length:x", "number of tokens"),
        ("exact:answer=nan", "finite"),
        ("dir:model", "open_model=None"),
    ],
)
def test_specifications_are_checked_before_the_run(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_rewards([spec])


def test_a_missing_column_is_named() -> None:
    process = RewardProcess("exact:solution")
    try:
        with pytest.raises(RuntimeError, match="no column 'solution'"):
            process.score(BATCH, 20)
    finally:
        process.close()


def test_weights_follow_the_last_equals_sign() -> None:
    assert read_weight("a:b") == ("a:b", 1.0)
    assert read_weight("regex:x=y") == ("regex:x=y", 1.0)
    assert read_weight("regex:x=2=0.5") == ("regex:x=2", 0.5)
    assert math.isclose(read_weight("a:b=1e-3")[1], 1e-3)


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["dir:runs/a/export", "dir:x/name", "exact:b"], ["a", "name", "exact"]),
        (["dir:/runs/a/export", "dir:b/a/export"], ["runs/a/export", "b/a/export"]),
        (["dir:export", "lib/one.py:score", "two:score"], ["export", "one.score", "two.score"]),
        (["exact:a", "exact:b", "number:b"], ["exact:a", "exact:b", "number"]),
        (["http://h/a", "https://h/b", "http://g/b"], ["h/a", "h/b", "g"]),
        (["m:f", "m:f", "m.f"], ["m.f", "m.f_1", "m.f_2"]),
    ],
)
def test_rewards_of_equal_names_are_told_apart(specs: list[str], names: list[str]) -> None:
    assert name_rewards(specs) == names


def test_failures_name_the_type_the_value_and_the_users_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "def number(completions, **columns):\n"
        "    return 0.5\n"
        "def texts(completions, **columns):\n"
        "    return ['good'] * len(completions)\n"
        "def divides(completions, **columns):\n"
        "    return [1 / (len(c) - len(c)) for c in completions]\n"
    )
    rewards = open_rewards([f"{file}:{name}" for name in ("number", "texts", "divides")])
    try:
        rewards.score(BATCH)
    finally:
        rewards.close()
    text = caplog.text
    assert "the function returned float (expected a list of 5 numbers)" in text
    assert "such as 'good' (expected numbers or None)" in text
    assert f"raised ZeroDivisionError('division by zero') in {file}, line 6" in text


def test_required_arguments_must_be_columns(tmp_path: Path) -> None:
    """Arguments that every call passes, defaults and `**columns` need no column."""
    file = tmp_path / "needs.py"
    file.write_text(
        "def needs(completions, solution, **columns):\n"
        "    return [1.0] * len(completions)\n"
        "def free(prompts, completions, completion_ids, trainer_state, log_extra, log_metric,\n"
        "         level=1, *, more=2, **columns):\n"
        "    return [1.0] * len(completions)\n"
    )

    def local(completions: Any, solution: Any) -> list[float]:
        return [1.0 for _ in completions]

    for needy in (f"{file}:needs", local):
        rewards = open_rewards([f"{file}:free", needy])
        try:
            rewards.check_columns({"solution", "other"})
            name = rewards.names[1]
            words = rf"the function {name} needs the column 'solution' \(columns: answer\)"
            with pytest.raises(ConfigError, match=words):
                rewards.check_columns({"answer"})
        finally:
            rewards.close()
