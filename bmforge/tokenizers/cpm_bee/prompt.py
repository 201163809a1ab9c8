"""Encodes CPM-Bee prompts: documents whose answers the model will generate.

The prompt is the document without the answers. The answers are generated one slot after the other;
each is a segment that begins with ``<s>`` and is generated until ``</s>``.
Source: ``cpm_live/generation/bee.py`` of OpenBMB/CPM-Bee. There, `num_segments` of generated tokens
is that of the last in-context example; here, it is that of the document, as in training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers.cpm_bee.batch import (
    Instance,
    extension_inputs,
    extension_rows,
    join_examples,
    pad_relations,
)
from bmforge.tokenizers.cpm_bee.document import (
    EncodedDocument,
    Extension,
    Token,
    decode_document,
    encode_document,
    encode_text,
)
from bmforge.tokenizers.cpm_bee.tasks import find_constraints
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["Prompt", "PromptBatch", "collate_prompts", "encode_prompt"]

Path = tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """Encoded prompt: a document whose answers will be generated.

    Attributes:
        document: document as passed to `encode_prompt`.
        encoded: encoded document; its `answers` are the slots to generate, in order.
        instance: tokens of the document and its examples, without answer slots.
        allowed: token sequences allowed in each slot, without ``</s>``; None if unconstrained.
    """

    document: Mapping[str, Any]
    encoded: EncodedDocument
    instance: Instance
    allowed: tuple[tuple[tuple[Token, ...], ...] | None, ...]

    @property
    def num_segments(self) -> int:
        """Number of segments in the document, used as `num_segments` of generated tokens."""
        return self.encoded.n_segments

    @property
    def extension(self) -> Extension:
        """Extension table of the document and its examples."""
        return self.instance.extension


@dataclass(frozen=True)
class PromptBatch:
    """Batch of encoded prompts.

    Attributes:
        prompts: prompt of each sequence.
        inputs: arguments of CPM-Bee's ``inference``, see `collate_prompts`.
        ext_rows: (base id, sub id) of each output id from `vocab_size` on.
        banned: output ids that must not be generated, per sequence.
        allowed: allowed answers per sequence and slot, as output ids ending with ``</s>``; None if
            unconstrained.
    """

    prompts: tuple[Prompt, ...]
    inputs: dict[str, NDArray[Any]]
    ext_rows: tuple[Token, ...]
    banned: tuple[tuple[int, ...], ...]
    allowed: tuple[tuple[tuple[tuple[int, ...], ...] | None, ...], ...]

    def decode(
        self, row: int, answers: Sequence[Iterable[int] | None], tokenizer: CPMBeeTokenizer
    ) -> dict[str, Any]:
        """Return the document of prompt `row` with the generated answers inserted."""
        prompt = self.prompts[row]
        encoded = prompt.encoded._replace(extension=prompt.extension)
        return decode_document(prompt.document, encoded, answers, tokenizer, self.ext_rows)


def encode_prompt(
    document: Mapping[str, Any],
    tokenizer: CPMBeeTokenizer,
    examples: Sequence[Mapping[str, Any]] = (),
    *,
    max_length: int | None = None,
    constraints: Mapping[Path, Collection[str]] | None = None,
) -> Prompt:
    """Encode a document as a prompt; texts under ``<ans>`` are ignored.

    Args:
        document: nested dict of texts with ``<ans>``.
        tokenizer: CPM-Bee's tokenizer.
        examples: documents with answers, used as context.
        max_length: window in tokens; None for no limit.
        constraints: mapping from the path of a slot (keys under ``<ans>``) to its allowed texts
            (default: the result of `find_constraints`).

    Raises:
        ConfigError: a constraint names a slot that does not exist, or allows no text.
        DataError: the document is invalid (see `encode_document`) or, with its examples, longer
            than the window, or an allowed answer cannot be generated.
    """
    encoded = [encode_document(document, tokenizer, max_length=max_length, blank_answers=True)]
    for example in examples:
        extension = encoded[-1].extension
        encoded.append(encode_document(example, tokenizer, extension=extension))
    instance = _without_answers(join_examples(encoded))
    if max_length is not None and len(instance) > max_length:
        raise DataError(
            f"the document and its {len(examples)} examples have {len(instance)} tokens, more "
            f"than max_length={max_length}. Use fewer or shorter examples."
        )
    constraints = find_constraints(document) if constraints is None else constraints
    slots = [slot.path for slot in encoded[0].answers]
    unknown = [path for path in constraints if path not in slots]
    if unknown:
        raise ConfigError(
            f"constraints contains the unknown answer slots {unknown} (slots of the document: "
            f"{slots})."
        )
    allowed = tuple(
        _tokens_of(constraints[path], path, tokenizer, instance.extension)
        if path in constraints
        else None
        for path in slots
    )
    return Prompt(document, encoded[0], instance, allowed)


def collate_prompts(prompts: Sequence[Prompt], tokenizer: CPMBeeTokenizer) -> PromptBatch:
    """Collate prompts into a batch, padded on the left.

    Shape:
        input, input_sub, position, sample_ids, num_segments, segment, segment_rel_offset: (B, T)
        int32; num_segments is 0 in padding
        context: (B, T) bool, False in padding
        segment_rel: (B, R) int32
        ext_table_ids, ext_table_sub: (E,) int32
    """
    instances = [prompt.instance for prompt in prompts]
    tokens = extension_rows(instances)
    columns: dict[str, Sequence[NDArray[Any]]] = {
        "input": [instance.ids for instance in instances],
        "input_sub": [instance.subs for instance in instances],
        "position": [np.arange(len(instance), dtype=np.int32) for instance in instances],
        "context": [instance.context for instance in instances],
        "sample_ids": [instance.sample_ids for instance in instances],
        "num_segments": [instance.num_segments for instance in instances],
        "segment": [instance.segs for instance in instances],
        "segment_rel_offset": [instance.segment_rel_offset for instance in instances],
    }
    inputs = {name: _pad_left(values) for name, values in columns.items()}
    inputs["segment_rel"] = pad_relations([instance.segment_rel for instance in instances])
    inputs.update(extension_inputs(tokens))
    numbers = {token: len(tokenizer) + i for i, token in enumerate(tokens)}
    count = len(inputs["ext_table_ids"])
    return PromptBatch(
        tuple(prompts), inputs, tuple(tokens),
        tuple(_banned(prompt.extension, tokenizer, numbers, count) for prompt in prompts),
        tuple(_outputs(prompt, tokenizer, numbers) for prompt in prompts),
    )  # fmt: skip


def _without_answers(instance: Instance) -> Instance:
    """Return the instance without its answer slots, which contain only ``<s>``."""
    is_context = instance.context
    names = (
        "ids", "subs", "context", "segs", "sample_ids", "num_segments", "segment_rel_offset",
    )  # fmt: skip
    return replace(instance, **{name: getattr(instance, name)[is_context] for name in names})


def _tokens_of(
    texts: Collection[str], path: Path, tokenizer: CPMBeeTokenizer, extension: Extension
) -> tuple[tuple[Token, ...], ...]:
    """Encode each text that is allowed in a slot."""
    where = ".".join(("<ans>", *path))
    if not texts or isinstance(texts, str):
        raise ConfigError(
            f"the constraint of {where} must be a non-empty list of strings, not {texts!r}."
        )
    allowed = []
    for text in texts:
        tokens, more = encode_text(text, tokenizer, extension)
        if len(more.texts) != len(extension.texts):
            unseen = [name for id, name in more.texts.items() if id not in extension.texts]
            raise DataError(
                f"the allowed answer {text!r} of {where} contains {unseen[0]!r}, which is neither "
                "in the vocabulary nor in the document, so it cannot be generated. Add "
                f"{unseen[0]!r} to the document, for example as an option, or allow another answer."
            )
        allowed.append(tuple(tokens))
    return tuple(allowed)


def _banned(
    extension: Extension, tokenizer: CPMBeeTokenizer, numbers: Mapping[Token, int], count: int
) -> tuple[int, ...]:
    """Return the output ids that the model must not generate for a prompt.

    These are ``<pad>``, ``<s>``, ``<unk>`` if the document does not contain it, and extension
    tokens of other documents.
    """
    own = extension.names
    out = {tokenizer.pad_id, tokenizer.bos_id}
    if (tokenizer.unk_id, 0) not in own:
        out.add(tokenizer.unk_id)
    rows = {numbers[token] for token in own if token in numbers}
    out |= set(range(len(tokenizer), len(tokenizer) + count)) - rows
    return tuple(sorted(out))


def _outputs(
    prompt: Prompt, tokenizer: CPMBeeTokenizer, numbers: Mapping[Token, int]
) -> tuple[tuple[tuple[int, ...], ...] | None, ...]:
    """Return, for each slot, the allowed answers as output ids ending with ``</s>``, or None."""
    return tuple(
        None
        if slot is None
        else tuple(
            (*(numbers[token] if token[1] else token[0] for token in tokens), tokenizer.eos_id)
            for tokens in slot
        )
        for slot in prompt.allowed
    )


def _pad_left(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    width = max(map(len, values))
    padded = np.zeros((len(values), width), dtype=values[0].dtype)
    for row, value in zip(padded, values, strict=True):
        row[width - len(value) :] = value
    return padded
