"""The words around the code tell the truth: commands parse, links resolve, names are there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_places import toml_files
from page_starts import STARTS, write_speech, write_tiny, write_vision
from pages import FENCE, PAGES, ROOT, blocks, command_lines, inline_commands, prose

import bmforge
from bmforge.cli import main, parse, train

LINK = re.compile(r"\]\(([^)\s]+)\)")
TEXT_SUFFIXES = {"", ".c", ".md", ".py", ".toml", ".txt", ".yml"}
PINNED = {
    "bmforge.models": "AutoModel GPT2 GPT2Config Llama LlamaConfig init_weights_ load_weights_",
    "bmforge.parallel": "Layout init_distributed parallelize",
    "bmforge.train": "Trainer save_checkpoint load_checkpoint",
    "bmforge.infer": "generate",
}


class ParsedError(Exception):
    """A command line was understood; nothing was run."""


def bmforge_arguments(words: list[str]) -> list[str] | None:
    """What follows `bmforge`, or `-m bmforge` under torchrun; None for any other command."""
    words = words[: words.index(">")] if ">" in words else words  # the shell's redirection
    if words[0] == "bmforge":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "bmforge":
        return words[words.index("-m") + 2 :]
    return None


def all_commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in blocks(page, "bash"):
            for words in command_lines(block):
                yield page.name, words
        for words in inline_commands(page):
            yield page.name, words
    for words in command_lines((ROOT / ".ci" / "run").read_text("utf-8")):
        yield ".ci/run", words


BMFORGE = sorted(
    {
        (page, *arguments)
        for page, words in all_commands()
        if (arguments := bmforge_arguments(words))
    }
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every TOML file that the pages show, under the name in its first line."""
    place = tmp_path_factory.mktemp("docs")
    for name, body in toml_files().items():
        (place / name).write_text(body, encoding="utf-8")
    for name, preset in STARTS.items():
        write_tiny(place / name, preset)
    write_vision(place)
    write_speech(place)
    return place


@pytest.mark.parametrize("line", BMFORGE, ids=" ".join)
def test_every_command_line_parses(
    line: tuple[str, ...], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real parsers take it; the run itself is cut off."""
    parse_options = parse.parse_options

    def parse_only(*args: Any, **kwargs: Any) -> None:
        raise ParsedError(parse_options(*args, **kwargs))

    monkeypatch.chdir(workplace)
    monkeypatch.setattr(parse, "parse_options", parse_only)
    # It checks that data files exist, which only the commands of the pages write.
    monkeypatch.setattr(train, "check_arguments", lambda task, arguments: None)
    arguments = [word for word in line[1:] if word not in ("...", "RECIPE", "TASK", "NAME")]
    try:
        status = main(arguments)
    except ParsedError:
        return
    except SystemExit as stop:  # --help
        status = stop.code  # type: ignore[assignment]
    assert status == 0


@pytest.mark.parametrize("line", ["train gpt2-pretrain --data.pahts x", "train gpt3-pretrain"])
def test_a_wrong_command_line_would_be_seen(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The test above can fail: a misspelt option or recipe is refused."""
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    assert status == 2
    assert capsys.readouterr().err


def test_make_targets_and_scripts_exist() -> None:
    """What the pages tell people to run is there."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for page, words in all_commands():
        if words[0] == "make":
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= targets, f"{page}: {' '.join(words)}"
            for name in (word[5:] for word in words if word.startswith("NAME=")):
                assert is_benchmark(f"benchmarks.{name}"), f"{page}: NAME={name}"
        for word in words:
            if word.startswith("examples/") and word.endswith(".py"):
                assert (ROOT / word).is_file(), f"{page}: {word}"


def is_benchmark(name: str) -> bool:
    """Return True for a path, a folder as a package, or a module with or without an attribute."""
    if "/" in name:
        return (ROOT / name).exists()
    path = ROOT / name.replace(".", "/")
    modules = (path.with_suffix(".py"), path.parent.with_suffix(".py"))
    return path.is_dir() or any(module.is_file() for module in modules)


def test_benchmarks_that_files_name_exist() -> None:
    """Pages, code, comments and build files name benchmarks as files or as modules."""
    named = re.compile(r"(?<!torchtitan )\bbenchmarks(?:/[\w./-]*\w|(?:\.[a-z_]\w*)+)")
    files = [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    for folder in ("benchmarks", "bmforge", "dev", "examples", "tests", ".ci", ".github"):
        paths = (ROOT / folder).rglob("*")
        files += [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in named.findall(file.read_text("utf-8"))
        if not is_benchmark(name)
    ]
    assert not missing
    wrong = [f"benchmarks{name}" for name in ("/missing.py", ".training.missing")]
    assert named.findall(" ".join(wrong)) == wrong
    assert not any(map(is_benchmark, wrong))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile_and_import(page: Path) -> None:
    """They are valid Python, and what they import from bmforge exists."""
    for number, body in enumerate(blocks(page, "python")):
        tree = ast.parse(body, f"{page.name}, python block {number}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bmforge"):
                module = importlib.import_module(node.module or "")
                missing = [a.name for a in node.names if not hasattr(module, a.name)]
                assert not missing, f"{page.name}: {node.module} has no {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    """A link without a scheme names a file that is there."""
    targets = LINK.findall(prose(page))
    local = [target for target in targets if "://" not in target and not target.startswith("#")]
    missing = [t for t in local if not (page.parent / t.partition("#")[0]).exists()]
    assert not missing


def test_pages_that_the_code_names_exist() -> None:
    """Docstrings and messages name pages by their path from the root."""
    named = re.compile(r"\bdocs/[\w/-]+\.md\b(?! of ggml)")
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("bmforge", "dev", "examples", "tests")
        for file in (ROOT / folder).rglob("*.py")
        for name in named.findall(file.read_text("utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert not missing


def test_both_readmes_say_the_same() -> None:
    """Equal headings by level, equal code apart from comments, and each links the other."""
    english, chinese = ROOT / "README.md", ROOT / "README-ZH.md"

    def outline(page: Path) -> list[int]:
        return [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.M)]

    def code(page: Path) -> list[tuple[str, str]]:
        found = FENCE.findall(page.read_text("utf-8"))
        return [(kind, re.sub(r"\s*#.*", "", body)) for kind, body in found]

    def links(page: Path) -> list[str]:
        return LINK.findall(page.read_text("utf-8"))

    assert outline(english) == outline(chinese)
    assert code(english) == code(chinese)
    assert set(links(english)) - {chinese.name} == set(links(chinese)) - {english.name}
    assert chinese.name in links(english)
    assert english.name in links(chinese)


@pytest.mark.parametrize("module", PINNED)
def test_the_pinned_surface_imports(module: str) -> None:
    """Other people's programs rely on these names."""
    public = importlib.import_module(module)
    for name in PINNED[module].split():
        assert hasattr(public, name), f"{module} has no {name}"
        assert name in public.__all__


def test_the_version_is_the_same_everywhere() -> None:
    """The package, from which the project file reads it, the changelog and the citation."""
    version = bmforge.__version__
    assert 'path = "bmforge/__init__.py"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text("utf-8")
