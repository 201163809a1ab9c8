"""Transcribes audio files with speech models of transformers, such as Whisper."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bmforge.errors import ConfigError
from bmforge.infer.audio import name_of_audio, read_audio
from bmforge.infer.processor import load_processor
from bmforge.models.transformers.library import load_library
from bmforge.surgery import eval_mode

__all__ = ["Transcriber", "format_subtitles"]

# Generation options with the same name and meaning in transformers' generate for speech.
_OPTIONS = (
    "max_new_tokens", "num_beams", "length_penalty", "do_sample", "temperature", "top_k", "top_p",
    "repetition_penalty", "no_repeat_ngram_size",
)  # fmt: skip
_TIMES = ("start", "end")
_CHOICES = ("language", "task", "prompt", "return_timestamps", "return_segments")


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
            file: audio file; see `bmforge.infer.audio.read_audio`.
            options: `language`, `task` ("transcribe" or "translate"), `prompt` (text before the
                audio, such as names with their spelling), and fields of `GenerationConfig`.

        Raises:
            ConfigError: the model is not a speech model, or does not support an option.
            DataError: the file cannot be read or resampled.
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
            with eval_mode(model), torch.no_grad():
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
        rate = self.sampling_rate
        samples = read_audio(file, rate)
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
            if (prompt := choice.pop("prompt", None)) is not None:
                choice["prompt_ids"] = self._encode_prompt(prompt, features)
            with eval_mode(model), torch.no_grad():
                return model.foreign.generate(**features, generation_config=config, **choice)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"transformers cannot transcribe {name_of_audio(file)!r}: {error} (options: "
                f"{', '.join(options) or 'none'}). Leave out options that the model does not "
                "support, and use all files of the published model, including "
                "generation_config.json."
            ) from error

    def _encode_prompt(self, prompt: str, features: Any) -> torch.Tensor:
        """Return the token ids of a prompt, on the device of the features."""
        encode = getattr(self._processor.tokenizer, "get_prompt_ids", None)
        if encode is None:
            raise ConfigError(
                "this speech model does not support a prompt (supported: Whisper). Leave it out."
            )
        ids: torch.Tensor = encode(prompt, return_tensors="pt")
        return ids.to(next(iter(features.values())).device)


def format_subtitles(segments: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return segments of a transcript as the text of a subtitle file.

    Args:
        segments: segments of `Transcriber.segments`.
        kind: "srt" (SubRip) or "vtt" (WebVTT).
    """
    blocks = []
    for number, segment in enumerate(segments, 1):
        times = [_format_time(segment[name], "," if kind == "srt" else ".") for name in _TIMES]
        # An arrow inside a line would be read as a line of times.
        text = segment["text"].strip().replace("-->", "->")
        head = f"{number}\n" if kind == "srt" else ""
        blocks.append(f"{head}{' --> '.join(times)}\n{text}\n")
    return "\n".join((["WEBVTT\n"] if kind == "vtt" else []) + blocks)


def _format_time(seconds: float, separator: str) -> str:
    total, milliseconds = divmod(round(seconds * 1000), 1000)
    hours, minutes = total // 3600, total // 60 % 60
    return f"{hours:02}:{minutes:02}:{total % 60:02}{separator}{milliseconds:03}"
