"""Program of the child process that reads PDF files; `pdf_process.py` starts it.

It sets its limits on memory and CPU time anew for each file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pypdfium2

from bmforge.data.sources.pdf_order import LineBox, order_lines
from bmforge.data.sources.pdf_process import LENGTH_BYTES, receive_message, send_message

__all__ = ["serve_files"]

_MEMORY_PER_BYTE = 4  # additional memory per byte of the file
_CPU_SECONDS_PER_MEGABYTE = 10
_UNPLACED = " \ufffe\x02"
_WORD = re.compile("[^ \ufffe\x02]+")
_COLUMN_GAP = 1.5  # in line heights
_LINE = re.compile("[^\r\n\ufffe\x02]*[\ufffe\x02]?")
Box = tuple[float, float, float, float]


def _read_pages(raw: bytes, most_characters: int) -> dict[str, Any]:
    pages: list[str] = []
    count = 0
    try:
        with pypdfium2.PdfDocument(raw) as file:
            for page in file:
                text = page.get_textpage()
                count += text.count_chars()
                if count > most_characters:
                    return {"characters": count}
                pages.append(_read_page(text))
                text.close()
                page.close()
    except pypdfium2.PdfiumError as error:
        return {"error": str(error)}
    return {"pages": pages}


def _set_limits(start_bytes: int, size: int, memory_bytes: int, cpu_seconds: int) -> None:
    """Limit the memory and the CPU time of this process while it reads a file of `size` bytes."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + cpu_seconds
    limits = [(resource.RLIMIT_CPU, end + _CPU_SECONDS_PER_MEGABYTE * (size >> 20))]
    if start_bytes:
        limits += [(resource.RLIMIT_AS, start_bytes + memory_bytes + _MEMORY_PER_BYTE * size)]
    for kind, soft in limits:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft if hard < 0 else min(soft, hard), hard))


def serve_files(memory_bytes: int, cpu_seconds: int) -> None:
    """Answer files from standard input on standard output, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process after Ctrl-C
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    sizes = Path("/proc/self/statm")  # exists on Linux, the only system that enforces RLIMIT_AS
    pages = int(sizes.read_text().split()[0]) if sizes.exists() else 0
    start_bytes = pages and pages * os.sysconf("SC_PAGE_SIZE")
    send_message(outbox, b"")
    while head := inbox.read(LENGTH_BYTES):
        raw = receive_message(inbox)
        if raw is None:
            return
        if sys.platform != "win32":
            _set_limits(start_bytes, len(raw), memory_bytes, cpu_seconds)
        reply = _read_pages(raw, int.from_bytes(head, "big"))
        del raw
        send_message(outbox, json.dumps(reply).encode())


def _read_page(page: Any) -> str:
    """Return the text of a pdfium page, with lines in reading order."""
    drawn, read_box = page.get_text_range(), _box_reader(page)
    if len(drawn) == page.count_chars():  # otherwise the positions do not match the text
        lines = [
            placed
            for line in _LINE.finditer(drawn)
            if line[0].strip(_UNPLACED)
            for placed in _place(read_box, line.start(), line[0])
        ]
        ordered = order_lines(lines)
        if ordered != lines:
            return "\n".join(line.text for line in ordered)
    return str(page.get_text_bounded().replace("\r\n", "\n"))


def _box_reader(page: Any) -> Callable[[int], Box]:
    """Return a function from a character's index to its left, bottom, right and top.

    `get_charbox` of pypdfium2 creates a ctypes structure in each call and takes 1.4 times as long.
    """
    box, handle = pypdfium2.raw.FS_RECTF(), page.raw
    read = pypdfium2.raw.FPDFText_GetLooseCharBox

    def read_box(index: int) -> Box:
        if not read(handle, index, box):
            raise pypdfium2.PdfiumError(f"character {index} has no bounding box.")
        return box.left, box.bottom, box.right, box.top

    return read_box


def _place(read_box: Callable[[int], Box], begin: int, text: str) -> Iterator[LineBox]:
    """Yield a line with its bounding box; a line that spans two columns is split.

    `begin` is the index of the first character of `text` among the characters of the page.
    """
    words = list(_WORD.finditer(text))
    boxes = [(read_box(begin + word.start()), read_box(begin + word.end() - 1)) for word in words]
    start = 0
    for at in range(1, len(words) + 1):
        height = boxes[start][0][3] - boxes[start][0][1]
        if at < len(words) and boxes[at][0][0] - boxes[at - 1][1][2] < _COLUMN_GAP * height:
            continue
        (left, bottom, _, top), (_, low, right, high) = boxes[start][0], boxes[at - 1][1]
        end = words[at].start() if at < len(words) else len(text)
        line_text = text[words[start].start() : end].rstrip(" ")
        yield LineBox(line_text, left, min(bottom, low), right, max(top, high))
        start = at


if __name__ == "__main__":
    try:
        serve_files(int(sys.argv[1]), int(sys.argv[2]))
    except MemoryError:
        os._exit(1)  # the parent sees the end of the stream
