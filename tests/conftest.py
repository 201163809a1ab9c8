"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from bmforge.logging import get_logger
from bmforge.parallel import shutdown_distributed

# Tests share few cores with other work, where drawing one example may take seconds.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Products of tests' tiny matrices are slower in the library that is faster for large ones.
os.environ.setdefault("BMFORGE_HOST_TUNING", "memory")


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
