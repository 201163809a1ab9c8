"""Checks that an adapter is loaded on the base model that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmforge.errors import CheckpointError
from bmforge.logging import get_logger
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.fingerprint import fingerprint_of, library_of

__all__ = ["BaseCheck", "FileFingerprint", "names_base"]

# Function (names of parameters to exclude) -> fingerprint; None if it cannot be computed.
FileFingerprint = Callable[[Collection[str]], str | None]


@dataclass(frozen=True)
class BaseCheck:
    """Compares the fingerprint of a base model with the fingerprint in an adapter's file.

    Adapters written by PEFT, and adapters trained on a quantized base, have no fingerprint.

    Args:
        allow_other_base: accept any base model.
        read_files: function that computes the fingerprint from the base model's files, for models
            that are quantized or streamed; if None, such models are not checked.
    """

    allow_other_base: bool = False
    read_files: FileFingerprint | None = None

    def __call__(
        self,
        delta: AttachedDelta,
        config: Mapping[str, Any],
        mark: Mapping[str, Any],
        directory: Path,
    ) -> None:
        """Raise `CheckpointError` if the adapter was trained on a different base model.

        Args:
            delta: the adapter, attached to the model.
            config: contents of the adapter's config file.
            mark: bmforge's own metadata in the adapter's weight file.
            directory: directory of the adapter, for messages.
        """
        base = mark.get("base")
        if base is None or self.allow_other_base:
            return
        library = library_of(delta.model)
        if mark.get("base_library", library) != library:
            get_logger().warning(
                "the adapter in %s was trained on a model class of %s, but is loaded into a model "
                "class of %s. The weights of the two base models are not compared.",
                *(directory, mark["base_library"], library),
            )
            return
        fingerprint = fingerprint_of(delta.model, delta.fully_trained_parameters())
        if fingerprint is None and self.read_files is not None:
            fingerprint = self.read_files(delta.fully_trained_parameters())
        if fingerprint is None:
            get_logger().warning(
                (
                    "the adapter in %s was trained on the base model %s. This model is quantized, "
                    "streamed or on the meta device, so its weights cannot be compared with that "
                    "base model."
                ),
                directory,
                base,
            )
        elif fingerprint != base:
            name = config.get("base_model_name_or_path")
            base_name = f"base_model_name_or_path={name!r}, " if name else ""
            raise CheckpointError(
                f"the adapter in {str(directory)!r} was trained on another base model "
                f"({base_name}fingerprint {base}; this model has {fingerprint}). Load the base "
                "model of the adapter, or, if the weights differ on purpose, pass "
                "allow_other_base=True (--allow-other-base of bmforge merge, evaluate, "
                "generate, chat and serve)."
            )


@contextmanager
def names_base(config: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that adds the base model's name to errors about tensors that do not fit.

    Args:
        config: contents of the adapter's config file.
    """
    try:
        yield
    except CheckpointError as error:
        name = config.get("base_model_name_or_path")
        if not name or repr(name) in str(error):
            raise
        raise CheckpointError(f"{error} The adapter was trained on {name!r}.") from error
