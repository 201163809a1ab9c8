"""Verdicts of the quality rules compared with datatrove's filters, on real documents.

    python -m benchmarks.data.quality_rules DOCUMENTS.json

DOCUMENTS.json is a JSON list of texts. Prints for each rule set the number of documents with
datatrove's verdict, reason and remaining text, with datatrove's words and sentences and with
bmforge's, and the CPU time of both sides. Needs datatrove and spaCy.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import make_parser
from bmforge.data.clean.rule import RuleSet, check_text
from bmforge.data.clean.rules import RULE_SETS
from bmforge.data.clean.statistics import TextStatistics
from bmforge.data.clean.words import split_words

Verdict = tuple[str, str]  # reason ("" if the document passes), remaining text


def reference_filters() -> dict[str, object]:
    """Return datatrove's filters by the names of bmforge's rule sets."""
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    return {
        "gopher_repetition": GopherRepetitionFilter(),
        "gopher_quality": GopherQualityFilter(),
        "c4": C4QualityFilter(),
        "c4_any_end": C4QualityFilter(filter_no_terminal_punct=False),
        "fineweb": FineWebQualityFilter(),
    }


def judge_with_datatrove(item: object, text: str) -> Verdict:
    """Return the verdict of a datatrove filter."""
    from datatrove.data import Document

    document = Document(text=text, id="0")
    result = item.filter(document)  # type: ignore[attr-defined]
    if result is True:
        return "", document.text
    return result[1].removeprefix("gopher_"), ""


def judge_with_bmforge(rules: RuleSet, figures: TextStatistics) -> Verdict:
    """Return the verdict of a bmforge rule set."""
    if (drop := check_text(figures, rules)) is not None:
        return drop.rule.partition(".")[2], ""
    return "", rules.rewrite(figures) if rules.rewrite else figures.text


def timed(work: Callable[[], list[Verdict]]) -> tuple[list[Verdict], float]:
    """Return the result of `work` and its CPU seconds."""
    begin = time.process_time()
    verdicts = work()
    return verdicts, time.process_time() - begin


def main() -> None:
    """Compare the verdicts on all documents of a file."""
    from datatrove.utils.text import split_into_sentences, split_into_words

    parser = make_parser(__doc__)
    parser.add_argument("documents", type=Path)
    texts = json.loads(parser.parse_args().documents.read_text("utf-8"))
    size_mb = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} documents, {size_mb:.2f} MB")
    filters = reference_filters()
    expected: dict[str, list[Verdict]] = {name: [] for name in filters}
    plugged: dict[str, list[Verdict]] = {name: [] for name in filters}
    begin = time.process_time()
    for text in texts:  # text by text, as in a pipeline: datatrove caches the words of a text
        for name, item in filters.items():
            expected[name].append(judge_with_datatrove(item, text))
    peer_seconds = time.process_time() - begin
    for text in texts:
        figures = TextStatistics(
            text, split_into_words, lambda line: len(split_into_sentences(line))
        )
        for name in filters:
            plugged[name].append(judge_with_bmforge(RULE_SETS[name], figures))

    def run_bmforge() -> list[Verdict]:
        verdicts = []
        for text in texts:
            figures = TextStatistics(text, split_words)
            verdicts += [judge_with_bmforge(RULE_SETS[name], figures) for name in filters]
        return verdicts

    actual, seconds = timed(run_bmforge)
    print("set, dropped by datatrove, equal with its words, equal verdicts, equal reasons")
    for number, name in enumerate(filters):
        own = actual[number :: len(filters)]
        reference = expected[name]
        same = sum(a == b for a, b in zip(plugged[name], reference, strict=True))
        verdicts = sum((a[0] == "") == (b[0] == "") for a, b in zip(own, reference, strict=True))
        reasons = sum(a[0] == b[0] for a, b in zip(own, reference, strict=True))
        dropped = sum(a[0] != "" for a in reference)
        print(name, dropped, same, f"{verdicts / len(texts):.4f} {reasons / len(texts):.4f}")
        for pair, times in Counter(
            (a[0], b[0]) for a, b in zip(plugged[name], reference, strict=True) if a != b
        ).most_common(3):
            print("   differs with its words:", pair, times)
    num_equal = sum(
        all(
            (actual[i * len(filters) + k][0] == "") == (expected[name][i][0] == "")
            for k, name in enumerate(filters)
        )
        for i in range(len(texts))
    )
    print(f"equal verdicts in all sets with bmforge's words: {num_equal / len(texts):.4f}")
    print(
        f"CPU seconds: datatrove {peer_seconds:.1f}, bmforge {seconds:.2f} "
        f"({size_mb / seconds:.2f} MB/s)"
    )


if __name__ == "__main__":
    main()
