"""Embedding requests, batched across callers.

Inputs of equal length from all callers share a forward pass if weights are streamed or the device
is an accelerator. For a model in host memory each input has its own pass: larger batches would gain
little speed, and their results would differ in the last bits and so depend on other requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.infer.engine.encode import Pooling, check_pooling, pool, read_states
from bmforge.infer.engine.packed_step import can_batch_sequences
from bmforge.infer.engine.tasks import EngineTask
from bmforge.surgery import evaluating
from bmforge.tune.delta.selection import DeltaNames, choosing_deltas

__all__ = ["Encoding", "Encodings"]


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

    @property
    def arguments(self) -> dict[str, Tensor]:
        return self.encoding.rows[self.number]

    @property
    def kind(self) -> tuple[tuple[str, torch.Size], ...]:
        return tuple((name, tensor.shape) for name, tensor in self.arguments.items())


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
        self._rows: deque[_Row] = deque()

    def __bool__(self) -> bool:
        """Whether requests are waiting."""
        return bool(self._came or self._rows)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._came) + len({id(row.encoding) for row in list(self._rows)})

    def add(self, encoding: Encoding) -> None:
        """Queue a request; may be called from any thread."""
        self._came.append(encoding)

    def step(self) -> None:
        """Run one forward pass if requests are waiting."""
        while self._came:
            encoding = self._came.popleft()
            self._rows += [_Row(encoding, number) for number in range(len(encoding.rows))]
        self._rows = deque(row for row in self._rows if not row.encoding.is_over)
        if not self._rows:
            return
        kind = self._rows[0].kind
        deltas = self._rows[0].encoding.deltas
        alike = (r for r in self._rows if r.kind == kind and r.encoding.deltas == deltas)
        chosen = list(islice(alike, self._count(kind)))
        self._rows = deque(row for row in self._rows if row not in chosen)
        self._run(chosen)

    def fail_all(self, error: Exception) -> None:
        """Fail all waiting requests with an error."""
        waiting = {id(e): e for e in (*self._came, *(row.encoding for row in self._rows))}
        self._came.clear()
        self._rows.clear()
        for encoding in waiting.values():
            encoding.fail(error)

    def _count(self, kind: tuple[tuple[str, torch.Size], ...]) -> int:
        """Return the batch size for inputs whose arguments have the names and shapes in `kind`."""
        if not can_batch_sequences(self._model):
            return 1
        rows, tokens = self._most
        length = kind[0][1][1] if kind[0][0] == "input_ids" else 1
        return max(1, min(rows, tokens // length))

    def _run(self, rows: Sequence[_Row]) -> None:
        names = rows[0].arguments
        joined = {name: torch.cat([row.arguments[name] for row in rows]) for name in names}
        try:
            choosing = choosing_deltas(self._model, rows[0].encoding.deltas)
            with evaluating(self._model), torch.no_grad(), choosing:
                states = read_states(self._model, joined)
        except Exception as error:
            if len(rows) == 1:
                rows[0].encoding.fail(error)
            for row in rows if len(rows) > 1 else ():  # rerun alone: only the row at fault fails
                self._run([row])
            return
        for row, state in zip(rows, states, strict=True):
            row.encoding.put(row.number, pool(state[None], row.encoding.pooling)[0])
