"""How many variants of a test function `make test` runs; `make test-all` runs all."""

from __future__ import annotations

import hashlib
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "draws.toml"


def matrix_name(test: str) -> str:
    """Return the name that the variants of a test function share.

    The files of tests/parity run the same suites for different families, so the file and the class
    are left out of their names.

    Args:
        test: id of a test, such as tests/parity/test_t5.py::TestT5::test_generate[greedy].
    """
    file, *parts = test.split("[")[0].split("::")
    folder = "tests/parity" if file.startswith("tests/parity/") else file
    return f"{folder}::{parts[-1]}"


def sample_sizes() -> dict[str, int]:
    """Return the number of variants that `make test` runs, by the name of the test function."""
    tables = tomllib.loads(FILE.read_text())
    return {**tables["measured"], **tables["chosen"]}


def variants_left_out(tests: Iterable[pytest.Item], sizes: dict[str, int]) -> list[pytest.Item]:
    """Return the tests that only `make test-all` runs: those outside of the samples.

    The sample is the same in every process and does not depend on the order of the tests.

    Args:
        tests: collected tests that are not marked as long.
        sizes: number of variants by the name of the test function; a function without an entry
            runs whole.
    """
    groups = defaultdict(list)
    for test in tests:
        groups[matrix_name(test.nodeid)].append(test)
    digest = {test: hashlib.sha256(test.nodeid.encode()).digest() for test in tests}
    return [
        test
        for name, size in sizes.items()
        for test in sorted(groups.get(name, []), key=digest.__getitem__)[size:]
    ]
