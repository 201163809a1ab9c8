"""Unbatched requests: each runs alone through `Decoder`, interleaved with other requests.

Unbatched requests are beam searches, and requests to encoder-decoders, to transformers models (also
with images), and to models with their own prompt format (GLM, CPM-Ant, CPM-Bee, EVA). Their results
do not depend on other requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.infer.decoder import Decoder
from bmforge.infer.decoder_factory import start_decoder
from bmforge.infer.engine.prompts import PreparedRequest, is_document
from bmforge.infer.engine.stepped_thread import SteppedThread
from bmforge.infer.generation import run_decoder
from bmforge.infer.openbmb.hypotheses import search_hypotheses
from bmforge.infer.openbmb.texts import answer_document, start_cpm_ant
from bmforge.surgery import eval_mode
from bmforge.tune.delta.selection import choosing_deltas

__all__ = ["UnbatchedRunner"]


class UnbatchedRunner:
    """Runner of one unbatched request.

    Args:
        model: model that the engine runs.
        tokenizer: the model's tokenizer.
        ready: prepared request.
    """

    def __init__(self, model: Any, tokenizer: Any, ready: PreparedRequest) -> None:
        self._model, self._tokenizer, self._ready = model, tokenizer, ready
        self._turns = SteppedThread(self._work)
        config = ready.config
        self.count = max(config.num_beams, config.num_return_sequences)

    def step(self) -> bool:
        """Run until the next model call; return True if the request has not ended."""
        return self._turns.step()

    def stop(self) -> None:
        """Stop the request and keep its output so far."""
        self._turns.stop()

    def _work(self) -> None:
        model, ready = self._model, self._ready
        handle = model.register_forward_pre_hook(lambda *_: self._turns.pause())
        try:
            # The selection belongs to this thread, on which the model runs.
            selected = choosing_deltas(model, ready.deltas)
            with selected, eval_mode(model), torch.no_grad():
                if is_document(model, ready.request):
                    self._fill_document(ready.request.prompt)
                elif ready.config.num_beams > 1:
                    self._search(*self._start())
                else:
                    self._write(*self._start())
        finally:
            handle.remove()

    def _start(self) -> tuple[Decoder, Tensor]:
        """Create the decoder; return it with its first input tokens."""
        model, ready = self._model, self._ready
        if model.traits.objective == "hidden tokens" and self._tokenizer is not None:
            return start_cpm_ant(model, self._tokenizer, ready.ids, ready.config)
        device = next(model.parameters()).device
        ids = torch.tensor([ready.ids], device=device)
        inputs = ready.request.inputs
        return start_decoder(model, ids, None, ready.config.max_new_tokens, inputs=inputs)

    def _write(self, decoder: Decoder, start: Tensor) -> None:
        """Generate all answers, one token per answer and step."""
        answers = self._ready.answers
        scores = decoder.repeat(len(answers), decoder.run(start))
        filling = self._ready.config.pad_token_id or 0
        while True:
            tokens = []
            for answer, row in zip(answers, scores, strict=True):
                token = answer.choose(row) if answer.finish_reason is None else None
                tokens.append(filling if token is None else token)
            if all(answer.finish_reason is not None for answer in answers):
                return
            scores = decoder.run(torch.tensor(tokens, device=start.device)[:, None])

    def _search(self, decoder: Decoder, start: Tensor) -> None:
        """Run a beam search; all answers are complete at its end."""
        ready = self._ready
        if self._model.traits.objective == "hidden tokens" and self._tokenizer is not None:
            rows = [search_hypotheses(decoder, start, ready.config)]
        else:
            nothing = torch.zeros_like(start[:, 0])
            rows = run_decoder(decoder, start, nothing, ready.config).tolist()
        for answer, row in zip(ready.answers, rows, strict=False):
            answer.write(row[start.shape[1] :])

    def _fill_document(self, prompt: Any) -> None:
        options = {"config": self._ready.config.replace(eos_token_id=None, pad_token_id=None)}
        text = answer_document(self._model, self._tokenizer, prompt, options)
        self._ready.answers[0].write_text(text)
