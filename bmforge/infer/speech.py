"""Transcribes audio files with speech models of transformers, such as Whisper."""

from __future__ import annotations

import copy
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bmforge.errors import ConfigError, DataError
from bmforge.infer.processor import load_processor
from bmforge.models.transformers.library import load_library
from bmforge.surgery import evaluating

__all__ = ["Transcriber", "read_audio"]

# Generation options with the same name and meaning in transformers' generate for speech.
_OPTIONS = (
    "max_new_tokens", "num_beams", "length_penalty", "do_sample", "temperature", "top_k", "top_p",
    "repetition_penalty", "no_repeat_ngram_size",
)  # fmt: skip


def read_audio(path: str | Path) -> tuple[NDArray[np.float32], int]:
    """Read an audio file; return its samples, the mean of all channels, and the sampling rate.

    WAV files with integer samples are read with the standard library, other files with the package
    soundfile, if it is installed.

    Raises:
        DataError: the file does not exist, or cannot be read.
    """
    try:
        with wave.open(str(path), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            data, rate = file.readframes(file.getnframes()), file.getframerate()
        samples = _to_floats(data, width).reshape(-1, channels)
    except (wave.Error, EOFError):  # not a WAV file, or one with float samples
        samples, rate = _read_with_soundfile(path)
    except OSError as error:
        raise DataError(
            f"cannot read the audio file {str(path)!r} ({error}). Check its path and permissions."
        ) from error
    if not len(samples):
        raise DataError(f"the audio file {str(path)!r} has no samples. Use another file.")
    return samples.mean(1, dtype=np.float32), rate


def _to_floats(data: bytes, width: int) -> NDArray[np.float32]:
    """Convert little-endian integer samples of `width` bytes to values from -1 to 1."""
    raw = np.frombuffer(data, np.uint8)
    if width == 1:  # 8-bit samples are unsigned
        return ((raw.astype(np.float32) - 128) / 128).astype(np.float32)
    wide = np.zeros((len(raw) // width, 4), np.uint8)
    wide[:, 4 - width :] = raw.reshape(-1, width)
    return (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)


def _read_with_soundfile(path: str | Path) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile
    except ImportError as error:
        raise DataError(
            f"{str(path)!r} is not a WAV file with integer samples. Convert it with: ffmpeg -i "
            "FILE -ar 16000 -ac 1 out.wav; or install the package soundfile."
        ) from error
    try:
        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except RuntimeError as error:
        raise DataError(
            f"cannot read the audio file {str(path)!r} ({error}). Convert it with: ffmpeg -i FILE "
            "-ar 16000 -ac 1 out.wav."
        ) from error
    return samples, int(rate)


class Transcriber:
    """Transcribes audio with the generation code of transformers.

    That code also detects the language, and divides audio longer than the model's window (30 s for
    Whisper).

    Args:
        directory: directory of a speech model with its processor.

    Raises:
        ConfigError: the directory has no speech processor.
    """

    def __init__(self, directory: Path) -> None:
        self._processor = load_processor(directory)
        self._extractor: Any = getattr(self._processor, "feature_extractor", None)
        if self._extractor is None or getattr(self._processor, "tokenizer", None) is None:
            raise ConfigError(
                f"{str(directory)!r} has no speech processor, so audio cannot be used. Use a "
                "speech model such as Whisper, with all files of its published directory."
            )
        library = load_library("A speech model")
        self._config = library.GenerationConfig.from_pretrained(directory)

    def transcribe(self, model: Any, file: str | Path, **options: Any) -> str:
        """Return the transcript of an audio file; see `generate` for arguments and errors."""
        (ids,) = self.generate(model, file, **options)
        return str(self._processor.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def generate(self, model: Any, file: str | Path, **options: Any) -> Sequence[list[int]]:
        """Return the token ids that the model generates for an audio file.

        Args:
            model: speech model loaded with the transformers backend.
            file: audio file with the sampling rate of the model.
            options: `language`, `task` ("transcribe" or "translate"), and fields of
                `GenerationConfig`.

        Raises:
            ConfigError: the model is not a speech model, or does not support an option.
            DataError: the file cannot be read, or has another sampling rate.
        """
        if model.config.head != "speech_to_text":
            raise ConfigError(
                f"a {type(model).__name__} with the head {model.config.head!r} does not transcribe "
                "audio. Use a speech model such as Whisper."
            )
        if unknown := [n for n in options if n not in (*_OPTIONS, "language", "task")]:
            raise ConfigError(
                f"speech models do not support {', '.join(unknown)} (supported: "
                f"{', '.join(_OPTIONS)}). Leave the unsupported options out."
            )
        samples, rate = read_audio(file)
        needed = self._extractor.sampling_rate
        if rate != needed:
            raise DataError(
                f"{str(file)!r} has a sampling rate of {rate} Hz, but the model needs {needed} Hz. "
                f"Convert it with `ffmpeg -i FILE -ar {needed} -ac 1 out.wav`."
            )
        # A feature extractor cuts after one window by default.
        is_long = len(samples) > getattr(self._extractor, "n_samples", len(samples))
        more = {"truncation": False, "padding": "longest"} if is_long else {}
        features = self._extractor(
            samples, sampling_rate=rate, return_tensors="pt", return_attention_mask=True, **more
        )
        weight = next(p for p in model.parameters() if p.is_floating_point())
        features = features.to(weight.device, weight.dtype)
        config = copy.deepcopy(self._config)
        config.update(**{name: value for name, value in options.items() if name in _OPTIONS})
        choice = {name: value for name, value in options.items() if name not in _OPTIONS}
        try:
            with evaluating(model), torch.no_grad():
                out = model.foreign.generate(**features, generation_config=config, **choice)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"transformers cannot transcribe {str(file)!r} with the options "
                f"{options or 'of the model'} ({error}). Leave options out, and check that the "
                "directory has the generation_config.json of the published model."
            ) from error
        return out.tolist()  # type: ignore[no-any-return]
