"""Echoes prompts with their log-probabilities (`echo` and `prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bmforge.infer.engine.answers import Vocabulary
from bmforge.infer.engine.request import Completion, TokenLogprob
from bmforge.serve.answers import TextLogprobs
from bmforge.serve.openai_types import CompletionRequest

__all__ = ["PromptEcho", "read_echo", "scored_tokens"]


@dataclass(frozen=True)
class PromptEcho:
    """Prompt to echo in a response (`echo`), with its log-probabilities.

    Args:
        text: text of the prompt; "" if the prompt is not echoed.
        tokens: scores of all tokens except the first; None without scores.
        first: bytes of the first token.
    """

    text: str = ""
    tokens: Sequence[TokenLogprob] | None = None
    first: bytes = b""

    def as_logprobs(self, writer: TextLogprobs, top: int) -> dict[str, Any] | None:
        """Return the log-probabilities in the completions format, `top` tokens per position."""
        if self.tokens is None:
            return None
        tokens = [replace(token, top=token.top[:top]) for token in self.tokens]
        return writer.write_prompt(self.first, tokens)

    def as_prompt_logprobs(self, top: int) -> list[dict[str, Any] | None] | None:
        """Return, per prompt position, a dict from token id to log-probability, as vLLM does."""
        if self.tokens is None:
            return None
        return [None, *(_by_id(token, top) for token in self.tokens)]


def _by_id(token: TokenLogprob, top: int) -> dict[str, Any]:
    likely = {
        str(candidate.id): _entry(candidate, rank)
        for rank, candidate in enumerate(token.top[:top], 1)
    }
    return {str(token.id): _entry(token, token.rank)} | likely


def _entry(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    text = token.data.decode("utf-8", "replace")
    return {"logprob": max(token.logprob, -9999.0), "rank": rank, "decoded_token": text}


def scored_tokens(body: CompletionRequest) -> int | None:
    """Return the number of top tokens to score at each prompt position; None for no scores."""
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in counts if count is not None), default=None)


def read_echo(
    body: CompletionRequest, tokenizer: Any, ids: Sequence[int], answer: Completion
) -> PromptEcho:
    """Build the echo of a prompt for a response.

    Args:
        body: request body.
        tokenizer: the model's tokenizer.
        ids: token ids of the prompt.
        answer: first answer to the prompt, which contains the prompt's log-probabilities.
    """
    text = tokenizer.decode(ids[_prefix(ids, tokenizer) :]) if body.echo else ""
    if answer.prompt_logprobs is None:
        return PromptEcho(text)
    tokens = [token for token in answer.prompt_logprobs[1:] if token is not None]
    return PromptEcho(text, tokens, Vocabulary(tokenizer).data(ids[0]))


def _prefix(ids: Sequence[int], tokenizer: Any) -> int:
    """Return the number of special tokens that the server added before the prompt."""
    prefix = list(tokenizer.prompt_prefix)
    return len(prefix) if prefix and list(ids[: len(prefix)]) == prefix else 0
