"""The copy engine: moves tensors between device, host and disk beside the computing.

One interface, two implementations: a stream of the accelerator, and a thread where the device is
the host. Order, reuse of buffers and overlap are therefore the same program on both, and a test
reads them from recorded events, never from a clock.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bmforge.device import is_host
from bmforge.threads import start_thread

__all__ = ["CopyEngine", "CopyEvent", "Ticket", "Worker", "make_copy_engine"]


@dataclass(frozen=True)
class CopyEvent:
    """Something that happened: `kind` is asked, begun, done, awaited or a user's own word."""

    kind: str
    label: str


class Ticket:
    """Stands for work that was asked for.

    Args:
        label: what it is, for events.
        note: is told (kind, label).
    """

    def __init__(self, label: str, note: Callable[[str, str], None]) -> None:
        self.label, self.note = label, note
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._device_event: torch.Event | None = None

    def finish(self, error: BaseException | None = None, event: torch.Event | None = None) -> None:
        """Say that it is done, failed, or done once the device has passed `event`."""
        self._error, self._device_event = error, event
        self._finished.set()

    def wait(self) -> None:
        """Make what this thread computes next see the result; raise what went wrong.

        On an accelerator the current stream waits, not this thread.
        """
        self._join()
        if self._device_event is not None:
            device = self._device_event.device
            torch.accelerator.current_stream(device).wait_event(self._device_event)

    def wait_on_host(self) -> None:
        """Return when the result is there for the host to read; raise what went wrong."""
        self._join()
        if self._device_event is not None:
            self._device_event.synchronize()

    def settle(self) -> None:
        """Return when it is over, well or not: for whoever does not want the result any more."""
        self._finished.wait()

    def _join(self) -> None:
        self._finished.wait()
        self.note("awaited", self.label)
        if self._error is not None:
            raise self._error


_Tasks = queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None]


class Worker:
    """One thread that does what it is asked, in the order in which it was asked.

    Args:
        name: of the thread.
        note: is told (kind, label).
        device: the accelerator that is the thread's current one, where there is one.
    """

    def __init__(
        self, name: str, note: Callable[[str, str], None], device: torch.device | None = None
    ) -> None:
        self._note, self._is_closed = note, False
        self._tasks: _Tasks = queue.SimpleQueue()
        # A run that ends waits for the task at hand alone. Nor does an idle thread keep its owner
        # alive (models, states, groups); it ends when the owner goes.
        ends = threading.Event()
        self._thread = start_thread(
            name, _serve, self._tasks, device, ends, end=partial(_drop_tasks, self._tasks, ends)
        )
        # At exit `start_thread` ends it, behind those who may still ask it.
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def run(self, work: Callable[[], None], label: str = "") -> Ticket:
        """Have `work` done after all that was asked before; its error is raised by who waits."""
        if self._is_closed:
            raise RuntimeError(f"{label or 'work'} was asked of a copy engine that is closed.")
        ticket = Ticket(label, self._note)
        self._note("asked", label)
        self._tasks.put((work, ticket))
        return ticket

    def close(self) -> None:
        """Finish what was asked and end the thread."""
        self._is_closed = True
        self._tasks.put(None)
        self._thread.join()


def _drop_tasks(tasks: _Tasks, ends: threading.Event) -> None:
    ends.set()
    tasks.put(None)


def _serve(tasks: _Tasks, device: torch.device | None, ends: threading.Event) -> None:
    """Do tasks until there is None; once the program ends they fail instead."""
    if device is not None and not is_host(device):
        torch.accelerator.set_device_index(device)  # a new thread begins with the first
    while (task := tasks.get()) is not None:
        work, ticket = task
        if ends.is_set():
            ticket.finish(RuntimeError(f"{ticket.label or 'work'}: the program ends."))
            continue
        ticket.note("begun", ticket.label)
        error: BaseException | None = None
        try:
            with torch.no_grad():
                work()
        except BaseException as caught:  # given to whoever waits
            error = caught
        ticket.note("done", ticket.label)
        ticket.finish(error)
        # The closure holds tensors; an idle thread must not keep them alive.
        del task, work, ticket, error


def _record(events: list[CopyEvent], kind: str, label: str) -> None:
    events.append(CopyEvent(kind, label))


def _forget(kind: str, label: str) -> None:
    pass


class CopyEngine(ABC):
    """Copies tensors and does host work, each in the order asked, beside the computing.

    Args:
        name: of its thread.
        records: keep every event in `events`.
        device: the thread's current accelerator.

    Attributes:
        events: what happened, where that is recorded.
        note: records an event (kind, label).
    """

    def __init__(
        self, name: str, records: bool = False, device: torch.device | None = None
    ) -> None:
        self.events: list[CopyEvent] = []
        # Not of the engine itself: whoever holds a ticket must not keep a thread alive.
        self.note = partial(_record, self.events) if records else _forget
        self._worker = Worker(name, self.note, device)

    def run(self, work: Callable[[], None], label: str = "") -> Ticket:
        """Have host work (reading a file, an optimizer's step) done on the engine's thread."""
        return self._worker.run(work, label)

    @abstractmethod
    def mark(self) -> torch.Event | None:
        """Return a mark behind all computing asked for so far; None where that is done already."""

    @abstractmethod
    def copy_(
        self, target: Tensor, source: Tensor, label: str = "", *, after: torch.Event | None = None
    ) -> Ticket:
        """Copy `source` into `target`; both stay untouched until the ticket is due.

        Args:
            target: where to.
            source: where from.
            label: for events.
            after: the copy begins behind this mark; None: behind all computing asked for so far.
        """

    @abstractmethod
    def new_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory that copies from and to the device are quick with."""

    def close(self) -> None:
        """Finish what was asked."""
        self._worker.close()


class _ThreadCopies(CopyEngine):
    """The device is the host: a thread copies."""

    def mark(self) -> torch.Event | None:
        return None

    def copy_(
        self, target: Tensor, source: Tensor, label: str = "", *, after: torch.Event | None = None
    ) -> Ticket:
        return self.run(lambda: _copy(target, source), label)

    def new_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)


class _StreamCopies(CopyEngine):
    """An accelerator: a stream of its own copies, beside the one that computes."""

    def __init__(self, name: str, device: torch.device, records: bool = False) -> None:
        super().__init__(name, records, device)
        self._stream = torch.Stream(device)

    def mark(self) -> torch.Event | None:
        return torch.accelerator.current_stream(self._stream.device).record_event()

    def copy_(
        self, target: Tensor, source: Tensor, label: str = "", *, after: torch.Event | None = None
    ) -> Ticket:
        ticket = Ticket(label, self.note)
        self.note("asked", label)
        self._stream.wait_event(after or self.mark())
        with torch.no_grad(), self._stream:
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        for tensor in (target, source):
            if not is_host(tensor.device):  # not to be given to others before the copy is done
                tensor.record_stream(self._stream)
        ticket.finish(event=event)
        return ticket

    def new_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def make_copy_engine(
    device: torch.device, name: str = "bmforge-copies", records: bool = False
) -> CopyEngine:
    """Return the copy engine that suits `device`.

    Args:
        device: where computing happens.
        name: of its thread.
        records: keep every event in `events`.
    """
    if is_host(device):
        return _ThreadCopies(name, records)
    return _StreamCopies(name, device, records)
