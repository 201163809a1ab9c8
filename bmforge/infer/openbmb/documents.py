"""Fills CPM-Bee documents: generates the answers under ``<ans>``.

The model writes one answer after the other, each in its own segment from ``<s>`` at position 0. The
beam search or sampling of `generate` runs over all answers of a document together, as in the
original: a sequence ends with its last answer.

Source: ``CPMBeeBeamSearch`` in ``cpm_live/generation/bee.py`` of OpenBMB/CPM-Bee. Differences: the
limit on new tokens applies to each answer, so that no answer is omitted, and answers can be
constrained to a list of texts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.errors import ConfigError, DataError
from bmforge.infer.cache import KVCache
from bmforge.infer.decoder import Decoder
from bmforge.infer.generation import run_decoder
from bmforge.infer.options import GenerationConfig
from bmforge.models.cpm_bee import CPMBee, to_arguments
from bmforge.surgery import eval_mode
from bmforge.tokenizers.cpm_bee.prompt import Prompt, PromptBatch, collate_prompts, encode_prompt
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["fill_documents", "fill_each", "longest_document"]

# The original's defaults; sampling uses no beams.
_MAX_NEW_TOKENS, _NUM_BEAMS = 100, 3
# Sequence length in the original's training, in tokens.
_WINDOW = 2048
# Options that do not apply: each answer has its own end output, and documents are filled once.
_FIXED = (
    "min_new_tokens",
    "num_return_sequences",
    "eos_token_id",
    "pad_token_id",
    "stop_strings",
    "logprobs",
    "prompt_logprobs",
)


def fill_documents(
    model: CPMBee,
    tokenizer: CPMBeeTokenizer,
    documents: Sequence[Mapping[str, Any]],
    config: GenerationConfig | None = None,
    *,
    examples: Sequence[Mapping[str, Any]] = (),
    constraints: Mapping[tuple[str, ...], Collection[str]] | None = None,
    max_length: int | None = None,
    batch_size: int = 8,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return copies of documents with the model's answers under ``<ans>``.

    Args:
        model: CPM-Bee model.
        tokenizer: the model's tokenizer.
        documents: nested dicts of strings with ``<ans>``; existing answers are overwritten.
        config: generation options. Default: 3 beams (no beam search with ``do_sample=True``), and
            at most 100 tokens per answer. `max_new_tokens` is the limit on one answer.
        examples: documents with their answers as few-shot examples.
        constraints: dict from the keys under ``<ans>`` to allowed answers; if None, options and
            ratings such as (1-5) are read from each document; see `tokenizers.cpm_bee.tasks`.
        max_length: maximum length of a document including its examples, in tokens; None for no
            limit.
        batch_size: documents per batch.
        options: fields of `GenerationConfig` that replace those of `config`.

    Raises:
        ConfigError: the tokenizer belongs to another model, or an option does not apply to
            documents.
        DataError: a document is invalid; the message contains its index.
    """
    config = _check(model, tokenizer, config, options, batch_size)
    prompts = []
    for number, document in enumerate(documents):
        try:
            prompts.append(
                encode_prompt(
                    document, tokenizer, examples, max_length=max_length, constraints=constraints
                )
            )
        except DataError as error:
            raise DataError(f"document {number}: {error}") from error
    filled = []
    with eval_mode(model), torch.no_grad():
        for start in range(0, len(prompts), batch_size):
            filled += _fill(model, tokenizer, prompts[start : start + batch_size], config)
    return filled


def fill_each(
    model: CPMBee,
    tokenizer: CPMBeeTokenizer,
    documents: Iterable[Mapping[str, Any] | DataError],
    config: GenerationConfig | None = None,
    *,
    batch_size: int = 8,
    **options: Any,
) -> Iterator[dict[str, Any] | DataError]:
    """Yield the filled copy of each document, or its error, in order.

    Documents are filled and yielded batch by batch. A document longer than `longest_document`
    yields an error.

    Args:
        model: CPM-Bee model.
        tokenizer: the model's tokenizer.
        documents: documents as in `fill_documents`; an error among them is yielded unchanged.
        config: generation options as in `fill_documents`.
        batch_size: documents per batch.
        options: fields of `GenerationConfig` that replace those of `config`.

    Raises:
        ConfigError: same as in `fill_documents`.
    """
    config = _check(model, tokenizer, config, options, batch_size)
    longest, left = longest_document(model), iter(documents)
    while group := list(islice(left, batch_size)):
        encoded = [_encode(document, tokenizer, longest) for document in group]
        prompts = [prompt for prompt in encoded if isinstance(prompt, Prompt)]
        with eval_mode(model), torch.no_grad():
            answered = iter(_fill(model, tokenizer, prompts, config) if prompts else ())
        for prompt in encoded:
            yield next(answered) if isinstance(prompt, Prompt) else prompt


def longest_document(model: CPMBee) -> int:
    """Return the maximum length of a document in tokens.

    This is the training window of OpenBMB's CPM-Bee models or, if larger, the model's
    `max_seq_len`.
    """
    return max(_WINDOW, model.config.max_seq_len)


def _encode(
    document: Mapping[str, Any] | DataError, tokenizer: CPMBeeTokenizer, longest: int
) -> Prompt | DataError:
    if isinstance(document, DataError):
        return document
    try:
        return encode_prompt(document, tokenizer, max_length=longest)
    except DataError as error:
        return error


def _check(
    model: CPMBee,
    tokenizer: CPMBeeTokenizer,
    config: GenerationConfig | None,
    options: dict[str, Any],
    batch_size: int,
) -> GenerationConfig:
    """Validate tokenizer, options and batch size; return the complete generation config."""
    if len(tokenizer) != model.config.vocab_size:
        raise ConfigError(
            f"tokenizer and model do not match: the tokenizer has {len(tokenizer)} tokens, but "
            f"the model has vocab_size={model.config.vocab_size}. Load both from the same "
            "directory."
        )
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1.")
    return _complete(config, options)


def _complete(config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    """Return the generation config with the defaults of OpenBMB's CPM-Bee code."""
    if config is None:
        beams = 1 if options.get("do_sample") else _NUM_BEAMS
        config = GenerationConfig(max_new_tokens=_MAX_NEW_TOKENS, num_beams=beams)
    config = config.replace(**options)
    plain = GenerationConfig()
    idle = [name for name in _FIXED if getattr(config, name) != getattr(plain, name)]
    if idle:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in idle)
        raise ConfigError(
            f"options are not supported for CPM-Bee documents: {values}. Leave them out."
        )
    return config


def _fill(
    model: CPMBee, tokenizer: CPMBeeTokenizer, prompts: list[Prompt], config: GenerationConfig
) -> list[dict[str, Any]]:
    """Fill one batch of documents."""
    batch = collate_prompts(prompts, tokenizer)
    decoder = _DocumentDecoder(model, batch, tokenizer, config)
    start = torch.full((len(prompts), 1), tokenizer.bos_id, device=decoder.device)
    rows = run_decoder(
        decoder,
        start,
        torch.ones_like(start[:, 0]),
        config.replace(
            max_new_tokens=decoder.max_new_tokens,
            eos_token_id=decoder.finish,
            pad_token_id=decoder.finish,
        ),
    )
    return [
        batch.decode(number, decoder.split(row, number), tokenizer)
        for number, row in enumerate(rows[:, 1:].tolist())
    ]


class _Row(NamedTuple):
    """State of a sequence: document, index of the current answer, and tokens of this answer."""

    document: int
    slot: int
    written: tuple[int, ...]


class _DocumentDecoder(Decoder):
    """Decoder of a batch of documents.

    The model's logits are extended by additional outputs: one output that ends the sequence, and
    one for each answer but the last, which ends that answer. Each of these outputs occurs at most
    once in a sequence, so that repetition penalties cannot prevent an answer from ending.

    Attributes:
        finish: id of the output that ends a sequence.
        max_new_tokens: number of outputs of the longest sequence.
    """

    model: CPMBee

    def __init__(
        self,
        model: CPMBee,
        batch: PromptBatch,
        tokenizer: CPMBeeTokenizer,
        config: GenerationConfig,
    ) -> None:
        self.model, self._batch, self._tokenizer = model, batch, tokenizer
        self.device = next(model.parameters()).device
        self._limit = config.max_new_tokens
        inputs = {n: t.to(self.device) for n, t in to_arguments(batch.inputs).items()}
        tables = ("segment_rel", "ext_table_ids", "ext_table_sub")
        self._tables = {name: inputs.pop(name) for name in tables}
        ids, sub = inputs.pop("input_ids"), inputs.pop("input_sub")
        self._seen = inputs
        self.finish = len(tokenizer) + len(self._tables["ext_table_ids"])
        slots = max(len(prompt.encoded.answers) for prompt in batch.prompts)
        self._columns = self.finish + slots
        answer_texts = [texts for row in batch.allowed for texts in row if texts is not None]
        longest = max([self._limit + 1, *(len(text) for texts in answer_texts for text in texts)])
        self.max_new_tokens = slots * longest
        self._banned = torch.zeros(len(ids), self._columns, dtype=torch.bool, device=self.device)
        self._banned[:, tokenizer.eos_id] = True
        for number, outputs in enumerate(batch.banned):
            self._banned[number, list(outputs)] = True
        self._rows = [_Row(number, 0, ()) for number in range(len(ids))]
        self.cache = KVCache(len(model.layers), ids.shape[1] + self.max_new_tokens)
        model(ids, input_sub=sub, cache=self.cache, logits_to_keep=1, **self._seen, **self._tables)

    def run(self, tokens: Tensor) -> Tensor:
        """Run the model on the last chosen outputs (initially ``<s>``); return the next logits.

        Shape:
            tokens: (R, 1) -> (R, outputs) in fp32
        """
        chosen = tokens[:, 0].tolist()
        self._rows = [self._advance(*pair) for pair in zip(self._rows, chosen, strict=True)]
        fed = torch.tensor([self._next_input(row) for row in self._rows], device=self.device)
        ids, sub, position, segment, count = fed.int().t()[:, :, None].unbind()
        nothing = torch.zeros_like(ids)
        new = {
            "position": position,
            "context": torch.ones_like(ids, dtype=torch.bool),
            "sample_ids": nothing,
            "num_segments": count,
            "segment": segment,
            "segment_rel_offset": nothing,
        }
        self._seen = {name: torch.cat((seen, new[name]), 1) for name, seen in self._seen.items()}
        out = self.model(
            ids,
            input_sub=sub,
            cache=self.cache,
            logits_to_keep=1,
            **self._seen,
            **self._tables,
        )
        return self._choose_among(out.logits[:, -1].float())

    def _advance(self, row: _Row, token: int) -> _Row:
        """Return the state of a sequence after the output `token` was appended."""
        if token > self.finish:
            return _Row(row.document, row.slot + 1, ())
        if token in (self.finish, self._tokenizer.bos_id):
            return row
        return row._replace(written=(*row.written, token))

    def _next_input(self, row: _Row) -> tuple[int, int, int, int, int]:
        """Return the next model input: (id, sub id, position, segment, number of segments)."""
        prompt = self._batch.prompts[row.document]
        place_ids = len(row.written), prompt.encoded.answers[row.slot].segment, prompt.num_segments
        if not row.written:
            return self._tokenizer.bos_id, 0, *place_ids
        extra = row.written[-1] - len(self._tokenizer)
        token = (row.written[-1], 0) if extra < 0 else self._batch.ext_rows[extra]
        return *token, *place_ids

    def _choose_among(self, logits: Tensor) -> Tensor:
        """Extend the logits by the end outputs, with -inf for all forbidden outputs."""
        rows, vocabulary = self._rows, logits.shape[1]
        scores = logits.new_full((len(rows), self._columns), -torch.inf)
        scores[:, :vocabulary] = logits
        banned = self._banned[[row.document for row in rows]]
        for number, row in enumerate(rows):
            allowed = self._allowed(row)
            if allowed is not None:
                banned[number] = True
                inner = [output for output in allowed if output != self._tokenizer.eos_id]
                banned[number, inner] = False
        scores = scores.masked_fill(banned, -torch.inf)
        for number, row in enumerate(rows):
            allowed = self._allowed(row)
            if allowed is None or self._tokenizer.eos_id in allowed:
                scores[number, self._end(row)] = logits[number, self._tokenizer.eos_id]
        return scores

    def _allowed(self, row: _Row) -> set[int] | None:
        """Return the token ids that may come next in a sequence's answer; None if all may."""
        texts, done = self._batch.allowed[row.document][row.slot], len(row.written)
        if texts is None:
            return {self._tokenizer.eos_id} if done >= self._limit else None
        return {text[done] for text in texts if len(text) > done and text[:done] == row.written}

    def _end(self, row: _Row) -> int:
        """Return the id of the output that ends the current answer of a sequence.

        For the last answer this is `finish`, which also ends the sequence.
        """
        last = len(self._batch.prompts[row.document].encoded.answers) - 1
        return self.finish if row.slot == last else self.finish + 1 + row.slot

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i of the batch with a copy of the old sequence ``rows[i]``."""
        self.cache.reorder(rows)
        self._seen = {name: seen.index_select(0, rows) for name, seen in self._seen.items()}
        relations = self._tables["segment_rel"].index_select(0, rows)
        self._tables = {**self._tables, "segment_rel": relations}
        self._rows = [self._rows[number] for number in rows.tolist()]

    def split(self, outputs: list[int], document: int) -> list[list[int] | None]:
        """Split the outputs of a finished sequence into answers; None for missing answers."""
        answers: list[list[int] | None] = [[]]
        for output in outputs:
            if output == self.finish:
                break
            if output > self.finish:
                answers.append([])
            else:
                answers[-1].append(output)  # type: ignore[union-attr]
        count = len(self._batch.prompts[document].encoded.answers)
        return answers + [None] * (count - len(answers))
