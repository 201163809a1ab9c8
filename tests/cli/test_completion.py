"""Shell completion: what the shells themselves complete, against the parser's options."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from bmforge.cli import main
from bmforge.cli.commands import COMMANDS
from bmforge.cli.completion import list_words
from bmforge.cli.parse import find_options
from bmforge.cli.train_options import FIELDS

ASK_BASH = """
source "$1"
while IFS= read -r line; do
    IFS=$'\\t' read -r -a COMP_WORDS <<< "$line"
    if [[ $line == *$'\\t' ]]; then COMP_WORDS+=(""); fi
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _bmforge
    echo "${COMPREPLY[*]}"
done
"""
ASK_FISH = """
source $argv[1]
while read -l line
    set -l found (complete -C (string replace -a \\t ' ' -- $line) | string replace -r '\\t.*' '')
    echo "$found"
end
"""


def questions() -> list[list[str]]:
    """Return beginnings of command lines: every subcommand, some beginnings of its options."""
    draw, found = random.Random(0), [["bmforge", ""], ["bmforge", "q"]]
    for path, words in list_words().items():
        line = ["bmforge", *(("conversations" if part == "*" else part) for part in path)]
        found += [[*line, "--"], [*line, "x"]]
        for word in draw.sample(sorted(words), min(4, len(words))):
            found.append([*line, word[: draw.randint(3, len(word))]])
            if isinstance(words[word], tuple):
                found.append([*line, word, ""])
    return found


def right(line: list[str]) -> set[str]:
    """Return the words that complete a line, from the table of commands and options."""
    *before, current = line
    words, path = list_words(), tuple(before[1:])
    value = words.get(path[:-1], {}).get(path[-1]) if path else None
    if isinstance(value, tuple):
        return {word for word in value if word.startswith(current)}
    if path[:1] == ("train",) and len(path) > 1:
        path = ("train", "*")
    options = words[path]
    subcommands = {word for word in options if not word.startswith("--")}
    shown = set(options) if current.startswith("-") else subcommands
    return {word for word in shown if word.startswith(current)}


def ask(shell: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["completion", shell]) == 0
    script, asker = tmp_path / f"bmforge.{shell}", tmp_path / f"ask.{shell}"
    script.write_text(capsys.readouterr().out)
    asker.write_text(program)
    lines = "".join("\t".join(line) + "\n" for line in questions())
    command = [shell, str(asker), str(script)]
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, check=True, cwd=empty
    )
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("shell", "program"), [("bash", ASK_BASH), ("fish", ASK_FISH)])
def test_shells_complete_as_the_parser_reads(
    shell: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    answers = ask(shell, program, tmp_path, capsys)
    asked = questions()
    assert len(answers) == len(asked) > 80
    for line, answer in zip(asked, answers, strict=True):
        # Fish also offers words that have the text in the middle.
        got = {word for word in answer.split() if word.startswith(line[-1])}
        if shell == "fish" and line[-1] == "" and line[1:]:
            got = {word for word in got if not word.startswith("-")}
        assert sorted(got) == sorted(right(line)), line


def test_zsh_reads_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    assert main(["completion", "zsh"]) == 0
    script = tmp_path / "_bmforge"
    script.write_text(capsys.readouterr().out)
    subprocess.run(["zsh", "-n", str(script)], check=True)


def test_every_option_of_the_parser_is_completed() -> None:
    words = list_words()
    assert set(words[()]) == set(COMMANDS)
    for name, command in COMMANDS.items():
        if command.options is not None:
            every = {f"--{option}" for option, _ in find_options(command.options)}
            positional = every - set(words[name,])
            assert set(words[name,]) >= every - positional
            assert len(positional) <= 2
    assert {f"--{name}" for name in FIELDS} <= set(words["train", "*"])
    assert words["plan",]["--precision"] == ("fp32", "bf16", "fp16")
    assert words["plan",]["--json"] == "switch"


def test_an_unknown_shell_is_refused() -> None:
    assert main(["completion", "csh"]) == 2
