"""Chinese pages show the commands and the code of English pages, which tests run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from pages import PAGES, ROOT, page_blocks, prose

CHINESE = ROOT / "docs" / "zh"
CHINESE_PAGES = [page for page in PAGES if page.is_relative_to(CHINESE)]
# Reason of a block that is not run -> whether it is on the same page in English, or on any page.
MARKS = {
    "the English page runs these commands": True,
    "the English pages run these commands": False,
}
# A quoted text in Chinese, such as a prompt, replaces an English one; the rest of its line too.
CHINESE_TEXT = re.compile(r"['\"][^'\"]*[\u4e00-\u9fff].*")
# Other translations of terms -> the term of docs/zh/glossary.md.
OTHER_TERMS = {
    **{"令牌": "词元", "标记器": "分词器", "适配层": "适配器", "断点恢复": "续训"},
    **{"推测解码": "投机解码", "量子化": "量化", "检查站": "检查点", "剪裁": "剪枝"},
}


def code_lines(body: str) -> list[str]:
    """Return a block's lines without comments, and without Chinese texts and what follows them.

    Lines that end with `--help` are omitted; another test parses them.
    """
    lines = [re.sub(r"\s*#.*", "", line) for line in body.splitlines()]
    return [CHINESE_TEXT.sub("", line) for line in lines if line and not line.endswith("--help")]


def missing_lines(page: Path, mark: str, english: Iterable[Path]) -> list[str]:
    """Return the lines of a page's marked blocks that the English pages do not have."""
    shown = [
        line for other in english for block in page_blocks(other) for line in block.body.split("\n")
    ]
    return [
        line
        for block in page_blocks(page)
        if block.not_run == mark
        for line in code_lines(block.body)
        if not any(other.startswith(line) for other in shown)
    ]


@pytest.mark.parametrize(
    "page", CHINESE_PAGES, ids=lambda page: page.relative_to(CHINESE).as_posix()
)
def test_a_chinese_page_has_the_commands_of_the_english_page(page: Path) -> None:
    twin = ROOT / "docs" / page.relative_to(CHINESE)
    for mark, is_twin in MARKS.items():
        english = [twin] if is_twin else [p for p in PAGES if p not in CHINESE_PAGES]
        if any(block.not_run == mark for block in page_blocks(page)):
            assert missing_lines(page, mark, english) == []


def test_a_changed_command_would_be_seen(tmp_path: Path) -> None:
    """The test above can fail: a renamed option is reported, a Chinese prompt is not."""
    mark = next(iter(MARKS))
    chinese = 'bmforge serve m --port 1\nbmforge chat --prompt "你好"\n'
    english = 'bmforge serve m --ports 2\nbmforge chat --prompt "Hi"\n'
    (tmp_path / "zh.md").write_text(f"<!-- not run: {mark} -->\n```bash\n{chinese}```\n", "utf-8")
    (tmp_path / "en.md").write_text(f"```bash\n{english}```\n", "utf-8")
    missing = missing_lines(tmp_path / "zh.md", mark, [tmp_path / "en.md"])
    assert missing == ["bmforge serve m --port 1"]


@pytest.mark.parametrize("page", [*CHINESE_PAGES, ROOT / "README-ZH.md"], ids=lambda p: p.name)
def test_a_chinese_page_uses_the_terms_of_the_glossary(page: Path) -> None:
    glossary = (CHINESE / "glossary.md").read_text("utf-8")
    assert all(term in glossary for term in OTHER_TERMS.values())
    assert [word for word in OTHER_TERMS if word in prose(page)] == []
