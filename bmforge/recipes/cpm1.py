"""Fine-tuning of CPM-1 on ChID (choosing the idiom for a blank) and STC (replies to posts).

A ChID text ends with the index of the correct idiom, and only this index contributes to the loss.
STC is plain text with a loss on every token.

Source: ``preprocess_chid_finetune.py``, ``finetune_chid.py``, ``preprocess_stc_finetune.py`` and
``finetune_lm.py`` of TsinghuaAI/CPM-1-Finetune.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bmforge.batch import IGNORE_INDEX
from bmforge.data import Batch
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.sources.text_files import read_lines, read_text
from bmforge.errors import ConfigError, DataError
from bmforge.models import Model
from bmforge.models.cpm1 import CPM1Config
from bmforge.parallel import ROW_AXES, World, mesh_of, reshard_, sum_over_axes
from bmforge.recipes.inputs.document_segments import open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig, iter_held_out, open_examples
from bmforge.recipes.inputs.skipped_data import log_skipped
from bmforge.recipes.inputs.splitting import refuse_split
from bmforge.recipes.run import Launch, Results, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.surgery import eval_mode
from bmforge.tokenizers import CPM1Tokenizer
from bmforge.train import EvalResult

__all__ = [
    "CPM1TextsConfig",
    "CPM1TuneConfig",
    "ChIDConfig",
    "STCConfig",
    "encode_chid",
    "tune_chid",
    "tune_stc",
]

_BLANK = re.compile(r"#idiom\d+#")
_NUM_OPTIONS = 10


@dataclass(kw_only=True)
class CPM1TextsConfig(RunConfig):
    """Config for fine-tuning on CPM-1's tasks; the other fields are those of `RunConfig`.

    Args:
        data: training data; examples longer than `seq_len` are skipped. For ChID, `paths` are files
            with one JSON object per line, with `content` and `candidates`; FILE_answer.json next to
            FILE.json has the indices of the correct idioms. For STC, `paths` are text files with a
            post, a tab and its reply on each line.
    """

    data: ExampleConfig = field(default_factory=ExampleConfig)


@dataclass(kw_only=True)
class CPM1TuneConfig(CPM1TextsConfig):
    """Config for fine-tuning a CPM-1.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    model: CPM1Config = field(default_factory=lambda: CPM1Config.preset("cpm1-small"))


@dataclass(kw_only=True)
class ChIDConfig(CPM1TuneConfig):
    """Config for fine-tuning a CPM-1 on ChID.

    `data.paths` are files with one JSON object per line, with `content` and `candidates`;
    FILE_answer.json next to FILE.json has the indices of the correct idioms.
    """

    run_dir: Path = Path("runs/cpm1-chid")


@dataclass(kw_only=True)
class STCConfig(CPM1TuneConfig):
    """Config for fine-tuning a CPM-1 on STC.

    `data.paths` are text files with a post, a tab and its reply on each line.
    """

    run_dir: Path = Path("runs/cpm1-stc")


def tune_chid(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume fine-tuning on ChID; write the accuracy to `results.json`.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_chid, _check, head="language_model")


def tune_stc(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume fine-tuning on STC.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_stc, _check, head="language_model")


def _check(config: Any, processes: int) -> None:
    refuse_split(config.data.split)


class _Texts:
    """Texts with a loss on all tokens after a prompt, as an `ExampleSource`.

    Args:
        texts: (token ids, prompt length in tokens) of each text.
        config: run config; texts are padded to `data.seq_len`, and longer ones are skipped.
    """

    def __init__(self, texts: Iterator[tuple[list[int], int]], config: Any) -> None:
        width = config.data.seq_len
        encoded = list(texts)
        self._texts = [(ids, read) for ids, read in encoded if len(ids) <= width]
        reason = f"longer than data.seq_len={width}"
        log_skipped([reason] * (len(encoded) - len(self._texts)), len(encoded), "texts")
        # Padding follows the text, so it does not affect the text's causal attention.
        self.columns: Mapping[str, tuple[int, int]] = {
            "input_ids": (width, 0),
            "labels": (width, IGNORE_INDEX),
        }
        self.fingerprint = fingerprint_of(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the text at `index`; `seed` has no effect."""
        ids, read = self._texts[index]
        return {"input_ids": ids, "labels": [IGNORE_INDEX] * read + ids[read:]}


def encode_chid(
    text: str, blank: re.Match[str], candidates: Sequence[str], tokenizer: CPM1Tokenizer
) -> list[int]:
    """Encode the prompt for one blank of a text; the answer's index follows the prompt.

    The form is 上下文: text with ``<mask>`` ``<eod>`` 选项0: idiom ``<sep>`` ... ``<mask>`` 答案是:
    """
    mask, sep, eod = (_id(tokenizer, role) for role in ("mask", "sep", "eod"))
    before = _BLANK.sub("", text[: blank.start()]).strip()
    after = _BLANK.sub("", text[blank.end() :]).strip()
    ids = [*tokenizer.encode("上下文:"), *tokenizer.encode(before), mask]
    ids += [*tokenizer.encode(after), eod]
    for number, idiom in enumerate(candidates):
        ids += [*tokenizer.encode(f"选项{number}:"), *tokenizer.encode(idiom.strip()), sep]
    return [*ids, mask, *tokenizer.encode("答案是:")]


def _id(tokenizer: CPM1Tokenizer, role: str) -> int:
    id = tokenizer.role_id(role)
    if id is None:
        raise ConfigError(f"the tokenizer has no token for {role!r}. Use CPM-1's tokenizer.")
    return id


def _number_ids(tokenizer: CPM1Tokenizer) -> list[int]:
    """Return the token ids of the option indices, as the tokenizer encodes them after 选项."""
    numbers = []
    for number in range(_NUM_OPTIONS):
        ids = tokenizer.encode(f"选项{number}:")
        matching = [i for i in ids if str(number) in tokenizer.decode([i])]
        if not matching:
            raise ConfigError(
                f"the tokenizer has no token for the option number {number}. Use CPM-1's tokenizer."
            )
        numbers.append(matching[0])
    return numbers


def _chid_texts(
    paths: Sequence[str], tokenizer: CPM1Tokenizer, numbers: Sequence[int]
) -> Iterator[tuple[list[int], int]]:
    """Yield (token ids, prompt length) of every question; the index of the answer ends the ids."""
    for path in paths:
        file = Path(path)
        beside = file.with_name(f"{file.stem}_answer{file.suffix}")
        answers = _parse(read_text(beside), str(beside))
        for line_number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            row = _parse(line, f"{path}, line {line_number}")
            where = f"{path}, line {line_number}"
            texts, candidates = _read_question(row, where)
            for text in texts:
                for blank in _BLANK.finditer(text):
                    answer = answers.get(blank.group())
                    if not isinstance(answer, int) or not 0 <= answer < len(candidates):
                        raise DataError(
                            f"{where}: the answer to {blank.group()} in {str(beside)!r} is "
                            f"{answer!r} (needed: an integer from 0 to {len(candidates) - 1})."
                        )
                    question = encode_chid(text, blank, candidates, tokenizer)
                    yield [*question, numbers[answer]], len(question)


def _read_question(row: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Parse a line of a ChID file; return its texts and its candidates."""
    content, candidates = row.get("content"), row.get("candidates")
    texts = [content] if isinstance(content, str) else content
    lists = isinstance(texts, list) and isinstance(candidates, list)
    if (
        not lists
        or not 2 <= len(candidates) <= _NUM_OPTIONS  # type: ignore[arg-type]
        or not all(isinstance(text, str) for text in (*texts, *candidates))  # type: ignore[misc]
    ):
        raise DataError(
            f"{where} must have the fields 'content', a string or a list of strings, and "
            f"'candidates', a list of 2 to {_NUM_OPTIONS} strings."
        )
    return texts, candidates  # type: ignore[return-value]


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}). Correct or remove the line.") from error
    if not isinstance(parsed, dict):
        raise DataError(
            f"{where} is a JSON {type(parsed).__name__} (needed: an object). Correct or remove the "
            "line."
        )
    return parsed


def _stc_texts(paths: Sequence[str], tokenizer: CPM1Tokenizer) -> Iterator[tuple[list[int], int]]:
    """Yield the token ids of every post with its reply; the loss is on all tokens."""
    for path in paths:
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            parts = ["".join(part.split()) for part in line.split("\t")]
            if len(parts) != 2 or not all(parts):
                raise DataError(
                    f"{path}, line {number} must be a post and an answer, separated by one tab."
                )
            text = f"对话上文:{parts[0]} 回复:{parts[1]}"
            yield [*tokenizer.encode(text), _id(tokenizer, "eod")], 0


def _open_chid(config: Any, rows: World) -> TrainingData:
    tokenizer = open_tokenizer(config, CPM1Tokenizer)
    numbers, data = _number_ids(tokenizer), config.data
    source = _Texts(_chid_texts(data.paths, tokenizer, numbers), config)
    held_out = None
    if data.validation:
        held_out = _Texts(_chid_texts(data.validation, tokenizer, numbers), config)

    def figures(model: Model, evaluation: EvalResult) -> Results:
        assert held_out is not None
        batches = iter_held_out(held_out, data, rows.rank, rows.size)
        return {"accuracy": {"model": _measure_accuracy(model, batches, numbers, rows)}}

    return open_examples(
        source, held_out, data, rows, save_tokenizer=tokenizer.save_pretrained, figures=figures
    )


def _open_stc(config: Any, rows: World) -> TrainingData:
    tokenizer, data = open_tokenizer(config, CPM1Tokenizer), config.data
    return open_examples(
        _Texts(_stc_texts(data.paths, tokenizer), config),
        _Texts(_stc_texts(data.validation, tokenizer), config) if data.validation else None,
        data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
    )


def _measure_accuracy(
    model: Model, batches: Iterator[Batch], numbers: Sequence[int], rows: World
) -> float:
    """Return the fraction of questions whose correct index has the highest logit."""
    counts = torch.zeros(2, dtype=torch.float64, device=rows.device)
    with eval_mode(model), torch.no_grad():
        for ids, labels in ((b["input_ids"], b["labels"]) for b in batches):
            for row, label_row in zip(ids.to(rows.device), labels.to(rows.device), strict=True):
                answered = label_row != IGNORE_INDEX
                # A row without labels pads the batch. It runs through the model, since all
                # processes of a sharded model need the same number of calls, but it is not counted.
                counted = bool(answered.any())
                position = int(answered.nonzero()[-1]) if counted else 1
                logits = model(row[None, :position], logits_to_keep=1).logits[0, -1, list(numbers)]
                right = counted and numbers[int(logits.argmax())] == int(label_row[position])
                counts += torch.tensor([right, counted], device=rows.device)
    reshard_(model)
    right, total = sum_over_axes(counts, mesh_of(model), *ROW_AXES).tolist()
    return right / max(total, 1)
