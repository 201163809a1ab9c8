"""Errors for chat records whose fields have other names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bmforge.data.sources.conversation_forms import find_messages
from bmforge.errors import DataError


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"dialog": [{"role": "user", "content": "a"}]}, "Rename 'dialog' to 'messages'"),
        ({"chat": [{"from": "human", "value": "a"}]}, "Rename 'chat' to 'conversations'"),
        ({"messages": [{"speaker": "user", "text": "a"}]}, "has a message {'speaker': 'user'"),
        ({"text": "a", "id": 1}, "here has the fields 'text', 'id' .needed: 'messages'"),
        ([1, 2], r"here is \[1, 2\] .needed"),
    ],
    ids=json.dumps,
)
def test_the_error_names_the_fields(record: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        find_messages(record, "here")
