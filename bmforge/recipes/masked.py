"""Pretraining of encoders by masked language modeling (BERT and its relatives).

Of the predicted tokens 80 % are replaced by the mask token, 10 % by a random token, and 10 % are
unchanged. The predicted tokens are sampled again in every epoch.
Source: Devlin et al., "BERT" (2019), section 3.1; without next-sentence prediction, as in Liu et
al., "RoBERTa" (2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.load.order import derive_key, draw_below, permute
from bmforge.errors import ConfigError
from bmforge.parallel import World
from bmforge.recipes.inputs.document_segments import DocumentSegments, open_segments, open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig, open_examples
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.tokenizers import Tokenizer

__all__ = ["MaskedConfig", "mask_tokens", "train_masked"]

# Of ten predicted tokens, the number of masked and the number of randomly replaced ones.
_HIDDEN, _REPLACED, _OF = 8, 1, 10


@dataclass(kw_only=True)
class MaskedConfig(RunConfig):
    """Config for pretraining on masked tokens; the other fields are those of `RunConfig`.

    Args:
        data: `paths` are directories of `bmforge prepare` or token stores; `seq_len` includes the
            text and its BOS and EOS tokens.
        mask_ratio: fraction of the tokens, above 0 and below 1, that are selected for prediction.
        shortest: minimum length of a text in tokens; shorter texts are skipped.
    """

    data: ExampleConfig = field(default_factory=ExampleConfig)
    mask_ratio: float = 0.15
    shortest: int = 10


def train_masked(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training on masked tokens.

    Args:
        config: a `MaskedConfig` whose `model` is the config of a BERT, RoBERTa or Longformer.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, head="masked_lm")


def mask_tokens(
    ids: Sequence[int], mask: int, vocab_size: int, ratio: float, seed: tuple[int | str, ...]
) -> tuple[list[int], list[int]]:
    """Mask tokens of a text; return the text and its labels (-100 if not predicted).

    Args:
        ids: token ids of the text.
        mask: id of the mask token.
        vocab_size: exclusive upper bound of random replacement tokens.
        ratio: fraction of the tokens that are predicted; at least one token is.
        seed: random seed of the masking.
    """
    count = max(1, round(len(ids) * ratio))
    places = permute(np.arange(count), len(ids), derive_key(*seed, "places")).tolist()
    shown, labels = list(ids), [IGNORE_INDEX] * len(ids)
    for number, position in enumerate(places):
        labels[position] = ids[position]
        kind = draw_below(_OF, derive_key(*seed, "kind", number))
        if kind < _HIDDEN:
            shown[position] = mask
        elif kind < _HIDDEN + _REPLACED:
            shown[position] = draw_below(vocab_size, derive_key(*seed, "other", number))
    return shown, labels


class _MaskedExamples:
    """Masked texts with BOS and EOS tokens, as an `ExampleSource`."""

    def __init__(self, segments: DocumentSegments, config: Any, tokenizer: Tokenizer) -> None:
        self._segments, self._ratio, self._size = segments, config.mask_ratio, len(tokenizer)
        self._begin, self._end, self._mask = _find_marks(tokenizer)
        width = config.data.seq_len
        self.columns: Mapping[str, tuple[int, int]] = {
            "input_ids": (width, config.model.pad_token_id or 0),
            "attention_mask": (width, 0),
            "labels": (width, IGNORE_INDEX),
        }
        self.fingerprint = fingerprint_of(segments.fingerprint, config.mask_ratio, width)
        self.content = segments.content

    def __len__(self) -> int:
        return len(self._segments)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the text at `index` with randomly masked tokens, which depend on `seed`."""
        ids = self._segments[index].tolist()
        shown, labels = mask_tokens(ids, self._mask, self._size, self._ratio, seed)
        return {
            "input_ids": [self._begin, *shown, self._end],
            "attention_mask": [1] * (len(ids) + 2),
            "labels": [IGNORE_INDEX, *labels, IGNORE_INDEX],
        }


def _find_marks(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the ids of the tokenizer's begin, end and mask tokens."""
    ids = {role: tokenizer.role_id(role) for role in ("cls", "sep", "mask")}
    missing = [role for role, id in ids.items() if id is None]
    if missing:
        raise ConfigError(
            f"the tokenizer has no tokens for the roles {', '.join(missing)}. Use the "
            "tokenizer of a BERT model, or set them in its tokenizer_config.json "
            "(cls_token, sep_token, mask_token)."
        )
    begin, end, mask = (id for id in ids.values() if id is not None)
    return begin, end, mask


def _open_data(config: Any, rows: World) -> TrainingData:
    tokenizer = open_tokenizer(config)
    _, end, _ = _find_marks(tokenizer)
    ends = tokenizer.eos_id if tokenizer.eos_id is not None else end
    segments, held_out = open_segments(
        config.data,
        config.model.vocab_size,
        max(1, config.shortest),
        config.data.seq_len - 2,
        ends,
    )
    return open_examples(
        _MaskedExamples(segments, config, tokenizer),
        None if held_out is None else _MaskedExamples(held_out, config, tokenizer),
        config.data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
    )
