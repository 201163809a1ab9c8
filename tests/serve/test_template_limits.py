"""Chat templates that do not end, or write too much, are stopped; others are as without limits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bmforge.errors import DataError
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, find_template
from bmforge.tokenizers.template_limits import TemplateLimits

LIMITS = TemplateLimits(0.3, 1000)
SAID = [{"role": "user", "content": "天气"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (LOOP, "runs longer than 0.3 s"),
        ("{% for i in range(99999) %}ab{% endfor %}", "longer than 1000 characters"),
        ("{{ messages[0].content * 2000 }}", "longer than 1000 characters"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_is_stopped(source: str, problem: str, model_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    before = sys.gettrace()
    with pytest.raises(DataError, match=problem):
        ChatTemplate(source, tokenizer, LIMITS).render(SAID)
    assert sys.gettrace() is before


def test_others_are_as_without_limits(model_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    source = find_template(model_directory)
    call = {"function": {"name": "add", "arguments": {"a": [1, "天"]}}}
    said = [*SAID, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    written = [
        ChatTemplate(source, tokenizer, limits).render(said, True, tools)
        for limits in (None, LIMITS)
    ]
    assert written[0] == written[1]
    assert '{"name": "add", "arguments": {"a": [1, "天"]}}' in written[0]
    assert '{"type": "function", "function": {"name": "add"}}' in written[0]
