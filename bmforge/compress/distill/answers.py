"""Saved teacher predictions: the top-k tokens per position, written once and read in training.

A sequence is identified by a hash of its inputs (ids, mask, positions). The batch order and the
parallel layout therefore do not matter, and a sequence without saved predictions raises an error.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.compress.batches import prepare_batch
from bmforge.compress.distill.capture import Recorder, take_prediction
from bmforge.errors import CheckpointError, ConfigError, DataError
from bmforge.files import partial_name, read_json, replace_file
from bmforge.nn import LMHead
from bmforge.nn.top_k_distillation import TopKPredictions, pick_answers
from bmforge.surgery import eval_mode

__all__ = ["TeacherAnswers", "fingerprint_vocabulary", "write_answers"]

_FACTS, _SHARD = "answers.json", "answers-{:05d}.safetensors"
_NOT_SEEN = ("labels", "num_items_in_batch", "use_cache")
_CHUNK_ELEMENTS = 1 << 23


def fingerprint_vocabulary(tokens: Mapping[str, int] | None) -> str:
    """Return a hash of all tokens and their ids as hex digits; "" without a vocabulary."""
    if tokens is None:
        return ""
    text = repr(sorted(tokens.items())).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=16).hexdigest()


@torch.no_grad()
def write_answers(
    teacher: nn.Module,
    batches: Iterable[Any],
    directory: str | Path,
    *,
    count: int = 32,
    temperature: float = 1.0,
    vocabulary: Mapping[str, int] | None = None,
    shard_bytes: int = 1 << 30,
) -> Path:
    """Run a teacher on batches and save its most likely tokens at every position.

    Args:
        teacher: bmforge decoder or masked language model, complete in this process.
        batches: the student's training batches: keyword arguments of the teacher's forward, or
            token ids alone.
        directory: output directory; it must not exist.
        count: k, the number of tokens saved per position (default: 32).
        temperature: distillation temperature T (default: 1.0).
        vocabulary: dict from token to id; a student with a different vocabulary raises an error.
        shard_bytes: approximate size of a file in bytes.

    Returns:
        output directory

    Raises:
        ConfigError: the teacher has no bmforge head or is sharded over processes, or k is out
            of range.
        CheckpointError: the directory exists.

    Memory: a chunk of logits and one shard of answers.
    """
    out = Path(directory)
    if out.exists():
        raise CheckpointError(
            f"{str(out)!r} already exists, and stored predictions are not overwritten. Choose "
            "another directory."
        )
    head = find_head(teacher, "teacher")
    size = _check_teacher(teacher, count, temperature)
    partial = out.with_name(partial_name(out.name))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards = _Shards(partial, shard_bytes)
    recorder, before = Recorder(teacher), head.measure
    recorder.watch_head_(head, lambda *arguments: take_prediction(recorder, *arguments))
    try:
        with eval_mode(teacher):
            for batch in batches:
                keys, answers = _ask(teacher, recorder, batch, count, temperature)
                shards.add(keys, answers)
        facts: dict[str, Any] = {
            "count": count,
            "temperature": temperature,
            "vocab_size": size,
            "vocabulary": fingerprint_vocabulary(vocabulary),
        }
        shards.finish(facts)
        os.replace(partial, out)
    finally:
        recorder.leave_()
        head.measure = before
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _check_teacher(teacher: nn.Module, count: int, temperature: float) -> int:
    """Check that a teacher's answers can be saved; return the size of its vocabulary."""
    size = int(getattr(getattr(teacher, "config", None), "vocab_size", 0))
    traits: Any = getattr(teacher, "traits", None)
    if traits is not None and traits.is_encoder_decoder:
        raise ConfigError(
            f"predictions of a {type(teacher).__name__} cannot be stored (supported: decoders "
            "and masked language models, not encoder-decoders)."
        )
    if not 1 <= count <= size or not temperature > 0:
        raise ConfigError(
            f"count={count} must be from 1 to the vocabulary size {size}, and "
            f"temperature={temperature} must be above 0."
        )
    return size


def find_head(model: nn.Module, who: str) -> LMHead:
    """Return the LM head of a bmforge language model.

    Raises:
        ConfigError: the model has no bmforge LM head.
    """
    head = next((module for module in model.modules() if isinstance(module, LMHead)), None)
    if head is None:
        raise ConfigError(
            f"the {who} is a {type(model).__name__} without a language-model head of bmforge, "
            "so its predictions cannot be stored. Load it with bmforge.models.AutoModel."
        )
    return head


def _ask(
    teacher: nn.Module, recorder: Recorder, batch: Any, count: int, temperature: float
) -> tuple[list[int], TopKPredictions]:
    """Run the teacher on a batch; return the hashes of its sequences, and all predictions."""
    inputs = prepare_batch(teacher, batch)
    inputs["labels"] = inputs["input_ids"].clone()  # so that every position is predicted
    with recorder.recording():
        teacher(**inputs)
        prediction, keys = recorder.prediction, keys_of(recorder.inputs)
    if prediction is None or prediction.vocab is not None:
        raise ConfigError(
            "predictions can only be stored if every process has the whole teacher. Use tp=1."
        )
    if prediction.given.hidden.shape[0] != inputs["input_ids"].numel():
        raise ConfigError(
            f"the {type(teacher).__name__} predicts {prediction.given.hidden.shape[0]} of "
            f"{inputs['input_ids'].numel()} tokens, but predictions can be stored only for models "
            "that predict every token. Use another teacher."
        )
    step = max(1, _CHUNK_ELEMENTS // prediction.given.weight.shape[0])
    parts = []
    for start in range(0, prediction.given.hidden.shape[0], step):
        some = slice(start, start + step)
        parts.append(pick_answers(prediction.given.select(some).logits(), count, temperature))
    return keys, TopKPredictions(
        *(torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True))
    )


def keys_of(inputs: Mapping[str, Any]) -> list[int]:
    """Return one hash per sequence of a batch, computed from all model inputs of the sequence."""
    rows = inputs["input_ids"].shape[0]
    seen: dict[str, Tensor] = {}
    for name, value in sorted(inputs.items()):
        if name in _NOT_SEEN or not isinstance(value, Tensor) or value.shape[:1] != (rows,):
            continue
        seen[name] = value.detach().cpu().contiguous()
    keys = []
    for row in range(rows):
        digest = blake2b(digest_size=8)
        for name, value in seen.items():
            if name == "attention_mask" and bool(value[row].bool().all()):
                continue  # an all-ones mask must have the same hash as no mask
            numbers = value[row].long() if not value.is_floating_point() else value[row].double()
            digest.update(name.encode() + numbers.numpy().tobytes())
        keys.append(int.from_bytes(digest.digest(), "little") >> 1)
    return keys


class _Shards:
    """Writes answers to shard files with a limited number of sequences."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._limit, self._number = folder, shard_bytes, 0
        self._known: set[int] = set()
        self._clear()

    def _clear(self) -> None:
        self._keys: list[int] = []
        self._starts, self._parts, self._bytes = [0], list[TopKPredictions](), 0

    def add(self, keys: list[int], answers: TopKPredictions) -> None:
        """Add the sequences of a batch; sequences that are already saved are skipped."""
        length = answers.ids.shape[0] // len(keys)
        for row, key in enumerate(keys):
            if key in self._known:
                continue
            self._known.add(key)
            some = slice(row * length, (row + 1) * length)
            self._parts.append(TopKPredictions(*(tensor[some] for tensor in answers)))
            self._keys.append(key)
            self._starts.append(self._starts[-1] + length)
            self._bytes += length * (8 * answers.ids.shape[1] + 4)
        if self._bytes >= self._limit:
            self._write()

    def _write(self) -> None:
        ids, log_probs, rest_log_probs = (
            torch.cat(parts) for parts in zip(*self._parts, strict=True)
        )
        tensors = {
            "ids": ids.to(torch.int32),
            "log_probs": log_probs.float(),
            "rest": rest_log_probs.float(),
            "keys": torch.tensor(self._keys),
            "starts": torch.tensor(self._starts),
        }
        self._number += 1
        save_file(tensors, self._folder / _SHARD.format(self._number))
        self._clear()

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the last shard and the metadata.

        Raises:
            ConfigError: no sequence was added.
        """
        if self._parts:
            self._write()
        if not self._number:
            raise ConfigError(
                "no predictions were stored, because there are no batches. Pass at least one batch."
            )
        facts |= {"shards": self._number, "rows": len(self._known)}
        replace_file(self._folder / _FACTS, json.dumps(facts, indent=2) + "\n")


class TeacherAnswers:
    """Saved teacher predictions (see `write_answers`), used instead of a teacher.

    Args:
        directory: directory of the answers.

    Attributes:
        count: k, the number of tokens per position.
        temperature: distillation temperature T.
        vocab_size: vocabulary size of the teacher.
        vocabulary: hash of the teacher's vocabulary; "" if unknown.

    Raises:
        DataError: the directory has no answers.
        CheckpointError: a file is damaged or missing.
    """

    def __init__(self, directory: str | Path) -> None:
        folder = Path(directory)
        if not (folder / _FACTS).is_file():
            raise DataError(
                f"{str(folder)!r} contains no {_FACTS}. Pass a directory written by write_answers."
            )
        facts = read_json(folder / _FACTS)
        self.directory, self.count = folder, int(facts["count"])
        self.temperature, self.vocab_size = float(facts["temperature"]), int(facts["vocab_size"])
        self.vocabulary = str(facts["vocabulary"])
        self._files: list[Any] = []
        self._places: dict[int, tuple[int, int, int]] = {}
        for number in range(int(facts["shards"])):
            path = folder / _SHARD.format(number + 1)
            try:
                file: Any = safe_open(path, framework="pt")
                keys, starts = file.get_tensor("keys"), file.get_tensor("starts").tolist()
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{str(path)!r} is damaged or missing: {error}. Store the predictions again."
                ) from error
            self._files.append(file)
            for row, key in enumerate(keys.tolist()):
                self._places[key] = number, starts[row], starts[row + 1]

    def look_up(self, inputs: Mapping[str, Any], tokens: int | None = None) -> TopKPredictions:
        """Return the answers for all positions of a batch, in order, on the device of its ids.

        Args:
            inputs: keyword arguments of the model's forward.
            tokens: number of predicted positions; if it is less than the number of all positions,
                only positions with a label are returned.

        Raises:
            DataError: no answer was saved for a sequence.
        """
        parts = []
        for row, key in enumerate(keys_of(inputs)):
            if key not in self._places:
                raise DataError(
                    f"{str(self.directory)!r} has no stored predictions for sequence {row} of a "
                    "batch. Store the predictions with the same data, seq_len, seed and epochs as "
                    "in this run."
                )
            number, start, stop = self._places[key]
            file = self._files[number]
            names = ("ids", "log_probs", "rest")
            parts.append([file.get_slice(name)[start:stop] for name in names])
        ids, log_probs, rest_log_probs = (
            torch.cat(tensors) for tensors in zip(*parts, strict=True)
        )
        answers, device = (
            TopKPredictions(ids.long(), log_probs, rest_log_probs),
            inputs["input_ids"].device,
        )
        labels = inputs.get("labels")
        if tokens not in (None, ids.shape[0]) and labels is not None:
            picked = (labels.flatten() != IGNORE_INDEX).cpu()
            answers = TopKPredictions(*(tensor[picked] for tensor in answers))
        return TopKPredictions(*(tensor.to(device) for tensor in answers))
