"""Log-probabilities of prompts: `echo` and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request

from bmforge.infer.engine.answers import Vocabulary
from bmforge.infer.engine.request import TokenLogprob
from bmforge.serve.answers import TextLogprobs
from bmforge.serve.encoding import finish_task
from bmforge.serve.openai_types import CompletionRequest
from bmforge.serve.serving import Serving

__all__ = ["PromptEcho", "score_rows"]


@dataclass(frozen=True)
class PromptEcho:
    """A prompt as the answer repeats it.

    Args:
        ids: token ids of the prompt.
        text: text of the prompt, "" if it is not repeated.
        tokens: scores of all tokens but the first; None without scores.
        first: bytes of the first token.
    """

    ids: list[int]
    text: str = ""
    tokens: Sequence[TokenLogprob] | None = None
    first: bytes = b""

    def as_logprobs(self, writer: TextLogprobs) -> dict[str, Any] | None:
        """Return the scores in the completions format."""
        return None if self.tokens is None else writer.write_prompt(self.first, self.tokens)

    def as_prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """Return the scores in vLLM's format: by token id, the prompt's own token included."""
        if self.tokens is None:
            return None
        return [None, *(_by_id(token) for token in self.tokens)]


def _by_id(token: TokenLogprob) -> dict[str, Any]:
    found = {str(top.id): _entry(top, rank) for rank, top in enumerate(token.top, 1)}
    return {str(token.id): _entry(token, None)} | found


def _entry(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    text = token.data.decode("utf-8", "replace")
    return {"logprob": max(token.logprob, -9999.0), "rank": rank, "decoded_token": text}


async def score_rows(
    body: CompletionRequest, request: Request, serving: Serving, rows: list[list[int]]
) -> list[PromptEcho]:
    """Return every prompt as the answer repeats it, with its scores if they are requested.

    Raises:
        RequestError: the model cannot score prompts, or the engine is overloaded.
        GoneError: the client has disconnected.
    """
    engine, tokenizer = serving.engine, serving.engine.tokenizer
    top = body.prompt_logprobs if body.logprobs is None or not body.echo else body.logprobs
    texts = ["" if not body.echo else _text(prompt, tokenizer) for prompt in body.prompts]
    if top is None:
        return [PromptEcho(ids, text) for ids, text in zip(rows, texts, strict=True)]
    delta, limit = serving.find(body.model).delta, serving.config.request_s
    submit = partial(engine.submit_scores, rows, top=top, deadline_s=limit, delta=delta)
    scores = await finish_task(serving, request, engine, submit)
    vocabulary = Vocabulary(tokenizer)
    return [
        PromptEcho(ids, text, tokens, vocabulary.data(ids[0]))
        for ids, text, tokens in zip(rows, texts, scores, strict=True)
    ]


def _text(prompt: str | list[int], tokenizer: Any) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
