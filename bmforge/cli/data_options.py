"""Options of the commands that work on texts: `prepare` and `data ...`."""

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
        input: files (text, jsonl, tables, pages, PDF, web archives, books, also compressed or in
            archives) or directories; none takes Python's help texts.
        out: directory to write.
        overwrite: replace the output of an earlier preparation.
        dry_run: only list the stages that would run.
        config: preparation settings.
    """

    input: Inputs = ()
    out: Path
    overwrite: bool = False
    dry_run: bool = False
    config: Annotated[PrepareConfig, tyro.conf.arg(name="")] = field(default_factory=PrepareConfig)


@dataclass(kw_only=True)
class DataCollectCommand:
    """Crawl pages into a web archive, respecting robots.txt, or resume a crawl.

    Args:
        urls: pages, sitemaps and feeds.
        out: directory of the archive.
        config: crawl settings.
    """

    urls: Annotated[tuple[str, ...], tyro.conf.Positional]
    out: Path
    config: Annotated[CollectConfig, tyro.conf.arg(name="")] = field(default_factory=CollectConfig)


@dataclass(kw_only=True)
class DataExplainCommand:
    """Show each rule's value for documents, next to its bounds.

    Args:
        file: a file or directory of any kind that `prepare` reads.
        rules: filter rules.
        place: location of a single document to explain: a line or a member, as in dropped.jsonl.
        documents: number of documents to explain, from the first on.
        text_field: name of the text field.
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
        directory: output directory of `prepare`.
        dropped: show documents dropped by this rule or rule set; all shows those of every rule.
        kept: show documents that were kept.
        documents: number of documents per rule.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    dropped: str | None = None
    kept: bool = False
    documents: int = 20


@dataclass(kw_only=True)
class DataQualityCommand:
    """Train a quality classifier and a perplexity model of texts.

    Args:
        config: training settings.
    """

    config: Annotated[QualityConfig, tyro.conf.arg(name="")]


@dataclass(kw_only=True)
class DataReportCommand:
    """Write a one-page report of a prepared corpus, report.html in its directory.

    Args:
        directory: output directory of `prepare`.
    """

    directory: Annotated[Path, tyro.conf.Positional]


@dataclass(kw_only=True)
class DataVerifyCommand:
    """Verify all files of a prepared corpus against its record.

    Args:
        directory: output directory of `prepare`.
    """

    directory: Annotated[Path, tyro.conf.Positional]
