"""The options of the commands that work on texts: `prepare` and `data ...`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bmforge.settings import CollectConfig, PrepareConfig, QualityConfig

__all__ = [
    "DataCollectCommand",
    "DataExplainCommand",
    "DataQualityCommand",
    "DataReportCommand",
    "DataShowCommand",
    "DataVerifyCommand",
    "PrepareCommand",
]

Inputs = Annotated[tuple[str, ...], tyro.conf.Positional]


@dataclass(kw_only=True)
class PrepareCommand:
    """Prepare text for training.

    Args:
        input: files (text, jsonl, tables, pages, PDF, web archives, books, also packed or in
            archives) or directories; none takes Python's help texts.
        out: directory to write.
        overwrite: replace what an earlier preparation wrote there.
        dry_run: only say which stages would have to run.
        config: how.
    """

    input: Inputs = ()
    out: Path
    overwrite: bool = False
    dry_run: bool = False
    config: Annotated[PrepareConfig, tyro.conf.arg(name="")] = field(default_factory=PrepareConfig)


@dataclass(kw_only=True)
class DataCollectCommand:
    """Collect pages into a web archive, where robots.txt lets us, or go on with it.

    Args:
        urls: pages, sitemaps and feeds.
        out: directory of the archive.
        config: how.
    """

    urls: Annotated[tuple[str, ...], tyro.conf.Positional]
    out: Path
    config: Annotated[CollectConfig, tyro.conf.arg(name="")] = field(default_factory=CollectConfig)


@dataclass(kw_only=True)
class DataExplainCommand:
    """Show each rule's value for documents, beside its bounds.

    Args:
        file: a file or directory of any kind that `prepare` reads.
        rules: which rules.
        place: of the one document to explain: a line, a member, as dropped.jsonl has it.
        documents: explain so many, from the first on.
        text_field: the field that holds the text.
    """

    file: Annotated[str, tyro.conf.Positional]
    rules: Literal["english", "chinese", "mixed"] = "mixed"
    place: str | None = None
    documents: int = 1
    text_field: str = "text"


@dataclass(kw_only=True)
class DataShowCommand:
    """Show the funnel of a prepared corpus, or documents of it as lines of JSON.

    Args:
        directory: what `prepare` wrote.
        dropped: show documents that this rule dropped, or its set; all shows those of every rule.
        kept: show documents that were kept.
        documents: so many, of each rule.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    dropped: str | None = None
    kept: bool = False
    documents: int = 20


@dataclass(kw_only=True)
class DataQualityCommand:
    """Train a classifier and a perplexity model that tell good texts from others.

    Args:
        config: how.
    """

    config: Annotated[QualityConfig, tyro.conf.arg(name="")]


@dataclass(kw_only=True)
class DataReportCommand:
    """Draw a prepared corpus on one page, report.html in its directory.

    Args:
        directory: what `prepare` wrote.
    """

    directory: Annotated[Path, tyro.conf.Positional]


@dataclass(kw_only=True)
class DataVerifyCommand:
    """Read all of a prepared corpus and compare it with its record.

    Args:
        directory: what `prepare` wrote.
    """

    directory: Annotated[Path, tyro.conf.Positional]
