"""`bmforge generate`: continues a text, or fills in the answers of documents."""

from __future__ import annotations

import sys

import torch

from bmforge.cli.chat import OWN_FORMS, answer_once
from bmforge.cli.documents import print_filled
from bmforge.cli.open_model import opened_model, with_own_adapter
from bmforge.cli.options import GenerateCommand
from bmforge.errors import ConfigError
from bmforge.infer.openbmb.texts import write_texts
from bmforge.recipes.adapter_dirs import find_source
from bmforge.tokenizers import AutoTokenizer

__all__ = ["run_generate"]


def run_generate(command: GenerateCommand) -> None:
    """Continue a text with a model."""
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
    with opened_model(source.model, command.memory, rows, adapters, allowed) as model:
        prompt = command.prompt if command.prompt is not None else sys.stdin.read()
        torch.manual_seed(command.seed)
        if command.chat and model.traits.objective not in OWN_FORMS:
            print(answer_once(model, tokenizer, source.tokenizer, prompt, **command.options()))
        else:
            print(*write_texts(model, tokenizer, prompt, **command.options()), sep="\n")
