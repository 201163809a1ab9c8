"""Options of the commands for text data: `prepare` and `data ...`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bmforge.cli.options import Inputs, Panel
from bmforge.config import GROUP
from bmforge.prepare_settings import (
    CleanConfig,
    CorpusFilesConfig,
    DuplicatesConfig,
    ExecutionConfig,
    FilterConfig,
    PrepareConfig,
    ReadConfig,
)
from bmforge.settings import CollectConfig, QualityConfig

__all__ = [
    "DataCollectCommand",
    "DataExplainCommand",
    "DataQualityCommand",
    "DataReportCommand",
    "DataShowCommand",
    "DataVerifyCommand",
    "PrepareCommand",
    "PrepareOptions",
]


@dataclass(frozen=True)
class PrepareOptions(PrepareConfig):
    """Options of `bmforge prepare`; each option group is a panel in the output of --help."""

    read: Panel[ReadConfig] = field(default_factory=ReadConfig, metadata=GROUP)
    clean: Panel[CleanConfig] = field(default_factory=CleanConfig, metadata=GROUP)
    filter: Panel[FilterConfig] = field(default_factory=FilterConfig, metadata=GROUP)
    duplicates: Panel[DuplicatesConfig] = field(default_factory=DuplicatesConfig, metadata=GROUP)
    execution: Panel[ExecutionConfig] = field(default_factory=ExecutionConfig, metadata=GROUP)
    files: Panel[CorpusFilesConfig] = field(default_factory=CorpusFilesConfig, metadata=GROUP)


@dataclass(kw_only=True)
class PrepareCommand:
    """Prepare text for training.

    Args:
        input: files or directories: text, .jsonl, tables, web pages, PDF, e-books and web archives,
            also compressed or in archives (if empty: the help texts that come with Python).
        out: output directory for token stores and the tokenizer.
        overwrite: replace the output of an earlier `prepare` in `out`.
        dry_run: list the stages that would run, and exit.
        config: options for preparing the corpus.
    """

    input: Inputs = ()
    out: Path
    overwrite: bool = False
    dry_run: bool = False
    config: Annotated[PrepareOptions, tyro.conf.arg(name="")] = field(
        default_factory=PrepareOptions
    )


@dataclass(kw_only=True)
class DataCollectCommand:
    """Download pages into a web archive, respecting robots.txt, or resume a download.

    Args:
        urls: URLs of pages to download, or of sitemaps and feeds that list pages.
        out: output directory for the web archive.
        config: options of the crawl.
    """

    urls: Annotated[tuple[str, ...], tyro.conf.Positional]
    out: Path
    config: Annotated[CollectConfig, tyro.conf.arg(name="")] = field(default_factory=CollectConfig)


@dataclass(kw_only=True)
class DataExplainCommand:
    """Show the value and the limits of each filter rule for some documents.

    Args:
        file: input file or directory in any format that `prepare` reads.
        rules: published filter rules to apply: "english", "chinese", or "mixed" (the rules for the
            language of each document).
        place: location of the only document to explain, as in dropped.jsonl: a line number or the
            name of an archive member (if None: the first documents).
        documents: number of documents to explain, starting with the first.
        text_field: field of a .jsonl line that contains the text.
    """

    file: Annotated[str, tyro.conf.Positional]
    rules: Literal["english", "chinese", "mixed"] = "mixed"
    place: str | None = None
    documents: int = 1
    text_field: str = "text"


@dataclass(kw_only=True)
class DataShowCommand:
    """Show how many documents each stage of `prepare` kept, or documents as JSON lines.

    Args:
        directory: output directory of `prepare`.
        dropped: show documents that this rule or rule set dropped; "all" selects every rule (if
            None: the counts of each stage).
        kept: show documents that were kept instead of the counts of each stage.
        documents: maximum number of documents to show per rule.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    dropped: str | None = None
    kept: bool = False
    documents: int = 20


@dataclass(kw_only=True)
class DataQualityCommand:
    """Train a quality classifier and a perplexity model for texts.

    Args:
        config: options for training the models.
    """

    config: Annotated[QualityConfig, tyro.conf.arg(name="")]


@dataclass(kw_only=True)
class DataReportCommand:
    """Write a one-page report about a prepared corpus to report.html in its directory.

    Args:
        directory: output directory of `prepare`.
    """

    directory: Annotated[Path, tyro.conf.Positional]


@dataclass(kw_only=True)
class DataVerifyCommand:
    """Compare all files of a prepared corpus with the checksums in its record.

    Args:
        directory: output directory of `prepare`.
    """

    directory: Annotated[Path, tyro.conf.Positional]
