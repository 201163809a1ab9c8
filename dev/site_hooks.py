"""Hooks of MkDocs: pages that are not below docs/, and the language of the Chinese pages.

`make docs` builds the site from `mkdocs.yml`. These hooks add the generated reference, the
changelog, the guide for contributors, the examples and the tests of the capabilities, and redirect
links to them. `mike deploy` builds the same site for a version; its pages then have a menu of
versions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import jieba
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference_pages import render_pages

ROOT = Path(__file__).resolve().parents[1]
# Files of the root that are pages of the site -> path below docs/.
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# Files of Python that are pages of the site: they are linked, but have no place in the menu.
SOURCES = ("examples/*.py", "tests/parity/test_*.py")
# Groups: "](", the target, and its anchor and tooltip.
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?(?: \"\w+\")?)\)")
# Code in a line of text, and blocks of commands.
COMMANDS = re.compile(r'<code>[^<]*</code>|<div class="language-bash highlight">.*?</pre>', re.S)
OPTION = re.compile(r"(?<![\w-])--[\w.-]*\w")
# A line break between two Chinese characters, which a browser would show as a space.
CHINESE_BREAK = re.compile(
    r"(?<=[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef])\n(?=[\u4e00-\u9fff（“])"
)
# A term in the second column of the glossary.
TERM = re.compile(r"^\| [^|]+ \| ([^|]+) \|", re.M)
CHINESE = re.compile(r"[\u4e00-\u9fff]+")
# Weights of pages in the search. Results, API, long tables and the glossary come last. The two
# languages share one index, and a name such as Slurm should find the English page first; Chinese
# words match Chinese pages only.
SEARCH_WEIGHTS = {
    **dict.fromkeys(
        ("results/", "examples/", "changelog", "reference/api/", "reference/capa"), 0.2
    ),
    "migrating/": 0.5,
    "zh/": 0.7,
    "zh/glossary": 0.1,
}


def on_config(config: MkDocsConfig) -> None:
    """Prepare the search; show the menu of versions if mike builds the site."""
    add_search_words()
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike", "default": "latest"}


def add_search_words() -> None:
    """Keep Chinese terms whole in the index if the word splitter would cut off one character.

    The search ignores such a character, and then does not find the term: "去重" as "去" and "重".
    """
    text = (ROOT / "docs" / "zh" / "glossary.md").read_text("utf-8")
    terms = {term for cell in TERM.findall(text) for term in re.split("[、，；]", cell)}
    for term in sorted(filter(CHINESE.fullmatch, terms), key=len):
        if len(term) > 1 and any(len(word) == 1 for word in jieba.lcut(term)):
            jieba.add_word(term)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated or lie outside docs/."""
    pages = render_pages()
    for name, target in ROOT_PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        pages[target] = LINK.sub(lambda m: f"{m[1]}{m[2].removeprefix('docs/')}{m[3]})", text)
    for source in sorted(file for pattern in SOURCES for file in ROOT.glob(pattern)):
        name = source.relative_to(ROOT).as_posix()
        code = f"# {name}\n\n```python\n{source.read_text('utf-8')}```\n"
        hidden = "---\nsearch: {exclude: true}\n---\n\n" if name.startswith("tests/") else ""
        pages[name.removesuffix(".py") + ".md"] = hidden + code
    for notebook in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        pages[f"examples/notebooks/{notebook.name}"] = notebook.read_text("utf-8")
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links out of docs/ to the pages that `on_files` added."""
    source = PurePosixPath(page.file.src_uri)
    for start, weight in SEARCH_WEIGHTS.items():
        if source.as_posix().startswith(start):
            page.meta["search"] = {"boost": weight}
    if source.parts[0] == "zh":
        markdown = CHINESE_BREAK.sub("", markdown)
    up = "../" * len(source.parts)

    def redirect(match: re.Match[str]) -> str:
        target = match[2]
        if not target.startswith(up):
            return match[0]
        outside = target.removeprefix(up)
        inside = ROOT_PAGES.get(outside) or re.sub(r"\.py$", ".md", outside)
        return f"{match[1]}{up.removeprefix('../')}{inside}{match[3]})"

    return LINK.sub(redirect, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the options of commands on one line: a browser would break them after their dashes."""
    return COMMANDS.sub(
        lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html
    )


def on_page_context(
    context: dict[str, Any], page: Page, config: MkDocsConfig, nav: object
) -> dict[str, Any]:
    """Show the theme in the page's language; link the same page in the other one, if it exists."""
    path = page.file.src_uri
    chinese = path.startswith("zh/")
    config.theme["language"] = "zh" if chinese else "en"
    english = path.removeprefix("zh/")
    twins = {"en": english if (ROOT / "docs" / english).is_file() else "index.md"}
    twins["zh"] = f"zh/{english}" if (ROOT / "docs" / "zh" / english).is_file() else "zh/index.md"
    names = {"en": "English", "zh": "中文"}
    config.extra["alternate"] = [
        {"name": names[lang], "lang": lang, "link": link_to(twin, page)}
        for lang, twin in twins.items()
    ]
    return context


def link_to(target: str, page: Page) -> str:
    """Return the relative URL of a page below docs/ from another page."""
    up = "../" * page.url.count("/")
    path = re.sub(r"(^|/)index\.md$", r"\1", target)
    return (up + re.sub(r"\.md$", "/", path)) or "./"
