"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from draws import sample_sizes, variants_left_out
from hypothesis import HealthCheck, settings

from bmforge.logging import get_logger
from bmforge.parallel import shutdown_distributed

# Tests share few cores with other work, where drawing one example may take seconds.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Products of tests' tiny matrices are slower in the library that is faster for large ones.
os.environ.setdefault("BMFORGE_HOST_TUNING", "memory")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs every variant of the tests that are not long."""
    parser.addoption("--every-variant", action="store_true", help="do not sample test matrices")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the variants outside of the samples as long, before pytest reads the marks."""
    if not config.getoption("--every-variant"):
        tests = [item for item in items if item.get_closest_marker("long") is None]
        for test in variants_left_out(tests, sample_sizes()):
            test.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """What listing the tests has made need not be looked through for garbage again."""
    gc.freeze()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's fixture, attached to bmforge's logger, which does not propagate to the root."""
    get_logger().addHandler(caplog.handler)
    yield caplog
    get_logger().removeHandler(caplog.handler)


@pytest.fixture(scope="module", autouse=True)
def leave_the_group() -> Iterator[None]:
    """A group of one that a file's tests have made in this process ends with the file."""
    modules = len(sys.modules)
    yield
    shutdown_distributed()
    if len(sys.modules) > modules:  # nor what a file's imports have made
        gc.collect()
        gc.freeze()
