"""`bmforge generate`: continue a text, or fill the answers of documents."""

from __future__ import annotations

import sys
from typing import Any

import torch

from bmforge.cli.chat import OWN_FORMS, answer_once
from bmforge.cli.documents import print_filled
from bmforge.cli.options import GenerateCommand
from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.tokenizers import AutoTokenizer

__all__ = ["run_generate"]


def run_generate(command: GenerateCommand) -> None:
    """Continue a text with a model."""
    if command.document is not None:
        if command.prompt is not None:
            raise ConfigError("give --prompt or --document, not both.")
        torch.manual_seed(command.seed)
        print_filled(command.model, command.document, **command.options())
        return
    directory = find_model(command.model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModel.from_pretrained(directory)
    prompt = command.prompt if command.prompt is not None else sys.stdin.read()
    if command.chat and model.traits.objective not in OWN_FORMS:
        torch.manual_seed(command.seed)
        print(answer_once(model, tokenizer, directory, prompt, **command.options()))
        return
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ConfigError("the prompt is empty; give --prompt TEXT or pipe a text in.")
    torch.manual_seed(command.seed)
    ends = {} if tokenizer.eos_id is None else {"eos_token_id": tokenizer.eos_id}
    out = generate(model, torch.tensor([ids]), **ends, **command.options())
    marks = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    print(tokenizer.decode([id for id in out[0].tolist() if id not in marks]))
