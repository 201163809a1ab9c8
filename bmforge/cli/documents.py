"""`bmforge generate MODEL --document FILE.jsonl`: one document a line in, the same, filled, out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bmforge.data.sources.text_files import read_lines
from bmforge.errors import ConfigError, DataError
from bmforge.infer.openbmb.documents import fill_documents
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["print_filled"]


def print_filled(model: str, file: Path, **options: Any) -> None:
    """Fill every document of a file and print it as a line of JSON.

    Args:
        model: directory or hub id of a CPM-Bee with its tokenizer.
        file: one document a line; empty lines are left out.
        options: those of `fill_documents`.

    Raises:
        ConfigError: not a CPM-Bee.
        DataError: a line that is not a document; its number is named.
    """
    documents = _read(file)
    directory = find_model(model)
    opened = AutoModel.from_pretrained(directory)
    if opened.traits.objective != "documents":
        raise ConfigError(
            f"{model!r} is a {type(opened).__name__}; documents are for CPM-Bee. Give a text with "
            "--prompt instead."
        )
    tokenizer = CPMBeeTokenizer.from_pretrained(directory)
    for document in fill_documents(opened, tokenizer, documents, **options):
        print(json.dumps(document, ensure_ascii=False))


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the documents of a file."""
    documents = []
    for number, line in enumerate(read_lines(file), 1):
        if line.strip():
            try:
                documents.append(json.loads(line))
            except ValueError as error:
                raise DataError(
                    f"line {number} of {str(file)!r} is not JSON ({error}); each line is one "
                    'document, such as {"input": "...", "<ans>": ""}.'
                ) from error
    return documents
