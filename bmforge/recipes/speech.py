"""Fine-tuning of speech-to-text models, such as Whisper, on audio files with transcripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bmforge.errors import ConfigError
from bmforge.infer.processor import load_processor
from bmforge.models.hub import find_model
from bmforge.parallel import World
from bmforge.recipes.inputs.examples import ExampleConfig, open_examples
from bmforge.recipes.inputs.transcripts import Transcripts, find_prefix, read_transcripts
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe

__all__ = ["SpeechConfig", "SpeechData", "train_speech"]


@dataclass(kw_only=True)
class SpeechData(ExampleConfig):
    """Options for the audio files to train on; the other fields are those of `ExampleConfig`.

    Args:
        seq_len: maximum length of a transcript in tokens.
        global_batch_size: number of audio files per optimizer step, over all processes.
        micro_batch_size: number of audio files per forward pass of one process.
        language: language of the transcripts, such as en; required for multilingual models. The
            field `language` of a record takes precedence.
        task: task of the model: "transcribe", or "translate" if the transcripts are in English.
    """

    seq_len: int = 448
    global_batch_size: int = 8
    micro_batch_size: int = 2
    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"


@dataclass(kw_only=True)
class SpeechConfig(RunConfig):
    """Config for fine-tuning on transcribed audio; the other fields are those of `RunConfig`.

    Args:
        data: `paths` are .jsonl, .json or .parquet files with one record per audio file:
            {"audio": FILE, "text": "..."}. Files are relative to the data file.
    """

    data: SpeechData = field(default_factory=SpeechData)


def train_speech(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume fine-tuning on transcribed audio.

    Args:
        config: a `SpeechConfig` whose `model` is the config of a speech-to-text model.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, head="speech_to_text")


def _open_data(config: Any, rows: World) -> TrainingData:
    data = config.data
    if data.split or data.tokenizer is not None:
        name = "split" if data.split else "tokenizer"
        raise ConfigError(f"data.{name} has no effect on transcribed audio. Leave it out.")
    if config.init_from is None:
        raise ConfigError(
            "the task 'speech' needs a pretrained model with its processor. Pass its directory "
            "with --model."
        )
    directory = find_model(config.init_from)
    processor = load_processor(directory)
    prefix = find_prefix(directory, data.task, data.language)
    sources = [
        Transcripts(read_transcripts(paths), processor, prefix, data.seq_len)
        for paths in (data.paths, data.validation)
    ]
    return open_examples(
        sources[0],
        sources[1] if data.validation else None,
        data,
        rows,
        save_tokenizer=lambda target: _save_processor(processor, target),
    )


def _save_processor(processor: Any, target: Path) -> None:
    processor.save_pretrained(target)
