"""HTML report of a prepared corpus: one page in English and Chinese that works offline."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from bmforge.data.prepare.funnel import Funnel
from bmforge.data.prepare.record import PrepareReport, read_record
from bmforge.data.prepare.summary import KEPT, UNKNOWN, Summary
from bmforge.data.report.drawings import draw_bars, draw_funnel
from bmforge.data.report.samples import read_dropped, read_kept
from bmforge.data.report.viewer import VIEWER_SCRIPT, VIEWER_STYLE, clean_text, draw_viewer
from bmforge.errors import DataError
from bmforge.files import check_place
from bmforge.html_page import write_page

__all__ = ["funnel_stages", "write_corpus_report"]

_NAME = "report.html"
_SHOWN = 20  # kept documents, and documents of each rule
_MOST_SHOWN = 1000  # dropped documents
# Stages that run after the rules, in this order.
_LAST = ("private", "duplicate", "near_duplicate", "repeated_spans")
_STYLE = """
section{overflow-x:auto}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
section>svg{max-width:820px;--part:var(--c1)}svg text{fill:currentColor;font-size:13px}
svg .in{text-anchor:middle;font-weight:600}svg .end{text-anchor:end}
svg .part{fill:var(--part);opacity:.45}
"""


def write_corpus_report(out_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a prepared corpus directory; return its path.

    Raises:
        DataError: the directory has no record, or its record has an older format without a funnel.
    """
    out = Path(out_dir)
    check_place(out / _NAME, "report", is_file=True)
    report, _ = read_record(out)
    if report.funnel is None or report.summary is None:
        raise DataError(
            f"{str(out)!r} has no record of dropped documents or no summary. Prepare the corpus "
            "again."
        )
    sections = [
        _tiles(report, report.funnel),
        _section("What became of the documents · 文档去向", _stages(report.funnel)),
        _section("By rule · 按规则", _rules(report.funnel)),
        _section("By source · 按来源", _sources(report.summary)),
        _section("Lengths in tokens · 长度（词元）", _lengths(report.summary)),
        *(
            _section(title, _values(table))
            for title, table in (
                ("Languages · 语言", report.summary.languages),
                ("Scripts · 文字", report.summary.scripts),
                ("Licenses · 许可", report.summary.licenses),
                ("Terms of sources · 来源条款", _known(report.summary.terms)),
            )
        ),
        _section("Years · 年份", _values(report.summary.years, by_name=True)),
        _section("Clusters of near duplicates · 近似重复簇", _clusters(report.summary)),
        _section("Text lost per web page · 网页丢失的文本", _lost(report.summary)),
        _section("Changed by step · 各步修改", _changes(report.funnel)),
        _samples(out, report.funnel),
        _section("Steps and settings · 步骤与设置", _settings(report)),
    ]
    name, kind = out.resolve().name, "corpus report · 语料报告"
    style = _STYLE + VIEWER_STYLE
    return write_page(out / _NAME, name, kind, sections, style=style, script=VIEWER_SCRIPT)


def funnel_stages(funnel: Funnel) -> list[tuple[str, int, int]]:
    """Return (name, remaining documents, dropped documents) per stage; a rule set is one stage."""
    gone: dict[str, int] = {}
    for rule, amount in funnel.dropped.items():
        name = rule.partition(".")[0]
        gone[name] = gone.get(name, 0) + amount.documents
    of_rules = [
        name for name in gone if f"{name}." in "".join(f"{rule}|" for rule in funnel.dropped)
    ]
    first = [name for name in gone if name not in of_rules and name not in _LAST]
    order = [*sorted(first), *sorted(of_rules), *(name for name in _LAST if name in gone)]
    left = funnel.read.documents
    stages = [("read · 读入", left, 0)]
    for name in order:
        left -= gone[name]
        stages.append((name, left, gone[name]))
    return [*stages, ("kept · 保留", left, 0)]


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table; columns of numbers are right-aligned."""
    numbers = [False] * len(heads)
    body = ""
    for row in rows:
        numbers = [not isinstance(cell, str) for cell in row]
        cells = (
            f"<td>{escape(cell)}</td>"
            if isinstance(cell, str)
            else f'<td class="n">{_say(cell)}</td>'
            for cell in row
        )
        body += f"<tr>{''.join(cells)}</tr>"
    head = "".join(
        f'<th class="n">{name}</th>' if number else f"<th>{name}</th>"
        for name, number in zip(heads, numbers, strict=True)
    )
    return f"<table><tr>{head}</tr>{body}</table>" if body else ""


def _say(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.2f}"


def _tiles(report: PrepareReport, funnel: Funnel) -> str:
    text_bytes = report.train.text_bytes + report.validation.text_bytes
    tokens = report.train.tokens + report.validation.tokens
    share = 100 * funnel.kept.documents / max(funnel.read.documents, 1)
    tiles = (
        (f"{funnel.read.documents:,}", "documents read · 读入文档"),
        (f"{funnel.kept.documents:,} ({share:.1f} %)", "kept · 保留"),
        (f"{text_bytes:,}", "bytes of text · 文本字节"),
        (f"{tokens:,}", "tokens · 词元"),
        (f"{text_bytes / max(tokens, 1):.2f}", "bytes per token · 每词元字节"),
        (f"{report.validation.tokens:,}", "tokens held out · 验证集词元"),
        (f"{report.vocab_size:,}", "vocabulary · 词表"),
    )
    return f'<div class="tiles">{"".join(f"<div><b>{a}</b>{b}</div>" for a, b in tiles)}</div>'


def _rules(funnel: Funnel) -> str:
    read = max(funnel.read.documents, 1)
    by_count = sorted(funnel.dropped.items(), key=lambda item: (-item[1].documents, item[0]))
    rows = [
        (rule, amount.documents, 100 * amount.documents / read, amount.text_bytes)
        for rule, amount in by_count
    ]
    return _table(
        ("rule · 规则", "documents · 文档", "% of those read · 占比", "bytes · 字节"), rows
    )


def _sources(summary: Summary) -> str:
    rows: list[tuple[object, ...]] = []
    for source, outcomes in summary.sources.items():
        read = sum(counts[0] for counts in outcomes.values())
        num_kept = outcomes.get(KEPT, [0, 0])[0]
        gone = {rule: counts[0] for rule, counts in outcomes.items() if rule != KEPT}
        first = max(gone, key=lambda rule: (gone[rule], rule), default="")
        reason = f"{first} ({gone[first]:,})" if first else ""
        rows.append((source, read, num_kept, 100 * num_kept / max(read, 1), reason))
    rows.sort(key=lambda row: (-int(str(row[1])), str(row[0])))
    heads = ("source · 来源", "read · 读入", "kept · 保留", "%", "most dropped by · 主要原因")
    return _table(heads, rows)


def _lengths(summary: Summary) -> str:
    rows = []
    for power in sorted(map(int, summary.lengths)):
        documents = summary.lengths[str(power)][0]
        rows.append((f"{1 << power >> 1:,} – {(1 << power) - 1:,}", documents, f"{documents:,}"))
    return draw_bars(rows)


def _values(table: dict[str, list[int]], by_name: bool = False) -> str:
    by_count = sorted(table.items(), key=lambda item: (0 if by_name else -item[1][0], item[0]))
    rows = [
        (
            value,
            documents,
            text_bytes,
            tokens,
            text_bytes / max(tokens, 1),
            tokens / max(text_bytes, 1),
        )
        for value, (documents, text_bytes, tokens) in by_count
    ]
    heads = ("", "documents · 文档", "bytes · 字节", "tokens · 词元", "bytes/token", "tokens/byte")
    return _table(heads, rows)


def _known(table: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the table, or an empty one if its only entry is "unknown"."""
    return table if set(table) - {UNKNOWN} else {}


def _clusters(summary: Summary) -> str:
    sizes = sorted(map(int, summary.clusters))
    counts = [summary.clusters[str(size)][0] for size in sizes]
    return (
        draw_bars([(str(size), n, f"{n:,}") for size, n in zip(sizes[:30], counts, strict=False)])
        if sizes
        else ""
    )


def _lost(summary: Summary) -> str:
    by_loss = sorted(summary.lost_text.items(), key=lambda item: (-item[1][0], item[0]))
    rows = [(clean_text(page), lost / 100) for page, (lost,) in by_loss]
    return _table(("page · 网页", "% of the visible text · 占可见文本"), rows)


def _changes(funnel: Funnel) -> str:
    rows = [(step, *counts) for step, counts in funnel.changed.items()]
    return _table(("step · 步骤", "documents · 文档", "characters fewer or more · 字符增减"), rows)


def _samples(out: Path, funnel: Funnel) -> str:
    """Return the HTML viewer with samples of kept and dropped documents."""
    dropped = read_dropped(out, most=_SHOWN)[:_MOST_SHOWN]
    kept = read_kept(out, _SHOWN)
    counts = {rule: amount.documents for rule, amount in funnel.dropped.items()}
    return draw_viewer(kept, dropped, {**counts, "kept": funnel.kept.documents})


def _stages(funnel: Funnel) -> str:
    """Return the chart and the table of the filter funnel."""
    stages = funnel_stages(funnel)
    read = max(funnel.read.documents, 1)
    rows = [(name, left, gone, 100 * left / read) for name, left, gone in stages]
    heads = ("stage · 阶段", "documents left · 剩余", "dropped · 丢弃", "% of those read · 占比")
    return draw_funnel(stages) + _table(heads, rows)


def _settings(report: PrepareReport) -> str:
    rows = [(f"step {number}", step) for number, step in enumerate(report.steps, 1)]
    rows += [(name, str(value)) for name, value in vars(report.config).items()]
    return _table(("", ""), rows)
