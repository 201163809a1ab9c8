"""`bmforge data COMMAND`: collects pages, explains filters, inspects corpora, and more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from bmforge.cli import parse
from bmforge.cli.data_options import (
    DataCollectCommand,
    DataExplainCommand,
    DataQualityCommand,
    DataReportCommand,
    DataShowCommand,
    DataVerifyCommand,
)
from bmforge.errors import ConfigError, DataError, suggest

__all__ = ["SUBCOMMANDS", "run_data"]

_HELP = ("-h", "--help", "help")
_WIDTH = 100


def run_data(arguments: Sequence[str]) -> None:
    """Run a `bmforge data` subcommand, or list them."""
    if not arguments or arguments[0] in _HELP:
        print("usage: bmforge data COMMAND [OPTIONS]\n")
        print("\n".join(f"  {name:<10}{about}" for name, (about, _, _) in SUBCOMMANDS.items()))
        print("\n`bmforge data COMMAND --help` lists a command's options.")
        return
    name = arguments[0]
    if name not in SUBCOMMANDS:
        raise ConfigError(
            f"unknown command 'data {name}'.{suggest(name, SUBCOMMANDS)} "
            f"Commands: {', '.join(SUBCOMMANDS)}."
        )
    _, options, run = SUBCOMMANDS[name]
    run(parse.parse_options(options, arguments[1:], f"data {name}"))


def _explain(command: DataExplainCommand) -> None:
    # Imported lazily, like the functions below, because help and argument errors do not need it.
    from bmforge.data import normalize_text
    from bmforge.data.clean import explain

    shown = 0
    for document in islice(_chosen(command), command.documents):
        shown += 1
        text = normalize_text(document.text)
        print(f"{document.source}:{document.place}  {_one_line(text)}")
        for line in explain(replace(document, text=text), command.rules):
            low, high = line.bounds.low, line.bounds.high
            bounds = " ".join(
                f"{mark} {bound:g}"
                for mark, bound in ((">=", low), ("<=", high))
                if bound is not None
            )
            broken = "" if line.passed else "  <- dropped"
            print(f"  {line.rule:<46}{line.value:>10.4g}  {bounds}{broken}")
    if not shown:
        location = f" at {command.place!r}" if command.place else ""
        raise DataError(
            f"{command.file!r} contains no document{location}. Correct the path of the file, or "
            "--place."
        )


def _chosen(command: DataExplainCommand) -> Iterator[Any]:
    from bmforge.data import read_documents

    documents = read_documents(command.file, text_field=command.text_field, skip_bad=True)
    return (document for document in documents if command.place in (None, document.place))


def _show(command: DataShowCommand) -> None:
    from bmforge.data.prepare.record import read_record
    from bmforge.data.report import read_dropped, read_kept

    if command.dropped is not None:
        for entry in read_dropped(command.directory, command.dropped, command.documents):
            print(json.dumps(entry, ensure_ascii=False))
        return
    if command.kept:
        for text in read_kept(command.directory, command.documents):
            print(json.dumps({"text": text}, ensure_ascii=False))
        return
    funnel = read_record(command.directory)[0].funnel
    if funnel is None:
        raise DataError(
            f"{str(command.directory)!r} contains no record of dropped documents, because an "
            "earlier version of bmforge prepared the directory. Prepare it again with this "
            "version."
        )
    rows = [("read", funnel.read), *sorted(funnel.dropped.items()), ("kept", funnel.kept)]
    width = max(len(name) for name, _ in rows) + 2
    for name, amount in rows:
        print(f"{name:<{width}}{amount.documents:>12,} documents {amount.text_bytes:>16,} bytes")


def _collect(command: DataCollectCommand) -> None:
    from bmforge.data.collect import collect

    report = collect(command.urls, command.out, command.config)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    print(f"{report.out_dir}: {report.requests} requests, {report.body_bytes} bytes: {outcomes}")


def _quality(command: DataQualityCommand) -> None:
    from bmforge.recipes.corpus_quality import train_quality

    print("\n".join(map(str, train_quality(command.config))))


def _report(command: DataReportCommand) -> None:
    from bmforge.data.report import write_corpus_report

    print(write_corpus_report(command.directory))


def _verify(command: DataVerifyCommand) -> None:
    from bmforge.data.prepare.verify import verify_store

    problems = verify_store(command.directory)
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise DataError(
            f"{str(command.directory)!r} was changed after it was prepared:{lines}\nPrepare it "
            "again with --overwrite, or restore it from a copy."
        )
    print(f"{command.directory}: all files, counts and checksums are correct")


def _one_line(text: str) -> str:
    line = " ".join(text[:_WIDTH].split())
    return line + ("..." if len(text) > _WIDTH else "")


SUBCOMMANDS: dict[str, tuple[str, type[Any], Callable[[Any], None]]] = {
    "collect": (
        "collect pages into a web archive, from hosts whose robots.txt allows it",
        DataCollectCommand,
        _collect,
    ),
    "explain": (
        "show the value and limits of each rule for a document",
        DataExplainCommand,
        _explain,
    ),
    "show": ("show statistics and samples of dropped and kept documents", DataShowCommand, _show),
    "quality": (
        "train the classifier that --scores uses to select good texts",
        DataQualityCommand,
        _quality,
    ),
    "report": ("show statistics of a prepared corpus on one page", DataReportCommand, _report),
    "verify": ("verify the checksums of a prepared corpus", DataVerifyCommand, _verify),
}
