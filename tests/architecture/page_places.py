"""What the pages' blocks start from: texts, corpora, small models, tasks, each under its name."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from page_starts import PLACES as STARTING
from pages import PAGES, blocks

from bmforge.data import PrepareConfig, prepare
from bmforge.models import Llama, LlamaConfig

COMMENT = re.compile(r"\s*#.*")


def toml_files() -> dict[str, str]:
    """Every TOML file that the pages show, under the name in its first line."""
    found: dict[str, str] = {}
    for page in PAGES:
        for body in blocks(page, "toml"):
            name = re.match(r"# (\S+\.toml)\n", body)
            assert name, f"{page.name}: a TOML block does not begin with its name, '# name.toml'"
            told_before = COMMENT.sub("", found.get(name[1], body))
            assert told_before == COMMENT.sub("", body), f"two kinds of {name[1]}"
            found[name[1]] = body
    return found


def write_texts(place: Path) -> None:
    """A folder of twelve texts that Python carries."""
    (place / "texts").mkdir()
    names = sorted(topics)[:36]
    for number in range(12):
        text = "\n\n".join(textwrap.dedent(topics[name]) for name in names[number::12])
        (place / "texts" / f"text-{number}.txt").write_text(text, encoding="utf-8")


def write_corpus(place: Path) -> None:
    """The corpus of the README's command."""
    if not (place / "texts").exists():
        write_texts(place)
    prepare([place / "texts"], place / "corpus", PrepareConfig(vocab_size=1024))


def write_more(place: Path) -> None:
    """A second corpus, of the first one's tokenizer, as the page's command makes it later."""
    if not (place / "corpus").exists():
        write_corpus(place)
    with contextlib.chdir(place):
        prepare(["texts"], "more", PrepareConfig(tokenizer="corpus/tokenizer"))


def write_topics(place: Path) -> None:
    """Python's help texts, as the pages' command prepares them."""
    prepare(None, place / "topics", PrepareConfig(vocab_size=1024))


def write_export(place: Path) -> None:
    """A Llama in Hugging Face's form."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 3, "num_heads": 2}
    Llama.from_config(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(place / "export")


def write_toml(name: str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        (place / name).write_text(toml_files()[name], encoding="utf-8")

    return write


PLACES: dict[str, Callable[[Path], None]] = {
    **STARTING,
    "texts": write_texts,
    "corpus": write_corpus,
    "more": write_more,
    "topics": write_topics,
    "export": write_export,
    **{name: write_toml(name) for name in toml_files()},
}
