"""Time and memory until the first batch of prompts, by the number of examples.

    python -m benchmarks.prompts.first_batch [--examples 1000 1000000] [--eager 10000]

"lazy" is `PromptRows` with the loader of a run, which tokenizes an example when its batch is
created. "eager" tokenizes and pads all examples first, as OpenPrompt does; `--eager` is the number
of its examples. The examples are computed from their index and take no memory. The memory is the
peak of Python's objects during the measurement (tracemalloc).
"""

from __future__ import annotations

import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import MIB, header, make_parser, table
from bmforge.models import Bert, BertConfig
from bmforge.recipes.inputs.examples import ExampleConfig, ExampleLoader
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.prompt import ManualVerbalizer, PromptRows, Template
from bmforge.tune.prompt.questions import Question, collate_questions

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


class GeneratedExamples:
    """A sequence of examples that are computed from their index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, str]:
        words = (WORDS[(number * step) % len(WORDS)] for step in range(1, 20 + number % 60))
        return {"text_a": " ".join(words)}


def open_tokenizer() -> Any:
    """Return a tokenizer with the words of the examples."""
    with tempfile.TemporaryDirectory() as folder:
        marks = [f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")]
        Path(folder, "vocab.txt").write_text("\n".join([*marks, *WORDS, "."]) + "\n")
        config = {"tokenizer_class": "BertTokenizer"}
        config |= {f"{mark[1:-1].lower()}_token": mark for mark in marks}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        return AutoTokenizer.from_pretrained(folder)


def measure(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of one run, and the peak MiB of another one."""
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, peak / MIB


def main() -> None:
    """Print a row for every number of examples, and the row of the eager loader."""
    parser = make_parser(__doc__)
    parser.add_argument("--examples", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--eager", type=int, default=10_000)
    options = parser.parse_args()
    print(header(1, ["torch", "tokenizers"]))
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

    def load_lazily(count: int) -> object:
        rows = PromptRows(template, words, GeneratedExamples(count), range(count), SEQ_LEN)
        return next(ExampleLoader(rows, sizes))

    def load_eagerly(count: int) -> object:
        prompts = [template.encode(GeneratedExamples(count)[n], SEQ_LEN) for n in range(count)]
        columns = collate_questions([Question([p], [], []) for p in prompts], 0)
        ids = [[*row, *[0] * (SEQ_LEN - len(row))] for row in columns["input_ids"]]
        return ids, columns

    load_lazily(ROWS)
    rows = []
    for count in options.examples:
        seconds, peak = measure(lambda count=count: load_lazily(count))  # type: ignore[misc]
        rows.append(["lazy", f"{count:,}", f"{seconds:.4f}", f"{peak:.2f}"])
    if options.eager:
        seconds, peak = measure(lambda: load_eagerly(options.eager))
        rows.append(["eager", f"{options.eager:,}", f"{seconds:.2f}", f"{peak:.1f}"])
    print(table(["loader", "examples", "s to the first batch", "peak, MiB"], rows))


if __name__ == "__main__":
    main()
