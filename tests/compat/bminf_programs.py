"""Programs in the shape of BMInf's published examples, with their import line changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import bmforge.compat.bminf as bminf
import bmforge.compat.bminf.torch as bt


def fill_blanks(text: str) -> str:
    cpm2 = bminf.models.CPM2()
    for result in cpm2.fill_blank(
        text, top_p=1.0, top_n=5, temperature=0.5, frequency_penalty=0, presence_penalty=0
    ):
        text = text.replace("<span>", "[" + result["text"] + "]", 1)
    return text


def go_on(model: bminf.models.CPM1, sentence: str) -> str:
    """CPM-1 writes eight tokens at a time until it has ended."""
    stoped = False
    while not stoped:
        result, stoped = model.generate(
            sentence,
            max_tokens=8,
            top_n=5,
            top_p=None,
            temperature=0.85,
            frequency_penalty=0,
            presence_penalty=1,
        )
        sentence += result
    return sentence


def go_on_cpm2(text: str, times: int) -> str:
    """CPM-2 writes after the last 32 characters."""
    model = bminf.models.CPM2()
    for _ in range(times):
        value, _ = model.generate(
            input_sentence=text[-32:],
            max_tokens=6,
            top_n=5,
            top_p=None,
            temperature=0.85,
            frequency_penalty=0,
            presence_penalty=0,
        )
        text += value
    return text


def talk(said: list[str]) -> Iterator[str]:
    eva = bminf.models.EVA()
    context: list[str] = []
    for you in said:
        context.append(you)
        computer, _ = eva.dialogue(context, max_tokens=6)
        context.append(computer)
        yield computer


def score_cpm1(limit: int) -> Any:
    model = bt.CPM1(memory_limit=limit)
    ids = torch.LongTensor([[1, 2, 3, 4]])
    attention_mask = torch.FloatTensor([[1, 1, 1, 1]])
    return model, model(input_ids=ids, attention_mask=attention_mask).logits


def score_cpm2(limit: int) -> Any:
    model = bt.CPM2(memory_limit=limit)
    return model, model(
        input_ids=torch.LongTensor([[1, 2, 3, 4]]),
        attention_mask=torch.FloatTensor([[1, 1, 1, 1]]),
        decoder_input_ids=torch.LongTensor([[3, 4, 5, 6]]),
        decoder_attention_mask=torch.FloatTensor([[1, 1, 1, 0]]),
    ).logits


def generate_in_little(model: Any, limit: int, ids: torch.Tensor) -> torch.Tensor:
    """The notebook of GPT-J."""
    model = bminf.wrapper(model, quantization=False, memory_limit=limit)
    found: torch.Tensor = model.generate(ids, do_sample=True, temperature=0.9, max_length=20)
    return found
