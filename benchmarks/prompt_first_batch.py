"""Seconds and memory up to the first batch of prompts, by the number of examples.

    python benchmarks/prompt_first_batch.py [--examples 1000 1000000] [--eager 10000]

"asked for" is `PromptRows` with the loader of a run: an example is tokenised when its batch is
made. "all first" is OpenPrompt's way, every example tokenised and filled up to the longest length
before the first batch, on --eager examples. The examples are made by their number, so that they
take no memory themselves; the memory is the largest that Python's objects took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import MIB, header, table  # noqa: E402

from bmforge.models import Bert, BertConfig  # noqa: E402
from bmforge.recipes.inputs.examples import ExampleConfig, ExampleLoader  # noqa: E402
from bmforge.tokenizers import AutoTokenizer  # noqa: E402
from bmforge.tune.prompt import ManualVerbalizer, PromptRows, Template  # noqa: E402
from bmforge.tune.prompt.questions import Question, lay_questions  # noqa: E402

SEQ_LEN, ROWS = 128, 8
WORDS = (
    "a",
    "film",
    "we",
    "saw",
    "it",
    "was",
    "good",
    "bad",
    "long",
    "short",
    "and",
    "then",
    "what",
)


class Made:
    """So many examples, each made of its number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, str]:
        words = (WORDS[(number * step) % len(WORDS)] for step in range(1, 20 + number % 60))
        return {"text_a": " ".join(words)}


def open_tokenizer() -> Any:
    """Return a tokenizer of the words."""
    with tempfile.TemporaryDirectory() as folder:
        marks = [f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")]
        Path(folder, "vocab.txt").write_text("\n".join([*marks, *WORDS, "."]) + "\n")
        told = {"tokenizer_class": "BertTokenizer"}
        told |= {f"{mark[1:-1].lower()}_token": mark for mark in marks}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(told))
        return AutoTokenizer.from_pretrained(folder)


def measure(run: Callable[[], object]) -> tuple[float, float]:
    """Return seconds, and the most MiB that were taken, of two runs."""
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, peak / MIB


def main() -> None:
    """Print a line for every number of examples, and one of the other way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--eager", type=int, default=10_000)
    given = parser.parse_args()
    print(header("python benchmarks/prompt_first_batch.py " + " ".join(sys.argv[1:]), 1,
                 ["torch", "tokenizers"]))  # fmt: skip
    tokenizer = open_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16,
        max_seq_len=SEQ_LEN, head="masked_lm",
    )  # fmt: skip
    model = Bert.from_config(config, device="meta")
    template = Template('{"placeholder":"text_a"} it was {"mask"} .', tokenizer, model)
    words = ManualVerbalizer([["bad"], ["good"]], tokenizer)
    sizes = ExampleConfig(
        paths=("made",), seq_len=SEQ_LEN, global_batch_size=ROWS, micro_batch_size=ROWS
    )

    def asked_for(count: int) -> object:
        rows = PromptRows(template, words, Made(count), range(count), SEQ_LEN)
        return next(ExampleLoader(rows, sizes))

    def all_first(count: int) -> object:
        prompts = [template.encode(Made(count)[n], SEQ_LEN) for n in range(count)]
        columns = lay_questions([Question([p], [], []) for p in prompts], 0)
        ids = [[*row, *[0] * (SEQ_LEN - len(row))] for row in columns["input_ids"]]
        return ids, columns

    asked_for(ROWS)
    rows = []
    for count in given.examples:
        seconds, peak = measure(lambda count=count: asked_for(count))  # type: ignore[misc]
        rows.append(["asked for", f"{count:,}", f"{seconds:.4f}", f"{peak:.2f}"])
    if given.eager:
        seconds, peak = measure(lambda: all_first(given.eager))
        rows.append(["all first", f"{given.eager:,}", f"{seconds:.2f}", f"{peak:.1f}"])
    print(table(["way", "examples", "s to the first batch", "MiB"], rows))


if __name__ == "__main__":
    main()
