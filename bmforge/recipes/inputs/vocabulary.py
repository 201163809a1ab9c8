"""Checks that prepared text and a model use the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bmforge.data.prepare.record import RECORD_NAME, read_record
from bmforge.errors import ConfigError, DataError
from bmforge.logging import get_logger
from bmforge.models.hub import find_model
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.tokenizer_json import ROLE_FILES, TEMPLATE_DIR, TEMPLATE_FILE

__all__ = ["check_tokenizers", "find_difference", "find_own_tokenizer"]


def check_tokenizers(
    paths: Sequence[str], init_from: str | None = None, tokenizer: str | None = None
) -> None:
    """Check that all prepared directories have the run's tokenizer.

    Every token of a corpus must have the same id in the run's tokenizer. Bare token stores and
    models without a tokenizer are not checked.

    Args:
        paths: data paths; directories of `bmforge prepare` are checked.
        init_from: initial model of the run; see `RunConfig`.
        tokenizer: directory of the tokenizer that is used instead of the model's.

    Raises:
        ConfigError: a corpus was prepared with a different tokenizer.
    """
    prepared = [path for path in paths if (Path(path) / RECORD_NAME).exists()]
    folders = [read_record(Path(path))[0].tokenizer_dir for path in prepared]
    if not folders:
        return
    for path, folder in zip(prepared[1:], folders[1:], strict=True):
        if (difference := find_difference(folder, folders[0])) is not None:
            raise ConfigError(
                f"the corpora {prepared[0]!r} and {path!r} were prepared with different "
                f"tokenizers ({difference}). Prepare the second corpus again with `--tokenizer "
                f"{folders[0]}`."
            )
    source_name = tokenizer if tokenizer is not None else init_from
    if source_name is None:
        return
    name = "init_from" if tokenizer is None else "data.tokenizer"
    own = find_model(source_name) if tokenizer is None else Path(source_name)
    if (difference := find_difference(folders[0], own)) is not None:
        raise ConfigError(
            f"{prepared[0]!r} was prepared with a different tokenizer than that of "
            f"{name}={source_name!r}: {difference}. Prepare the text again: `bmforge prepare "
            f"TEXT... --out DIR --tokenizer {own}`."
        )


def find_difference(corpus: Path, own: Path) -> str | None:
    """Return a token whose ids differ between two tokenizers; None if all are equal."""
    if not own.is_dir():
        return None  # the error is raised again when the tokenizer is loaded
    if _holds_same(corpus, own):
        return None
    try:
        ids = AutoTokenizer.from_pretrained(own)
    except DataError as error:
        get_logger().warning(
            "cannot check that the text was prepared with the tokenizer of %s (%s)", own, error
        )
        return None
    for token, id in AutoTokenizer.from_pretrained(corpus).get_vocab().items():
        if (other_id := ids.token_to_id(token)) != id:
            other = "no id" if other_id is None else other_id
            return f"token {token!r} has id {id} in one of them and {other} in the other"

    return None


def find_own_tokenizer(init_from: str | None) -> Path | None:
    """Return the directory of an initial model if it has a tokenizer, else None.

    A run uses and exports this tokenizer, not the corpus's, which has the same ids
    (`check_tokenizers`) but may have other special tokens or another chat template.
    """
    if init_from is None or not (base := find_model(init_from)).is_dir():
        return None
    try:
        AutoTokenizer.from_pretrained(base)
    except DataError:  # `check_tokenizers` warns about it
        return None
    return base


def _holds_same(corpus: Path, own: Path) -> bool:
    """Return True if `own` contains identical copies of all vocabulary files in `corpus`."""
    names = {path.name for path in corpus.glob("*")} - {*ROLE_FILES, TEMPLATE_FILE, TEMPLATE_DIR}
    return bool(names) and all(
        (own / name).is_file() and (own / name).read_bytes() == (corpus / name).read_bytes()
        for name in names
    )
