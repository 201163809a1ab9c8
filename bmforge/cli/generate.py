"""`bmforge generate`: continues a text, answers about images, or fills in documents."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from bmforge.cli.chat import OWN_FORMS, answer_once
from bmforge.cli.documents import print_filled
from bmforge.cli.open_model import opened_model, with_own_adapter
from bmforge.cli.options import GenerateCommand
from bmforge.errors import ConfigError
from bmforge.infer.openbmb.texts import write_texts
from bmforge.recipes.adapter_dirs import ModelSource, find_source
from bmforge.tokenizers import AutoTokenizer

if TYPE_CHECKING:
    from bmforge.infer.image_chat import ImageChat
    from bmforge.infer.speech import Transcriber

__all__ = ["run_generate"]


def run_generate(command: GenerateCommand) -> None:
    """Continue a text with a model."""
    _check_inputs(command)
    # CPM-Ant and CPM-Bee default to three beams.
    rows = command.num_beams or 3
    if command.document is not None:
        if command.prompt is not None:
            raise ConfigError(
                "--prompt and --document cannot be used together. Leave one of them out."
            )
        torch.manual_seed(command.seed)
        print_filled(command.model, command.document, command.memory, rows, **command.options())
        return
    source = find_source(command.model)
    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer)
    adapters = with_own_adapter(source, command.adapter)
    allowed = command.allow_other_base
    images = _open_images(command, source, tokenizer)
    speech = _open_speech(command, source)
    with opened_model(source.model, command.memory, rows, adapters, allowed) as model:
        torch.manual_seed(command.seed)
        if speech is not None and command.audio is not None:
            _print_transcript(command, speech, model)
            return
        prompt = command.prompt if command.prompt is not None else sys.stdin.read()
        if images is not None:
            chat, pictures = images
            print(*chat.answer(model, prompt, pictures, **command.options()), sep="\n")
        elif command.chat and model.traits.objective not in OWN_FORMS:
            print(answer_once(model, tokenizer, source.tokenizer, prompt, **command.options()))
        else:
            print(*write_texts(model, tokenizer, prompt, **command.options()), sep="\n")


def _open_images(
    command: GenerateCommand, source: ModelSource, tokenizer: Any
) -> tuple[ImageChat, list[Any]] | None:
    """Load the images given on the command line and the model's processor; None without images."""
    if not command.image:
        return None
    # The packages of processors are imported only here.
    from bmforge.infer.image_chat import ImageChat
    from bmforge.infer.images import read_image_file

    images = [read_image_file(file) for file in command.image]
    return ImageChat(source.tokenizer, tokenizer), images


def _open_speech(command: GenerateCommand, source: ModelSource) -> Transcriber | None:
    """Load the processor of a speech model; None without audio."""
    if command.audio is None:
        return None
    from bmforge.infer.speech import Transcriber

    return Transcriber(source.tokenizer)


def _print_transcript(command: GenerateCommand, speech: Transcriber, model: Any) -> None:
    from bmforge.infer.speech import format_subtitles

    audio, kind = command.audio, command.transcript_format
    assert audio is not None
    options = command.options()
    if command.language is not None:
        options["language"] = command.language
    if kind in ("srt", "vtt"):
        print(format_subtitles(speech.segments(model, audio, **options)[0], kind), end="")
    else:
        print(speech.transcribe(model, audio, **options))


def _check_inputs(command: GenerateCommand) -> None:
    """Raise `ConfigError` for inputs that exclude each other, or an option without effect."""
    inputs = ("image", "audio", "document")
    names = [f"--{name}" for name in inputs if getattr(command, name) not in (None, ())]
    if command.audio is not None and command.prompt is not None:
        names.append("--prompt")
    if command.audio is not None and command.chat:
        names.append("--chat")
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} cannot be used together. Leave one of them out.")
    for name in ("language", "transcript_format"):
        value = getattr(command, name)
        if value is not None and command.audio is None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {value} has no effect without --audio. Leave it out.")
