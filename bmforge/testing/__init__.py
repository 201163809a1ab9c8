"""Test utilities for code built on bmforge: gloo workers, tiny models, tolerances.

Start reading at `pool.py`.
"""

from bmforge.testing.pool import run_distributed, shutdown_pool
from bmforge.testing.tolerance import assert_close, assert_equal_trees

__all__ = ["assert_close", "assert_equal_trees", "run_distributed", "shutdown_pool"]
