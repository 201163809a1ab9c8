"""Likelihoods of texts without storing the logits of all their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, DataError
from bmforge.infer.decoder import make_cache
from bmforge.infer.engine.answers import Vocabulary
from bmforge.infer.engine.request import TokenLogprob
from bmforge.parallel.balance import leave_out_balance
from bmforge.surgery import evaluating

__all__ = ["score_pairs", "score_prompts"]

# Logits of a chunk: 64 MiB in fp32.
_CHUNK_SCORES, _MIN_CHUNK = 1 << 24, 16


def score_pairs(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Return the mean loss of each text after its prompt, in nats per token.

    The head computes the loss in chunks; `infer.score.score_texts` computes all logits at once.

    Args:
        model: decoder with causal attention, or an encoder-decoder.
        tokenizer: the model's tokenizer.
        pairs: (prompt, text that is scored after it).

    Raises:
        ConfigError: there are no pairs, or the model cannot score a text.
        DataError: a prompt or a text has no tokens.
    """
    if model.traits.reads not in ("left", "apart"):
        raise ConfigError(
            f"a {type(model).__name__} cannot score a text: needed is a language model that reads "
            "from left to right, or an encoder-decoder with its language-model head."
        )
    if not pairs:
        raise ConfigError("there is nothing to score; give at least one (prompt, text).")
    device = next(model.parameters()).device
    losses = []
    with evaluating(model), torch.no_grad(), leave_out_balance(model):
        for number, pair in enumerate(pairs):
            prompt, text = (tokenizer.encode(part) for part in pair)
            if prompt and model.traits.reads == "apart":
                prompt = tokenizer.encode_prompt(pair[0])
            elif prompt:
                prompt = [*tokenizer.prompt_prefix, *prompt]
            if not prompt or not text:
                raise DataError(
                    f"pair {number} has {len(prompt)} tokens of prompt and {len(text)} of text; "
                    "each needs at least one."
                )
            losses.append(float(model(**_inputs(model, prompt, text, device)).loss))
    return losses


def score_prompts(
    model: Any, vocabulary: Vocabulary, rows: Sequence[Sequence[int]], top: int
) -> list[list[TokenLogprob]]:
    """Return the log-probability of every token of prompts, except of the first ones.

    A long prompt is read in chunks with a KV cache, so that the logits of few tokens exist at once.

    Args:
        model: decoder with causal attention.
        vocabulary: bytes of the tokens.
        rows: token ids of the prompts.
        top: number of most likely tokens that are returned for every position.

    Raises:
        ConfigError: the model does not read from left to right.
    """
    if model.traits.reads != "left":
        raise ConfigError(
            f"a {type(model).__name__} gives no log-probabilities of a prompt: needed is a "
            "language model that reads from left to right."
        )
    with evaluating(model), torch.no_grad(), leave_out_balance(model):
        return [list(_score_row(model, vocabulary, row, top)) for row in rows]


def _score_row(
    model: Any, vocabulary: Vocabulary, row: Sequence[int], top: int
) -> Iterator[TokenLogprob]:
    ids = torch.tensor([list(row)], device=next(model.parameters()).device)
    size = max(_MIN_CHUNK, _CHUNK_SCORES // model.config.vocab_size)
    known = [] if model.keeps_foreign_cache else [make_cache(model.layers, len(row))]
    size = size if known else len(row)
    for start in range(0, len(row) - 1, size):
        chunk = ids[:, start : start + size]
        options = {"cache": known[0]} if known else {}
        logits = model(chunk, logits_to_keep=chunk.shape[1], **options).logits[0].float()
        targets = ids[0, start + 1 : start + size + 1]
        scores = logits[: len(targets)].log_softmax(-1)
        best = scores.topk(min(top, scores.shape[-1]))
        own = scores.gather(-1, targets[:, None])[:, 0].tolist()
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for id, logprob, (likely, values) in zip(targets.tolist(), own, pairs, strict=True):
            tops = (
                TokenLogprob(i, v, vocabulary.data(i)) for i, v in zip(likely, values, strict=True)
            )
            yield TokenLogprob(id, logprob, vocabulary.data(id), tuple(tops))


def _inputs(
    model: Any, prompt: Sequence[int], text: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    if model.traits.reads == "apart":
        source, target = (torch.tensor([ids], device=device) for ids in (prompt, text))
        return {"input_ids": source, "labels": target}
    ids = torch.tensor([[*prompt, *text]], device=device)
    labels = ids.clone()
    labels[:, : len(prompt)] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}
