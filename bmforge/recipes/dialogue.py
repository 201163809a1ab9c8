"""Fine-tuning of EVA on dialogues: the history is the input, the last utterance the target.

Source: ``src/eva_datasets.py`` of thu-coai/EVA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.sources.text_files import read_lines
from bmforge.errors import ConfigError, DataError
from bmforge.infer.openbmb.chat import join_history
from bmforge.models.eva import EVAConfig
from bmforge.parallel import World
from bmforge.recipes.inputs.document_segments import open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig, open_examples
from bmforge.recipes.inputs.skipped_data import log_skipped
from bmforge.recipes.inputs.splitting import refuse_split
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.tokenizers import EVATokenizer

__all__ = ["DialogueConfig", "EVADialogueConfig", "train_dialogue"]


@dataclass(kw_only=True)
class DialogueConfig(RunConfig):
    """Config for training on dialogues; the other fields are those of `RunConfig`.

    Args:
        data: `paths` are text files with one dialogue per line and tabs between utterances;
            `seq_len` is the maximum length of the history in tokens.
        target_len: maximum length of an answer in tokens; dialogues with a longer answer are
            skipped.
    """

    data: ExampleConfig = field(default_factory=lambda: ExampleConfig(seq_len=128))
    target_len: int = 128


@dataclass(kw_only=True)
class EVADialogueConfig(DialogueConfig):
    """Config for training an EVA on dialogues.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    run_dir: Path = Path("runs/eva-dialogue")
    model: EVAConfig = field(default_factory=lambda: EVAConfig.preset("eva2.0-base"))


def train_dialogue(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training on dialogues.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, _check, head="sequence_to_sequence")


def _check(config: Any, processes: int) -> None:
    refuse_split(config.data.split)
    if config.data.seq_len < 3:
        raise ConfigError(f"data.seq_len={config.data.seq_len} must be at least 3.")


class _Dialogues:
    """`ExampleSource` of dialogue histories with their answers."""

    def __init__(self, paths: Sequence[str], config: Any, tokenizer: EVATokenizer) -> None:
        window, longest = config.data.seq_len, config.target_len
        end, blank = tokenizer.sep_id, tokenizer.sentinel_id(0)
        self._pairs: list[tuple[list[int], list[int]]] = []
        total = skipped = 0
        for utterances in (line for path in paths for line in _read_dialogues(path)):
            total += 1
            *history, answer = (tokenizer.encode(text) for text in utterances)
            if len(answer) + 1 > longest:
                skipped += 1
            else:
                self._pairs.append((join_history(history, end, blank, window), [*answer, end]))
        reason = f"with an answer longer than target_len={longest}"
        log_skipped([reason] * skipped, total, "dialogues")
        self.columns: Mapping[str, tuple[int, int]] = {
            "input_ids": (window, config.model.pad_token_id),
            "attention_mask": (window, 0),
            "labels": (longest, IGNORE_INDEX),
        }
        self.fingerprint = fingerprint_of(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the dialogue at `index`; `seed` has no effect."""
        source, target = self._pairs[index]
        return {"input_ids": source, "attention_mask": [1] * len(source), "labels": target}


def _read_dialogues(path: str) -> list[list[str]]:
    """Read a file with one dialogue per line; return the utterances of each dialogue."""
    dialogues = []
    for number, line in enumerate(read_lines(path), 1):
        utterances = [text for text in line.strip().split("\t") if text.strip()]
        if len(utterances) == 1:
            raise DataError(
                f"line {number} of {path!r} has one utterance (needed: two or more, "
                "separated by tabs)."
            )
        if utterances:
            dialogues.append(utterances)
    return dialogues


def _open_data(config: Any, rows: World) -> TrainingData:
    tokenizer = open_tokenizer(config, EVATokenizer)
    validation = config.data.validation
    return open_examples(
        _Dialogues(config.data.paths, config, tokenizer),
        _Dialogues(validation, config, tokenizer) if validation else None,
        config.data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
    )
