"""Tests of decoder families that differ from another family only in their config.

Every test run compares the outputs and files of these decoders with transformers. Tests of shared
code that other families already test (layouts, streaming, adapters, compression) are marked long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from bmforge.testing.decoder_suite import DecoderSuite
from bmforge.testing.file_suite import FileSuite

__all__ = ["DerivedDecoderSuite", "mark_long_except"]

_Suite = TypeVar("_Suite", bound=type)


def mark_long_except(*quick: str) -> Callable[[_Suite], _Suite]:
    """Class decorator that marks all tests, also inherited ones, as `long`, except `quick`.

    Args:
        quick: names of the test methods that are not marked.
    """

    def change(suite: _Suite) -> _Suite:
        for name in dir(suite):
            test = getattr(suite, name)
            if name.startswith("test_") and name not in quick and callable(test):
                setattr(suite, name, pytest.mark.long(_copy(test)))
        return suite

    return change


def _copy(test: Callable[..., None]) -> Callable[..., None]:
    """Return a copy of a test, so that marking it does not affect the parent class."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        test(*arguments, **options)

    if hasattr(test, "pytestmark"):
        run.pytestmark = list(test.pytestmark)  # type: ignore[attr-defined]
    return run


@mark_long_except(
    "test_outputs_and_hidden_states",
    "test_loss_and_gradients",
    "test_conversion_is_exact",
    "test_cached_decode_of_every_case",
    "test_generates_the_same_ids",
    "test_standard_deviation_of_init",
)
class DerivedDecoderSuite(DecoderSuite, FileSuite):
    """All tests of a decoder; `make test` runs only those that check the decoder's own config."""
