"""Tests of concurrent requests for every family."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, generate
from bmforge.infer.engine import Completion
from bmforge.models import Model
from bmforge.testing.batches import make_batch
from bmforge.testing.capability import capability
from bmforge.testing.suite_base import SuiteBase
from bmforge.testing.tolerance import assert_equal_trees
from bmforge.tune.delta import Adapter, Lora, use_deltas

__all__ = ["ServingSuite"]

_NEW = 4


class ServingSuite(SuiteBase):
    """Tests that concurrent requests do not change answers; `FamilySuite` inherits this."""

    @capability("serve")
    @pytest.mark.long
    def test_serves_many(self, tiny: Model) -> None:
        """Concurrent requests of any length get the same results as single requests."""
        rows = EngineConfig(max_rows=4)
        with Engine(tiny, config=rows, tokenizer=self.serving_tokenizer()) as engine:
            if tiny.traits.can_generate:
                self.check_requests(engine)
            else:
                self.check_calls(engine)

    @capability("adapters per request")
    @pytest.mark.long
    def test_adapters_per_request(self, tiny: Model) -> None:
        """Answers with an adapter are bit-identical to those of a model with only this adapter."""
        for name, built in (("a", Lora(tiny, name="a", rank=2)), ("b", Adapter(tiny, name="b"))):
            generator = torch.Generator().manual_seed(ord(name))
            with torch.no_grad():
                for tensor in built.parameters():
                    tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.5)
        use_deltas(tiny, ())
        choices = [None, "a", "b", ("a", "b")]
        rows = EngineConfig(max_rows=4)
        with Engine(tiny, config=rows, tokenizer=self.serving_tokenizer()) as engine:
            answer = self.answer_with if tiny.traits.can_generate else self.embed_with
            answers = answer(engine, choices)
            for names, got in zip(choices, answers, strict=True):
                use_deltas(tiny, names or ())
                (want,) = answer(engine, [None])
                assert_equal_trees(got, want)

    def answer_with(self, engine: Engine, choices: Sequence[Any]) -> list[Any]:
        """Return the answers to concurrent requests: all prompts for each selection of adapters."""
        prompts = self.serving_prompts(engine.model)[1:4]
        config = GenerationConfig(max_new_tokens=_NEW, eos_token_id=())
        handles = [
            [engine.submit(Request(prompt, config, delta=names)) for prompt in prompts]
            for names in choices
        ]
        return [
            {str(n): _as_tensor(handle.wait(120)[0]) for n, handle in enumerate(some)}
            for some in handles
        ]

    def embed_with(self, engine: Engine, choices: Sequence[Any]) -> list[Any]:
        """Return the embeddings of the prompts for each selection of adapters."""
        row = next(iter(self.make_inputs(engine.model).values()))
        return [{"embedding": engine.embed(row, delta=names)} for names in choices]

    def serving_tokenizer(self) -> Any:
        """Return a tokenizer if the family's inputs are not only token ids, otherwise None."""
        return None

    def serving_prompts(self, model: Any) -> list[Any]:
        """Return prompts of several lengths."""
        return [make_batch(model, 1, length, length)[0].tolist() for length in (1, 2, 5, 7, 8)]

    def check_requests(self, engine: Engine) -> None:
        """Compare single requests with concurrent ones, and greedy answers with `generate`."""
        kinds: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}]
        requests = [
            Request(prompt, GenerationConfig(max_new_tokens=_NEW, eos_token_id=(), **kind))
            for prompt in self.serving_prompts(engine.model)
            for kind in kinds
        ]
        alone = [engine.submit(request).wait(120) for request in requests]
        handles = [engine.submit(request) for request in requests]
        together = [handle.wait(120) for handle in handles]
        for single, beside, request in zip(alone, together, requests, strict=True):
            assert [(a.ids, a.text) for a in single] == [(a.ids, a.text) for a in beside]
            if not isinstance(request.prompt, str) and not request.options.do_sample:
                ids = torch.tensor([request.prompt])
                seen = torch.ones_like(ids)  # all ones, since the prompt has no padding
                want = generate(engine.model, ids, seen, request.options)[0, -_NEW:].tolist()
                assert list(single[0].ids) == want[-len(single[0].ids) :]

    def check_calls(self, engine: Engine) -> None:
        """Compare concurrent calls from several threads with single calls."""
        inputs = [self.make_inputs(engine.model, 2, seed) for seed in range(5)]
        rows = [next(iter(entry.values())) for entry in inputs]
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


def _as_tensor(answer: Completion) -> Tensor:
    """Return an answer's ids as a tensor, or the code points of its text if it has no ids."""
    return torch.tensor(answer.ids or [ord(character) for character in answer.text])
