"""Text files line by line: what breaks a line, and what is a character of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bmforge.data.sources.conversations import read_conversations
from bmforge.data.sources.text_files import read_lines, read_text
from bmforge.data.tasks.pairs import AG_NEWS
from bmforge.errors import DataError
from bmforge.recipes.dialogue import _read_dialogues


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0c", "\x1c"])
def test_rare_line_breaks_are_characters(character: str, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text(f"hi\tye{character}s\n\nmore\tthen\n", encoding="utf-8")
    assert read_lines(file) == [f"hi\tye{character}s", "", "more\tthen"]
    assert _read_dialogues(str(file)) == [["hi", f"ye{character}s"], ["more", "then"]]
    message = {"role": "assistant", "content": f"a{character}b"}
    text = json.dumps({"messages": [message]}, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
    assert len(read_conversations(str(file))) == 1
    file.write_text(f'1,"a{character}title","text\nof two lines"\n2,b,c\n', encoding="utf-8")
    fields = [example.fields for example in AG_NEWS.read(file)]
    assert fields[0] == {"title": f"a{character}title", "text": "text\nof two lines"}
    assert len(fields) == 2


def test_marks_and_line_ends_of_other_systems(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert (read_text(file), read_lines(file)) == ("one\ntwo", ["one", "two"])
    file.write_bytes(b"\xff\xfe")
    for path in (file, tmp_path / "nothing"):
        with pytest.raises(DataError, match="UTF-8"):
            read_lines(path)
