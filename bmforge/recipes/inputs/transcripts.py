"""Audio files with transcripts as training data of speech-to-text models.

The labels are the tokens that the decoder has to generate after its start token: for Whisper the
language, the task and the mark for no timestamps, then the text and the end token, as in
transformers' example `run_speech_recognition_seq2seq.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.data.load.example import fingerprint_of
from bmforge.data.sources.conversations import find_conversation_files, read_records
from bmforge.errors import ConfigError, DataError
from bmforge.infer.audio import check_audio, measure_audio, read_audio
from bmforge.logging import get_logger

__all__ = ["Transcript", "Transcripts", "find_prefix", "read_transcripts"]

# Names of the fields in published data sets: own; audiofolder; NeMo; Common Voice.
_AUDIO_FIELDS = ("audio", "file_name", "audio_filepath", "path")
_TEXT_FIELDS = ("text", "transcription", "transcript", "sentence")
Prefix = Callable[[str | None], list[int]]


@dataclass(frozen=True)
class Transcript:
    """An audio file with its transcript.

    Args:
        location: file and line, for error messages.
        audio: audio file.
        text: transcript.
        language: language of the record; None if it has none.
    """

    location: str
    audio: Path
    text: str
    language: str | None


def read_transcripts(paths: Iterable[str]) -> list[Transcript]:
    """Read the records of all files.

    Raises:
        DataError: a file cannot be read, or a record has no audio file or no transcript.
    """
    files = [file for path in paths for file in find_conversation_files(path)]
    return [
        _read(location, record, file.parent)
        for file in files
        for location, record in read_records(file)
    ]


def _read(location: str, record: Any, folder: Path) -> Transcript:
    fields: Mapping[str, Any] = record if isinstance(record, dict) else {}
    audio = next((fields[name] for name in _AUDIO_FIELDS if fields.get(name)), None)
    audio = audio.get("path") if isinstance(audio, dict) else audio
    text = next((fields[name] for name in _TEXT_FIELDS if fields.get(name) is not None), None)
    if not isinstance(audio, str) or not isinstance(text, str):
        raise DataError(
            f"{location} has no audio file or no transcript (needed: one of "
            f"{', '.join(_AUDIO_FIELDS)}, and one of {', '.join(_TEXT_FIELDS)})."
        )
    language = fields.get("language")
    return Transcript(location, folder / audio, text, language if language else None)


def find_prefix(directory: Path, task: str, language: str | None) -> Prefix:
    """Return a function from a record's language (or None) to the tokens before its text.

    Args:
        directory: directory of the model, whose generation_config.json has Whisper's tokens.
        task: "transcribe" or "translate".
        language: language of records that have none.

    Raises:
        ConfigError: an option has no effect on the model.
    """
    file = directory / "generation_config.json"
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    languages: Mapping[str, int] = values.get("lang_to_id") or {}
    no_timestamps = values.get("no_timestamps_token_id")
    if not languages and (language is not None or task != "transcribe"):
        raise ConfigError(
            "data.language and data.task have no effect, because the model is not multilingual. "
            "Leave them out."
        )

    def prefix(own: str | None) -> list[int]:
        marks = [] if no_timestamps is None else [no_timestamps]
        if not languages:
            return marks
        code = _code_of(own or language)
        if f"<|{code}|>" not in languages:
            supported = ", ".join(sorted(name.strip("<|>") for name in languages))
            raise ConfigError(
                f"the model is multilingual, but data.language={own or language!r} is not one of "
                f"its languages ({supported}). Set --data.language, or a field `language` of each "
                "record."
            )
        return [languages[f"<|{code}|>"], values["task_to_id"][task], *marks]

    return prefix


def _code_of(language: str | None) -> str:
    """Return the code of a language that is given as a code or an English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = str(language).lower()
    return str(TO_LANGUAGE_CODE.get(name, name))


class Transcripts:
    """`ExampleSource` of audio files with transcripts.

    Args:
        records: audio files with their transcripts.
        processor: processor of transformers with a feature extractor and a tokenizer.
        prefix: result of `find_prefix`.
        seq_len: maximum length of a transcript in tokens.

    Raises:
        ConfigError: the processor reads no audio, or a language is unknown.
        DataError: an audio file cannot be read or resampled or is too long, or a transcript is too
            long.
    """

    def __init__(
        self, records: Sequence[Transcript], processor: Any, prefix: Prefix, seq_len: int
    ) -> None:
        self._extractor: Any = getattr(processor, "feature_extractor", None)
        if self._extractor is None:
            raise ConfigError(
                f"a {type(processor).__name__} has no feature extractor, so the model cannot be "
                "trained on audio. Use a speech model such as Whisper."
            )
        self._records = records
        self._labels = [
            [*prefix(r.language), *_encode(processor.tokenizer, r.text)] for r in records
        ]
        self.columns: Mapping[str, tuple[int, int]] = {"labels": (seq_len, IGNORE_INDEX)}
        lengths = [self._check(*pair, seq_len) for pair in zip(records, self._labels, strict=True)]
        names = [str(record.audio) for record in records]
        self.fingerprint = fingerprint_of(list(zip(names, lengths, self._labels, strict=True)))
        seconds = sum(lengths) / self._extractor.sampling_rate
        get_logger().info("%d audio files, %.1f minutes", len(records), seconds / 60)

    def _check(self, record: Transcript, labels: list[int], seq_len: int) -> int:
        """Return the number of samples at the model's rate; see the class for errors."""
        rate = self._extractor.sampling_rate
        try:
            own_count, own_rate = measure_audio(record.audio)
            check_audio(record.audio, own_count, own_rate, rate)
        except DataError as error:
            raise DataError(f"{record.location}: {error}") from error
        count = round(own_count * rate / own_rate)
        limit = getattr(self._extractor, "n_samples", count)
        if count > limit:
            raise DataError(
                f"{record.location}: {str(record.audio)!r} has {count / rate:.1f} s, but the "
                f"model reads at most {limit / rate:g} s. Divide the file and its transcript."
            )
        if len(labels) > seq_len:
            raise DataError(
                f"{record.location} has a transcript of {len(labels)} tokens (allowed: at most "
                f"data.seq_len={seq_len}). Raise data.seq_len, or divide the audio file and its "
                "transcript."
            )
        return count

    def __len__(self) -> int:
        return len(self._records)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Any:
        """Return the index of a record and its labels."""
        return {"row": [index], "labels": self._labels[index]}

    def collate(self, examples: Sequence[Any]) -> Batch:
        """Read audio files and return their features and labels as one batch.

        Raises:
            DataError: a file was changed after the start.
        """
        rate = self._extractor.sampling_rate
        samples = [read_audio(self._records[e["row"][0]].audio, rate) for e in examples]
        more = {} if hasattr(self._extractor, "n_samples") else {"padding": True}
        features = self._extractor(
            samples,
            sampling_rate=rate,
            return_attention_mask=True,
            return_tensors="pt",
            **more,
        )
        batch = {name: v for name, v in features.items() if isinstance(v, Tensor)}
        labels = [torch.tensor(example["labels"]) for example in examples]
        batch["labels"] = torch.nn.utils.rnn.pad_sequence(
            labels, batch_first=True, padding_value=IGNORE_INDEX
        )
        return batch


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a transcript and the end token."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]
