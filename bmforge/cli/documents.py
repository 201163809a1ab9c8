"""`bmforge generate MODEL --document FILE.jsonl`: fills in the answers of documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from bmforge.cli.open_model import opened_model
from bmforge.errors import ConfigError, DataError
from bmforge.infer.openbmb.documents import fill_each
from bmforge.models.hub import find_model
from bmforge.settings import MemoryOptions
from bmforge.tokenizers.cpm_bee.lines import parse_document, read_numbered
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["print_filled"]


def print_filled(model: str, file: Path, memory: MemoryOptions, beams: int, **options: Any) -> None:
    """Fill in the answers of every document in a file; print each document as a JSON line.

    Each document is printed when it is complete. Errors in single documents are reported on
    standard error; the other documents are still filled in.

    Args:
        model: directory or hub id of a CPM-Bee model with its tokenizer.
        file: file with one document per line; empty lines are skipped.
        memory: memory limits of the model; with a budget, documents are filled one at a time.
        beams: number of beams; a document needs one batch row per beam.
        options: options of `fill_each`.

    Raises:
        ConfigError: the model is not CPM-Bee.
        DataError: the file cannot be read or has no documents, or some documents could not be
            filled in.
    """
    numbers: list[int] = []

    def read() -> Iterator[dict[str, Any] | DataError]:
        for number, line in read_numbered(file):
            numbers.append(number)
            try:
                yield parse_document(line, "it")
            except DataError as error:
                yield error

    documents = read()
    first = next(documents, None)  # reports a missing file before the model is loaded
    if first is None:
        raise DataError(f"{str(file)!r} contains no documents. Write one JSON object per line.")
    directory = find_model(model)
    if memory.device_budget is not None:
        options["batch_size"] = 1
    wrong = 0
    with opened_model(directory, memory, beams) as opened:
        if opened.traits.objective != "documents":
            raise ConfigError(
                f"{model!r} is a {type(opened).__name__}, but --document needs CPM-Bee. Pass a "
                "text with --prompt instead."
            )
        tokenizer = CPMBeeTokenizer.from_pretrained(directory)
        filled = fill_each(opened, tokenizer, chain([first], documents), **options)
        for index, document in enumerate(filled):
            if isinstance(document, DataError):
                wrong += 1
                print(f"line {numbers[index]}: {document}", file=sys.stderr, flush=True)
            else:
                print(json.dumps(document, ensure_ascii=False), flush=True)
    if wrong:
        raise DataError(
            f"{wrong} of {len(numbers)} documents of {str(file)!r} could not be completed. "
            "Correct the lines that are listed above."
        )
