"""Processes that run a user's reward functions and tools, and are killed after a time limit."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bmforge.align.reward_calls import RewardReply
from bmforge.errors import ConfigError

__all__ = ["RewardProcess", "ToolProcess"]

# Time limit in seconds for starting a function's process; imports may take long.
_START_TIMEOUT_S = 60.0


class RewardProcess:
    """Runs a reward function in a separate process, which is killed after a time limit.

    Args:
        spec: specification of the function; see `reward_worker.load_function`.
        timeout_s: time limit for the start in seconds.

    Attributes:
        schema: JSON schema of a tool; None for a reward function.
        required_columns: columns of the dataset that the reward function needs.

    Raises:
        ConfigError: the function cannot be loaded.
    """

    _mode: tuple[str, ...] = ()

    def __init__(self, spec: str, timeout_s: float = 60.0) -> None:
        self.spec = spec
        self.schema: dict[str, Any] | None = None
        self.required_columns: tuple[str, ...] = ()
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str] = queue.Queue()
        self._start(timeout_s)

    def score(self, batch: Mapping[str, Any], timeout_s: float) -> Any:
        """Return a `RewardReply` with the reward of each answer.

        Raises:
            TimeoutError: the function has not returned in time; its process is killed.
            RuntimeError: the function raised an error, or its process has ended.
        """
        return RewardReply(**self._exchange(batch, timeout_s))

    def _exchange(self, values: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a call and return the reply; start the process if it has ended."""
        if self._process is None or self._process.poll() is not None:
            self._start(_START_TIMEOUT_S)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        # Write in a thread, since the call would block if the process does not read.
        line = json.dumps(values, default=str) + "\n"
        threading.Thread(target=_write, args=(process, line), daemon=True).start()
        reply = self._read(timeout_s)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def close(self) -> None:
        """Kill the process, and the programs that the function has started."""
        if self._process is not None:
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # the process leads its group
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, timeout_s: float) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bmforge.align.reward_worker", self.spec, *self._mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            # Ctrl-C must not reach the process; `close` kills the whole new process group.
            start_new_session=True,
        )
        self._replies = queue.Queue()
        reader = threading.Thread(
            target=_read_lines, args=(self._process, self._replies), daemon=True
        )
        reader.start()
        try:
            reply = self._read(timeout_s)
        except (TimeoutError, RuntimeError) as error:
            raise ConfigError(
                f"the process of the function {self.spec!r} did not start: {error} Check the "
                "imports of its module."
            ) from error
        if "error" in reply:
            self.close()
            raise ConfigError(reply["error"])
        self.schema, self.required_columns = reply.get("schema"), tuple(reply.get("columns", ()))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise TimeoutError(
                f"the function {self.spec!r} ran longer than {timeout_s:g} seconds. Raise "
                "reward_timeout_s, or make the function faster."
            ) from None
        if not line:
            self.close()
            raise RuntimeError(
                f"the process of {self.spec!r} exited without a result. Check that the function "
                "does not end the process."
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


class ToolProcess(RewardProcess):
    """Runs a tool function in a separate process, which is killed after a time limit.

    Args:
        spec: ``module:function`` or ``file.py:function``.

    Attributes:
        schema: JSON schema of the function.

    Raises:
        ConfigError: the function cannot be loaded.
    """

    _mode = ("tool",)

    def call(self, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Call the function; return its result as text.

        Raises:
            TimeoutError: the function has not returned in time; its process is killed.
            RuntimeError: the function raised an error, or its process has ended.
        """
        return str(self._exchange(arguments, timeout_s)["result"])


def _read_lines(process: subprocess.Popen[str], replies: queue.Queue[str]) -> None:
    """Put the output lines of a process into a queue, and an empty line when the output ends."""
    assert process.stdout is not None
    for line in process.stdout:
        replies.put(line)
    replies.put("")


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # the process has ended, which the reader reports
        process.stdin.write(line)
        process.stdin.flush()
