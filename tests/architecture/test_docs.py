"""The words around the code tell the truth: commands parse, links resolve, examples run."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bmforge
from bmforge.cli import main, parse
from bmforge.models.hub import find_preset
from bmforge.parallel import shutdown_distributed

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if not page.name.startswith(".")
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Pages all of whose examples are run; of the others the first one is.
RUNS_WHOLE = {"docs/changes.md"}
COMMENT = re.compile(r"\s*#.*")
PINNED = {
    "bmforge.models": "AutoModel GPT2 GPT2Config Llama LlamaConfig init_weights_ load_weights_",
    "bmforge.parallel": "Layout init_distributed parallelize",
    "bmforge.train": "Trainer save_checkpoint load_checkpoint",
    "bmforge.infer": "generate",
}


# Models that the pages start from: where, and of which kind they are.
STARTS = {
    "google-bert/bert-base-uncased": "bert-base-uncased",
    "google/t5-v1_1-small": "t5-v1_1-small",
    "meta-llama/Llama-3.2-1B": "llama-3.2-1b",
    "google/vit-base-patch16-224-in21k": "vit-base-patch16-224-in21k",
    "openbmb/cpm-bee-1b": "cpm-bee-1b",
    "models/cpm-ant": "cpm-ant-10b",
    "models/eva2.0-base": "eva2.0-base",
}


class ParsedError(Exception):
    """A command line was understood; nothing was run."""


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text("utf-8")) if kind == language]


def command_lines(text: str) -> list[list[str]]:
    """Commands of a shell block or script, split into words, without comments and prompts."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def inline_commands(page: Path) -> list[list[str]]:
    """Commands that the running text shows in backquotes: with an option, or of make."""
    prose = FENCE.sub("", page.read_text("utf-8"))
    spans = re.findall(r"`((?:bmforge [^`]*--|make )[^`]+)`", prose)
    return [shlex.split(span) for span in spans]


def bmforge_arguments(words: list[str]) -> list[str] | None:
    """What follows `bmforge`, or `-m bmforge` under torchrun; None for any other command."""
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
    for page in PAGES:
        for body in blocks(page, "toml"):
            name = re.match(r"# (\S+\.toml)\n", body)
            assert name, f"{page.name}: a TOML block does not begin with its name, '# name.toml'"
            file = place / name[1]
            told_before = COMMENT.sub("", file.read_text("utf-8")) if file.exists() else None
            assert told_before in (None, COMMENT.sub("", body)), f"two kinds of {name[1]}"
            file.write_text(body, encoding="utf-8")
    for name, preset in STARTS.items():
        write_tiny(place / name, preset)
    return place


def write_tiny(folder: Path, preset: str) -> None:
    """A model of a preset's family that is small, for pages to start from."""
    family, sizes = find_preset(preset)
    heads = {"num_heads": 2, "num_kv_heads": 0, "head_dim": 16}
    wide = {"hidden_size": 32, "intermediate_size": 0, "num_layers": 1, **heads}
    text = {} if family.family_traits.has_images else {"vocab_size": 64}
    small = {"intermediate_size": 48, "mask_modules": (), "num_buckets": 16}
    kept = {n: v for n, v in small.items() if hasattr(sizes, n)}
    family.from_config(sizes.replace(**{**wide, **text, **kept})).save_pretrained(folder)


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
                assert (ROOT / "benchmarks" / f"{name}.py").is_file(), f"{page}: NAME={name}"
        for word in words:
            if word.startswith(("examples/", "benchmarks/")) and word.endswith(".py"):
                assert (ROOT / word).is_file(), f"{page}: {word}"


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
    targets = LINK.findall(FENCE.sub("", page.read_text("utf-8")))
    local = [target for target in targets if "://" not in target and not target.startswith("#")]
    missing = [t for t in local if not (page.parent / t.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize(
    "page", ["README.md", "docs/models.md", "docs/generation.md", "docs/changes.md"]
)
def test_python_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The examples of the page are run as they stand, in an empty directory; they are tiny."""
    monkeypatch.chdir(tmp_path)
    count = None if page in RUNS_WHOLE else 1
    try:
        for body in blocks(ROOT / page, "python")[:count]:
            exec(compile(body, page, "exec"), {"__name__": "example"})
    finally:
        shutdown_distributed()
    assert capsys.readouterr().out.strip()
    if page == "README.md":
        config = json.loads((tmp_path / "tiny-gpt2" / "config.json").read_text("utf-8"))
        assert (config["model_type"], config["n_embd"]) == ("gpt2", 64)


def test_both_readmes_say_the_same() -> None:
    """Equal headings by level, equal code apart from comments, and each links the other."""
    english, chinese = ROOT / "README.md", ROOT / "README-ZH.md"

    def outline(page: Path) -> list[int]:
        prose = FENCE.sub("", page.read_text("utf-8"))
        return [len(marks) for marks in re.findall(r"^(#+) ", prose, re.M)]

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
    """Package, project file, changelog and citation."""
    version = bmforge.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text("utf-8")
