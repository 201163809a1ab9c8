"""Training of CPM-Ant with masked tokens and text continuation.

Every text is preceded by the soft prompt of its objective, so that one model learns both objectives
and the prompt selects one of them at inference. With `init_from`, the recipe fine-tunes a model.
Source: ``CPMAntPretrainDataset`` of OpenBMB/CPM-Live and its data (prompt 1 and segment 1 for the
hidden tokens, prompt 2 and segment 2 for the continuation). The question answering objectives of
CPM-Ant+, with separate segments, are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.load.order import derive_key, draw_below, permute
from bmforge.errors import ConfigError
from bmforge.models.cpm_ant import CPMAntConfig
from bmforge.parallel import World
from bmforge.recipes.inputs.document_segments import DocumentSegments, open_segments, open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig, open_examples
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.tokenizers import Tokenizer

__all__ = ["AntConfig", "CPMAntTrainConfig", "hide_tokens", "train_ant"]

_SHORTEST = 32
_TASKS = {"mlm": 1, "lm": 2}  # index of the soft prompt, and segment id of the text
_DRAWN_FROM = 1 << 30


@dataclass(kw_only=True)
class AntConfig(RunConfig):
    """Config for training on masked tokens and continuations.

    The other fields are those of `RunConfig`.

    Args:
        data: `paths` are directories of `bmforge prepare` or token stores; `seq_len` includes the
            prompt, the text, and its BOS and EOS tokens.
        mlm_ratio: fraction of the texts in which tokens at random positions are masked; in the
            other texts, the last tokens are masked.
        shortest: minimum length of a text in tokens; shorter texts are skipped.
    """

    data: ExampleConfig = field(default_factory=lambda: ExampleConfig(seq_len=1024))
    mlm_ratio: float = 0.5
    shortest: int = _SHORTEST


@dataclass(kw_only=True)
class CPMAntTrainConfig(AntConfig):
    """Config for training a CPM-Ant.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    run_dir: Path = Path("runs/cpm-ant-train")
    model: CPMAntConfig = field(default_factory=lambda: CPMAntConfig.preset("cpm-ant-10b"))


def train_ant(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume the training of a CPM-Ant.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, _check, head="language_model")


def _check(config: Any, processes: int) -> None:
    if not 0 <= config.mlm_ratio <= 1:
        raise ConfigError(f"mlm_ratio={config.mlm_ratio} must be from 0 to 1.")
    if config.model.prompt_types <= max(_TASKS.values()):
        raise ConfigError(f"model.prompt_types={config.model.prompt_types} must be at least 3.")


def hide_tokens(ids: Sequence[int], task: str, seed: tuple[int | str, ...]) -> Example:
    """Mask some tokens of a text; return the model inputs and labels of the example.

    Args:
        ids: token ids of the text with its BOS and EOS tokens; at least 2.
        task: "mlm" masks random tokens except the first, "lm" masks the last tokens. The number
            of masked tokens is uniformly distributed from 1 to ``len(ids) - 1``.
        seed: random seed of the masked positions.

    Returns:
        dict with ``input_ids``, ``context`` (0 for masked tokens), ``segment`` and ``labels`` (the
        next token, if it is masked).
    """
    length = len(ids)
    count = 1 + draw_below(length - 1, derive_key(*seed, "count"))
    hidden = np.arange(length - count, length)
    if task == "mlm":
        places = permute(np.arange(count), length - 1, derive_key(*seed, "places"))
        hidden = 1 + places
    context = np.ones(length, dtype=np.int64)
    context[hidden] = 0
    labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
    labels[hidden - 1] = np.asarray(ids)[hidden]
    return {
        "input_ids": list(ids),
        "context": context.tolist(),
        "segment": [_TASKS[task]] * length,
        "labels": labels.tolist(),
    }


class _AntExamples:
    """Texts with their soft prompts, as an `ExampleSource`."""

    def __init__(self, segments: DocumentSegments, config: Any, tokenizer: Tokenizer) -> None:
        self._segments, self._config = segments, config
        assert tokenizer.bos_id is not None
        assert tokenizer.eos_id is not None
        self._begin, self._end = tokenizer.bos_id, tokenizer.eos_id
        width, padding = config.data.seq_len, config.model.pad_token_id
        fillings = {
            "input_ids": padding, "context": 0, "segment": 0, "attention_mask": 0,
            "labels": IGNORE_INDEX,
        }  # fmt: skip
        self.columns: Mapping[str, tuple[int, int]] = {n: (width, f) for n, f in fillings.items()}
        self.fingerprint = fingerprint_of(segments.fingerprint, config.mlm_ratio, width)
        self.content = segments.content

    def __len__(self) -> int:
        return len(self._segments)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the text at `index` with a random objective and mask, which depend on `seed`."""
        drawn = draw_below(_DRAWN_FROM, derive_key(*seed, "task")) / _DRAWN_FROM
        task = "mlm" if drawn < self._config.mlm_ratio else "lm"
        ids = [self._begin, *self._segments[index].tolist(), self._end]
        text = hide_tokens(ids, task, seed)
        model = self._config.model
        size = model.prompt_length
        first = _TASKS[task] * size + (model.vocab_size if model.prompts_in_vocabulary else 0)
        prompt = {
            "input_ids": list(range(first, first + size)),
            "context": [1] * size,
            "segment": [0] * size,
            "labels": [IGNORE_INDEX] * size,
        }
        row = {name: [*prompt[name], *text[name]] for name in prompt}
        return {**row, "attention_mask": [1] * len(row["labels"])}


def _open_data(config: Any, rows: World) -> TrainingData:
    tokenizer = open_tokenizer(config)
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise ConfigError(
            "the tokenizer has no beginning-of-sequence or no end-of-sequence token. Set both in "
            "the tokenizer's config."
        )
    longest = config.data.seq_len - config.model.prompt_length - 2
    segments, held_out = open_segments(
        config.data, config.model.vocab_size, max(1, config.shortest), longest, tokenizer.eos_id
    )
    return open_examples(
        _AntExamples(segments, config, tokenizer),
        None if held_out is None else _AntExamples(held_out, config, tokenizer),
        config.data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
    )
