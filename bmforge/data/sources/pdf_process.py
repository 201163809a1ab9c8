"""Reads the pages of PDF files in a child process with limits on memory and CPU time.

A file of some kilobytes can make pdfium use any amount of memory or time, and pdfium ends its
process if memory runs out. So one child process reads all files, and is replaced when it ends.
Messages are JSON, with the length in front: unlike pickle, they cannot run code in the parent if a
file takes over the child.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = [
    "LENGTH_BYTES",
    "PdfLimitError",
    "PdfProcess",
    "PdfRefusedError",
    "PdfTextError",
    "receive_message",
    "send_message",
    "shared_pdf_process",
]

_MEMORY_BYTES = 1 << 29
_CPU_SECONDS = 20
LENGTH_BYTES = 8


class PdfLimitError(Exception):
    """The child process ended; the argument is "cpu_time", or "memory" (or pdfium crashed)."""


class PdfRefusedError(Exception):
    """Pdfium refuses the file; the message is pdfium's."""


class PdfTextError(Exception):
    """The pages have more characters than allowed; the argument is their number so far."""


class PdfProcess:
    """A child process that reads PDF files; it starts with the first file.

    Args:
        memory_bytes: limit on memory that grows by 4 bytes per byte of the file. Only Linux
            enforces this limit.
        cpu_seconds: limit on CPU time per file that grows by 10 seconds per MB of the file. Windows
            does not enforce this limit.
    """

    def __init__(self, memory_bytes: int = _MEMORY_BYTES, cpu_seconds: int = _CPU_SECONDS) -> None:
        self._limits = [str(memory_bytes), str(cpu_seconds)]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def read_pages(self, raw: bytes, most_characters: int) -> list[str]:
        """Return the text of each page, with lines in reading order.

        Raises:
            PdfLimitError: the file needs too much memory or CPU time, or crashes pdfium.
            PdfRefusedError: the file is damaged or encrypted.
            PdfTextError: the pages have more than `most_characters` characters.
            RuntimeError: the child process does not start.
        """
        with self._lock:
            is_new = self._process is None
            reply = self._exchange(raw, most_characters)
            if reply == "memory" and not is_new:
                # Previous files may have left memory in use: the result must not depend on them.
                reply = self._exchange(raw, most_characters)
        if isinstance(reply, str):
            raise PdfLimitError(reply)
        if "error" in reply:
            raise PdfRefusedError(reply["error"])
        if "characters" in reply:
            raise PdfTextError(reply["characters"])
        pages: list[str] = reply["pages"]
        return pages

    def close(self) -> int:
        """End the process; return its exit status. The next file starts a new process."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()  # no effect if it has ended
        process.communicate()  # closes the pipes
        return process.returncode

    def _exchange(self, raw: bytes, most_characters: int) -> dict[str, Any] | str:
        """Send a file and return the reply, or the limit at which the process ended."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(most_characters.to_bytes(LENGTH_BYTES, "big"))
            send_message(process.stdin, raw)
            answer = receive_message(process.stdout)
        except OSError:  # the process ended while it received the file
            answer = None
        if answer is None:
            is_slow = sys.platform != "win32" and self.close() == -signal.SIGXCPU
            self.close()
            return "cpu_time" if is_slow else "memory"
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        program = [sys.executable, "-m", "bmforge.data.sources.pdf_worker", *self._limits]
        process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert process.stdout is not None
        if receive_message(process.stdout) is None:
            raise RuntimeError(
                f"the process that reads PDF files does not start (exit status {process.wait()}). "
                f"Run {' '.join(program)!r} to see the reason."
            )
        return process


def shared_pdf_process() -> PdfProcess:
    """Return the child process of this process, which all files share."""
    return _process_of(os.getpid())


@lru_cache(maxsize=1)
def _process_of(pid: int) -> PdfProcess:
    """Return the child of process `pid`: a forked process must not use the pipes of its parent."""
    return PdfProcess()


def send_message(stream: Any, message: bytes) -> None:
    """Write a message to a binary stream: its length, then its bytes."""
    stream.write(len(message).to_bytes(LENGTH_BYTES, "big"))
    stream.write(message)
    stream.flush()


def receive_message(stream: Any) -> bytes | None:
    """Return the next message; None if the stream ends before its end."""
    length = int.from_bytes(head := stream.read(LENGTH_BYTES), "big")
    message: bytes = stream.read(length)
    return message if len(head) == LENGTH_BYTES and len(message) == length else None
