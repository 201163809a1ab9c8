"""`AutoTokenizer`, which loads the tokenizer of any model directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bmforge.errors import DataError
from bmforge.files import read_json
from bmforge.gguf_header import is_gguf
from bmforge.tokenizers.base import VOCABULARY_FILE, open_directory
from bmforge.tokenizers.cpm1 import MODEL_FILE, CPM1Tokenizer
from bmforge.tokenizers.cpm2 import CPM1WordTokenizer, CPM2Tokenizer, EVATokenizer
from bmforge.tokenizers.cpm_ant import CPMAntPlusTokenizer, CPMAntTokenizer
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer
from bmforge.tokenizers.fast import FastTokenizer
from bmforge.tokenizers.glm import ADDED_FILE, GLMTokenizer
from bmforge.tokenizers.glm_text import SENTENCEPIECE_FILE
from bmforge.tokenizers.spiece import SPIECE_FILES
from bmforge.tokenizers.tokenizer_json import (
    BYTE_PAIR_FILES,
    CONFIG_FILE,
    TOKENIZER_FILE,
    has_tokenizer_json,
)

__all__ = ["AutoTokenizer"]

# Vocabulary files of older models, for the error message.
_OLD_FILES = (
    " with ".join(BYTE_PAIR_FILES),
    *(VOCABULARY_FILE, SPIECE_FILES[0], MODEL_FILE, SENTENCEPIECE_FILE),
)
# tokenizer_class or model_type, in lower case without "-" and "_" -> function that loads the
# tokenizer in a directory.
_BY_NAME: dict[str, Callable[[Path], Any]] = {
    "cpm1": CPM1Tokenizer.from_pretrained,
    "cpm1word": CPM1WordTokenizer.from_pretrained,
    "cpm2": CPM2Tokenizer.from_pretrained,
    "eva": EVATokenizer.from_pretrained,
    "cpmant": CPMAntTokenizer.from_pretrained,
    "cpmantplus": CPMAntPlusTokenizer.from_pretrained,
    "cpmbee": CPMBeeTokenizer.from_pretrained,
    "glmgpt2": GLMTokenizer.from_pretrained,
    "glmchinese": GLMTokenizer.from_pretrained,
}


class AutoTokenizer:
    """Loads the tokenizer of a model directory: a Hugging Face tokenizer or one of OpenBMB's."""

    @staticmethod
    def from_pretrained(directory: str | os.PathLike[str]) -> Any:
        """Load the tokenizer of a directory or GGUF file.

        The class is selected by, in this order: the ``tokenizer_class`` in tokenizer_config.json if
        it is one of OpenBMB's; ``tokenizer.json``; the ``model_type`` in config.json if it is one
        of OpenBMB's; the file names; the special tokens in ``vocab.txt``; the older files of GPT-2,
        OPT, RoBERTa (``vocab.json`` with ``merges.txt``), BERT (``vocab.txt``) and T5
        (``spiece.model``).

        Raises:
            DataError: no tokenizer is found, or a file is damaged.
            MissingDependencyError: a package of the extra ``zh`` is not installed.
        """
        if is_gguf(os.fspath(directory)):
            return FastTokenizer.from_gguf(directory)
        folder = open_directory(directory)
        opens = _by_config(folder) or _by_files(folder)
        if opens is None:
            raise DataError(
                f"there is no tokenizer in {str(folder)!r} (needed: {TOKENIZER_FILE}, or one of "
                f"{', '.join(_OLD_FILES)} for older models). Copy {TOKENIZER_FILE} and "
                "tokenizer_config.json from the original model. If the original model has other "
                "tokenizer files, convert them with transformers' "
                "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)."
            )
        return opens(folder)


def _by_config(folder: Path) -> Callable[[Path], Any] | None:
    """Return the loading function for the class or model_type in the config files, or None.

    A model of any family may have a tokenizer.json, so `model_type` counts only without one.
    """
    named = _read_name(folder / CONFIG_FILE, "tokenizer_class")
    if named in _BY_NAME or (folder / TOKENIZER_FILE).exists():
        return _BY_NAME.get(named)
    named = _read_name(folder / "config.json", "model_type")
    if named == "cpm1" and not (folder / MODEL_FILE).exists():
        named = "cpm1word"  # tokenizer of ModelCenter's release
    if named == "cpmant" and (folder / VOCABULARY_FILE).exists():  # CPM-Ant or CPM-Ant+
        return _by_vocabulary(folder / VOCABULARY_FILE) or _BY_NAME[named]
    return _BY_NAME.get(named)


def _read_name(file: Path, key: str) -> str:
    """Return the value of `key` in a config file, normalized for `_BY_NAME`."""
    value = str(read_json(file).get(key, "")).lower() if file.exists() else ""
    return value.replace("-", "").replace("_", "").removesuffix("tokenizer")


def _by_files(folder: Path) -> Callable[[Path], Any] | None:
    """Return the loading function for a directory with known file names; None for others."""
    if (folder / TOKENIZER_FILE).exists():
        return FastTokenizer.from_pretrained
    if (folder / MODEL_FILE).exists():
        return CPM1Tokenizer.from_pretrained
    if (folder / SENTENCEPIECE_FILE).exists():
        return GLMTokenizer.from_pretrained
    if (folder / ADDED_FILE).exists() and "<|startofpiece|>" in read_json(folder / ADDED_FILE):
        return GLMTokenizer.from_pretrained
    if (folder / VOCABULARY_FILE).exists() and (opener := _by_vocabulary(folder / VOCABULARY_FILE)):
        return opener
    return FastTokenizer.from_pretrained if has_tokenizer_json(folder) else None


def _by_vocabulary(path: Path) -> Callable[[Path], Any] | None:
    """Return the loading function for a vocab.txt with known special tokens; None for others."""
    lines = set(path.read_text("utf-8", errors="replace").split("\n"))
    if {"<root>", "<ans>"} <= lines:
        return CPMBeeTokenizer.from_pretrained
    if {"</_>", "</n>"} <= lines:
        has_plus = "<eod>" in lines  # a token that CPM-Ant does not have
        return (CPMAntPlusTokenizer if has_plus else CPMAntTokenizer).from_pretrained
    if {"\u2582", "\u2583", "<s_0>"} <= lines:
        # EVA's vocabulary has an empty line instead of CPM-2's U+2581.
        return CPM2Tokenizer.from_pretrained if "\u2581" in lines else EVATokenizer.from_pretrained
    return None
