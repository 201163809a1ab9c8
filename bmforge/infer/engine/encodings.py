"""Embedding requests, batched within a request and across callers.

Inputs of equal length share a forward pass, so that no padding is needed. They may come from all
callers if weights are streamed or the device is an accelerator. For a model in host memory, only
inputs of the same request share passes: the last bits of a result depend on the size of its batch,
and must not depend on other callers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.infer.engine.encode import Pooling, check_pooling, pool, read_states
from bmforge.infer.engine.packed_step import can_batch_sequences
from bmforge.infer.engine.tasks import EngineTask
from bmforge.surgery import eval_mode
from bmforge.tune.delta.selection import DeltaNames, choosing_deltas

__all__ = ["Encoding", "Encodings"]

# Tokens of a pass of a model in host memory. Larger passes would delay the next token of running
# answers.
_HOST_TOKENS = 256


class Encoding(EngineTask):
    """Embedding request of one caller.

    Args:
        rows: keyword arguments of the model for each input.
        pooling: pooling as in `encode.embed`.
        normalize: scale embeddings to length 1.
        deadline_s: deadline in seconds, as in `EngineTask`.
        deltas: adapter names, as in `Request`.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Tensor]],
        pooling: Pooling = "mean",
        normalize: bool = True,
        deadline_s: float | None = None,
        deltas: DeltaNames = None,
    ) -> None:
        super().__init__(deadline_s)
        check_pooling(pooling)
        self.rows, self.pooling, self.deltas = rows, pooling, deltas
        self._normalize = normalize
        self._found: dict[int, Tensor] = {}

    def put(self, number: int, embedding: Tensor) -> None:
        """Store the embedding of one input; the last embedding completes the request."""
        self._found[number] = embedding
        if len(self._found) == len(self.rows):
            out = torch.stack([self._found[n] for n in range(len(self.rows))])
            self.finish(F.normalize(out, dim=-1) if self._normalize else out)


class _Row(NamedTuple):
    encoding: Encoding
    number: int
    order: int  # number of rows that were queued earlier

    @property
    def arguments(self) -> dict[str, Tensor]:
        return self.encoding.rows[self.number]


class Encodings:
    """Computes the embeddings of all waiting requests, in order of arrival.

    Args:
        model: model that the engine runs.
        max_rows: maximum number of inputs in a shared pass.
        max_tokens: maximum number of tokens in a shared pass.
    """

    def __init__(self, model: Any, max_rows: int, max_tokens: int) -> None:
        self._model, self._most = model, (max_rows, max_tokens)
        self._came: deque[Encoding] = deque()
        self._unfinished: dict[Encoding, int] = {}  # number of queued inputs
        # Rows that may share a pass. Searching a queue of all rows would take quadratic time.
        self._groups: dict[Hashable, deque[_Row]] = {}
        self._queued = 0

    def __bool__(self) -> bool:
        """Whether requests are waiting."""
        return bool(self._came or self._groups)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._came) + len(self._unfinished)

    def add(self, encoding: Encoding) -> None:
        """Queue a request; may be called from any thread."""
        self._came.append(encoding)

    def step(self) -> None:
        """Run one forward pass if requests are waiting."""
        while self._came:
            self._queue(self._came.popleft())
        self._drop_ended()
        if not self._groups:
            return
        key = min(self._groups, key=lambda key: self._groups[key][0].order)
        group = self._groups[key]
        count = min(len(group), self._count(group[0].arguments))
        chosen = [group.popleft() for _ in range(count)]
        if not group:
            del self._groups[key]
        for row in chosen:
            self._unfinished[row.encoding] -= 1
            if not self._unfinished[row.encoding]:
                del self._unfinished[row.encoding]
        self._run(chosen)

    def fail_all(self, error: Exception) -> None:
        """Fail all waiting requests with an error."""
        waiting = [*self._came, *self._unfinished]
        self._came.clear()
        self._unfinished.clear()
        self._groups.clear()
        for encoding in waiting:
            encoding.fail(error)

    def _queue(self, encoding: Encoding) -> None:
        """Add the inputs of a request to the groups of inputs that may share a pass."""
        caller = None if can_batch_sequences(self._model) else id(encoding)
        self._unfinished[encoding] = len(encoding.rows)
        for number, arguments in enumerate(encoding.rows):
            shapes = tuple((name, tensor.shape) for name, tensor in arguments.items())
            key = caller, shapes, encoding.deltas
            row = _Row(encoding, number, self._queued)
            self._groups.setdefault(key, deque()).append(row)
            self._queued += 1

    def _drop_ended(self) -> None:
        """Remove requests that have ended, and their remaining inputs."""
        ended = {encoding for encoding in self._unfinished if encoding.is_over}
        if not ended:
            return
        for encoding in ended:
            del self._unfinished[encoding]
        for key, group in list(self._groups.items()):
            rows = deque(row for row in group if row.encoding not in ended)
            if rows:
                self._groups[key] = rows
            else:
                del self._groups[key]

    def _count(self, arguments: dict[str, Tensor]) -> int:
        """Return the largest batch size for inputs with the shapes of `arguments`."""
        rows, tokens = self._most
        name, value = next(iter(arguments.items()))
        if not can_batch_sequences(self._model):
            if name != "input_ids":
                return 1
            tokens = min(tokens, _HOST_TOKENS)
        length = value.shape[1] if name == "input_ids" else 1
        return max(1, min(rows, tokens // length))

    def _run(self, rows: Sequence[_Row]) -> None:
        names = rows[0].arguments
        joined = {name: torch.cat([row.arguments[name] for row in rows]) for name in names}
        try:
            choosing = choosing_deltas(self._model, rows[0].encoding.deltas)
            with eval_mode(self._model), torch.no_grad(), choosing:
                states = read_states(self._model, joined)
        except Exception as error:
            if len(rows) == 1:
                rows[0].encoding.fail(error)
            for row in rows if len(rows) > 1 else ():  # rerun alone: only the row at fault fails
                self._run([row])
            return
        for row, state in zip(rows, states, strict=True):
            row.encoding.put(row.number, pool(state[None], row.encoding.pooling)[0])
