"""Transcribes audio files with speech models of transformers, such as Whisper."""

from __future__ import annotations

import copy
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from bmforge.errors import ConfigError, DataError
from bmforge.infer.processor import load_processor
from bmforge.models.transformers.library import load_library
from bmforge.surgery import evaluating

__all__ = ["Transcriber", "measure_audio", "read_audio"]

# Generation options with the same name and meaning in transformers' generate for speech.
_OPTIONS = (
    "max_new_tokens", "num_beams", "length_penalty", "do_sample", "temperature", "top_k", "top_p",
    "repetition_penalty", "no_repeat_ngram_size",
)  # fmt: skip
_CHOICES = ("language", "task", "return_timestamps", "return_segments")


def read_audio(path: str | Path | BinaryIO) -> tuple[NDArray[np.float32], int]:
    """Read an audio file; return the mean of its channels' samples, and the sampling rate.

    WAV files with integer samples are read with the standard library, other files with the package
    soundfile, if it is installed.

    Args:
        path: file; an open file is named by its attribute `name`, if any.

    Raises:
        DataError: the file does not exist, or cannot be read.
    """
    try:
        with wave.open(_source_of(path), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            data, rate = file.readframes(file.getnframes()), file.getframerate()
        samples = _to_floats(data, width).reshape(-1, channels)
    except (wave.Error, EOFError):  # not a WAV file, or one with float samples
        samples, rate = _read_with_soundfile(path)
    except OSError as error:
        raise DataError(
            f"cannot read the audio file {_name_of(path)!r} ({error}). Check the path."
        ) from error
    if not len(samples):
        raise DataError(f"the audio file {_name_of(path)!r} has no samples. Use another file.")
    return samples.mean(1, dtype=np.float32), rate


def _source_of(path: str | Path | BinaryIO) -> Any:
    return str(path) if isinstance(path, (str, Path)) else path


def _name_of(path: str | Path | BinaryIO) -> str:
    return str(path) if isinstance(path, (str, Path)) else str(getattr(path, "name", "audio"))


def measure_audio(path: str | Path | BinaryIO) -> tuple[int, int]:
    """Return the number of samples per channel and the sampling rate, from a file's header.

    Raises:
        DataError: the file does not exist, cannot be read or is truncated.
    """
    try:
        with wave.open(_source_of(path), "rb") as file:
            count, rate = file.getnframes(), file.getframerate()
            size = count * file.getsampwidth() * file.getnchannels()
    except (wave.Error, EOFError):
        samples, rate = _read_with_soundfile(path)
        return len(samples), rate
    except OSError as error:
        raise DataError(
            f"cannot read the audio file {_name_of(path)!r} ({error}). Convert it to a WAV file."
        ) from error
    is_file = isinstance(path, (str, Path))
    if not count or (is_file and size > Path(_name_of(path)).stat().st_size):
        problem = "is truncated" if count else "has no samples"
        raise DataError(f"the audio file {_name_of(path)!r} {problem}. Use another file.")
    return count, rate


def _to_floats(data: bytes, width: int) -> NDArray[np.float32]:
    """Convert little-endian integer samples of `width` bytes to values from -1 to 1."""
    raw = np.frombuffer(data, np.uint8)
    if width == 1:  # 8-bit samples are unsigned
        return ((raw.astype(np.float32) - 128) / 128).astype(np.float32)
    wide = np.zeros((len(raw) // width, 4), np.uint8)
    wide[:, 4 - width :] = raw.reshape(-1, width)
    return (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)


def _read_with_soundfile(path: str | Path | BinaryIO) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile
    except ImportError as error:
        raise DataError(
            f"{_name_of(path)!r} is not a WAV file with integer samples. Convert it with: ffmpeg "
            "-i FILE -ar 16000 -ac 1 out.wav; or install the package soundfile."
        ) from error
    source = _source_of(path)
    if source is path and not isinstance(path, (str, Path)):
        path.seek(0)
    try:
        samples, rate = soundfile.read(source, dtype="float32", always_2d=True)
    except RuntimeError as error:
        raise DataError(
            f"cannot read the audio file {_name_of(path)!r} ({error}). Convert it to a WAV file."
        ) from error
    return samples, int(rate)


class Transcriber:
    """Transcribes audio with the generation code of transformers.

    That code also detects the language, and divides audio longer than the model's window (30 s for
    Whisper).

    Args:
        directory: directory of a speech model with its processor.

    Attributes:
        sampling_rate: sampling rate of the model in Hz.

    Raises:
        ConfigError: the directory has no speech processor.
    """

    def __init__(self, directory: Path) -> None:
        self._processor = load_processor(directory)
        self._extractor: Any = getattr(self._processor, "feature_extractor", None)
        if self._extractor is None or getattr(self._processor, "tokenizer", None) is None:
            raise ConfigError(
                f"{str(directory)!r} has no speech processor, so audio cannot be used. Use a "
                "speech model such as Whisper whose directory contains its processor."
            )
        self.sampling_rate = int(self._extractor.sampling_rate)
        library = load_library("A speech model")
        self._config = library.GenerationConfig.from_pretrained(directory)

    def transcribe(self, model: Any, file: str | Path | BinaryIO, **options: Any) -> str:
        """Return the transcript of an audio file; see `generate` for arguments and errors."""
        (ids,) = self.generate(model, file, **options)
        return self.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens."""
        return str(self._processor.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def generate(
        self, model: Any, file: str | Path | BinaryIO, **options: Any
    ) -> Sequence[list[int]]:
        """Return the token ids that the model generates for an audio file.

        Args:
            model: speech model loaded with the transformers backend.
            file: audio file with the sampling rate of the model; see `read_audio`.
            options: `language`, `task` ("transcribe" or "translate"), and fields of
                `GenerationConfig`.

        Raises:
            ConfigError: the model is not a speech model, or does not support an option.
            DataError: the file cannot be read, or has another sampling rate.
        """
        features = self._encode(model, file)
        return self._run(model, features, file, options).tolist()  # type: ignore[no-any-return]

    def segments(
        self, model: Any, file: str | Path | BinaryIO, **options: Any
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return the segments of a transcript with times, and the language as a code.

        Args:
            model, file, options: as in `generate`; the model must predict timestamps (Whisper).

        Returns:
            dicts with `start` and `end` in seconds, `text` and `tokens`; the language, None if the
            model has only one

        Raises:
            ConfigError: see `generate`; also if the model does not predict timestamps.
            DataError: see `generate`.
        """
        if not hasattr(model.foreign, "detect_language"):
            raise ConfigError(
                f"a {type(model.foreign).__name__} does not predict timestamps. Use a Whisper "
                "model, or leave the timestamps out."
            )
        features = self._encode(model, file)
        language = options.get("language")
        if language is None and getattr(self._config, "lang_to_id", None):
            with evaluating(model), torch.no_grad():
                detected = model.foreign.detect_language(
                    features["input_features"], generation_config=copy.deepcopy(self._config)
                )
            language = self._processor.tokenizer.decode(detected[0].tolist()).strip("<|>")
        more = {"return_timestamps": True, "return_segments": True}
        out = self._run(model, features, file, {**options, **more})
        segments = [
            {
                "start": float(segment["start"]),
                "end": float(segment["end"]),
                "text": self.decode(segment["tokens"].tolist()),
                "tokens": segment["tokens"].tolist(),
            }
            for segment in out["segments"][0]
        ]
        return segments, language

    def _encode(self, model: Any, file: str | Path | BinaryIO) -> Any:
        """Return the model's inputs for an audio file."""
        if model.config.head != "speech_to_text":
            raise ConfigError(
                f"a {type(model).__name__} with the head {model.config.head!r} does not transcribe "
                "audio. Use a speech model such as Whisper."
            )
        samples, rate = read_audio(file)
        needed = self._extractor.sampling_rate
        if rate != needed:
            raise DataError(
                f"{_name_of(file)!r} has a sampling rate of {rate} Hz, but the model needs "
                f"{needed} Hz. Convert it with `ffmpeg -i FILE -ar {needed} -ac 1 out.wav`."
            )
        # A feature extractor cuts after one window by default.
        is_long = len(samples) > getattr(self._extractor, "n_samples", len(samples))
        more = {"truncation": False, "padding": "longest"} if is_long else {}
        features = self._extractor(
            samples, sampling_rate=rate, return_tensors="pt", return_attention_mask=True, **more
        )
        weight = next(p for p in model.parameters() if p.is_floating_point())
        return features.to(weight.device, weight.dtype)

    def _run(
        self, model: Any, features: Any, file: str | Path | BinaryIO, options: dict[str, Any]
    ) -> Any:
        """Return the output of transformers' generation code."""
        if unknown := [n for n in options if n not in (*_OPTIONS, *_CHOICES)]:
            raise ConfigError(
                f"speech models do not support {', '.join(unknown)} (supported: "
                f"{', '.join(_OPTIONS)}). Leave the unsupported options out."
            )
        config = copy.deepcopy(self._config)
        config.update(**{name: value for name, value in options.items() if name in _OPTIONS})
        choice = {name: value for name, value in options.items() if name in _CHOICES}
        try:
            with evaluating(model), torch.no_grad():
                return model.foreign.generate(**features, generation_config=config, **choice)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"transformers cannot transcribe {_name_of(file)!r}: {error} (options: "
                f"{', '.join(options) or 'none'}). Leave out options that the model does not "
                "support, and use all files of the published model, including "
                "generation_config.json."
            ) from error
