"""An engine whose answers are given texts, for tests of protocols."""

from __future__ import annotations

import threading
from typing import Any

from bmforge.infer import Engine
from bmforge.infer.engine.request import Completion, Handle, OutputDelta, Request


class ScriptedEngine:
    """A real engine that answers every request with one text, cut into pieces.

    Args:
        engine: engine with the model and the tokenizer.
        text: text of every answer.
        size: characters per piece.
        reason: finish reason.

    Attributes:
        requests: requests so far.
    """

    def __init__(self, engine: Engine, text: str, size: int = 3, reason: Any = "stop") -> None:
        self._engine, self.text, self.size, self.reason = engine, text, size, reason
        self.requests: list[Request] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prompt(self, number: int = -1) -> str:
        """The text of a request's prompt."""
        prompt = self.requests[number].prompt
        return prompt if isinstance(prompt, str) else self._engine.tokenizer.decode(prompt)

    def submit(self, request: Request) -> Handle:
        self.requests.append(request)
        count = request.options.num_return_sequences
        handle = Handle(count)
        threading.Thread(target=self._write, args=(handle, request, count)).start()
        return handle

    def _write(self, handle: Handle, request: Request, count: int) -> None:
        text, size, encode = self.text, self.size, self._engine.tokenizer.encode
        cuts = [text[at : at + size] for at in range(0, len(text), size)] or [""]
        stop = self._engine.tokenizer.eos_id if self.reason == "stop" else None
        last = () if stop is None else (stop,)
        for index in range(count):
            for number, piece in enumerate(cuts, 1):
                ids = tuple(encode(piece))
                if number < len(cuts):
                    handle.put(OutputDelta(index, piece, ids))
                    continue
                whole = Completion(
                    index, text, (*encode(text), *last), None, self.reason, len(request.prompt), 2
                )
                handle.put(OutputDelta(index, piece, (*ids, *last), None, self.reason), whole)
