"""What every family must do when many ask at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, generate
from bmforge.models import Model
from bmforge.testing.batches import Batch, make_batch
from bmforge.testing.capability import capability

__all__ = ["ServingSuite"]

_NEW = 4


class ServingSuite:
    """Requests beside each other are answered as alone; `FamilySuite` inherits this."""

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return the model's arguments besides labels."""
        raise TypeError(f"{type(self).__name__} defines no make_inputs")

    @capability("serve")
    @pytest.mark.long
    def test_serves_many(self, tiny: Model) -> None:
        """What is written, or embedded, for each is what it gets alone; prompts of any length."""
        rows = EngineConfig(max_rows=4)
        with Engine(tiny, config=rows, tokenizer=self.serving_tokenizer()) as engine:
            if tiny.traits.writes:
                self.check_requests(engine)
            else:
                self.check_calls(engine)

    def serving_tokenizer(self) -> Any:
        """Return the tokenizer of a family that reads no plain ids; None for the others."""
        return None

    def serving_prompts(self, model: Any) -> list[Any]:
        """Return prompts of several lengths."""
        return [make_batch(model, 1, length, length)[0].tolist() for length in (1, 2, 5, 7, 8)]

    def check_requests(self, engine: Engine) -> None:
        """Compare each request alone with all at once, and greedy ones with `generate`."""
        kinds: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}]
        requests = [
            Request(prompt, GenerationConfig(max_new_tokens=_NEW, eos_token_id=(), **kind))
            for prompt in self.serving_prompts(engine.model)
            for kind in kinds
        ]
        alone = [engine.submit(request).wait(120) for request in requests]
        handles = [engine.submit(request) for request in requests]
        together = [handle.wait(120) for handle in handles]
        for one, beside, request in zip(alone, together, requests, strict=True):
            assert [(a.ids, a.text) for a in one] == [(a.ids, a.text) for a in beside]
            if not isinstance(request.prompt, str) and not request.options.do_sample:
                ids = torch.tensor([request.prompt])
                seen = torch.ones_like(ids)  # no id of a prompt is padding
                want = generate(engine.model, ids, seen, request.options)[0, -_NEW:].tolist()
                assert list(one[0].ids) == want[-len(one[0].ids) :]

    def check_calls(self, engine: Engine) -> None:
        """Compare what threads that ask at once get with what each gets alone."""
        inputs = [self.make_inputs(engine.model, 2, seed) for seed in range(5)]
        rows = [next(iter(one.values())) for one in inputs]
        want = [engine.embed(row) for row in rows]
        got: dict[int, Any] = {}

        def ask(number: int) -> None:
            got[number] = engine.call(lambda: engine.embed(rows[number]))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(rows))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, expected in enumerate(want):
            assert torch.equal(got[number], expected)
