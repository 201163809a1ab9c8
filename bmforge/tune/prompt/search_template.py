"""Template search (LM-BFF): a T5-like model writes the text between example and label word.

Source: Gao et al., "Making pre-trained language models better few-shot learners" (2021).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.questions import Question, collate_questions
from bmforge.tune.prompt.template import Template

__all__ = ["search_templates"]

# Templates without and with a second text; the model fills the blanks around the label word.
_SHAPES = (
    '{"placeholder":"text_a"} {"mask"} {"meta":"label_word"} {"mask"}',
    '{"placeholder":"text_a"} {"mask"} {"meta":"label_word"} {"mask"} {"placeholder":"text_b"}',
)


@torch.no_grad()
def search_templates(
    model: Any,
    tokenizer: Tokenizer,
    examples: Sequence[Any],
    words: Sequence[str],
    *,
    pairs: bool = False,
    beams: int = 20,
    max_tokens: int = 20,
    keep: int = 5,
    max_seq_len: int = 128,
) -> list[tuple[str, float]]:
    """Search for the most probable templates; return them with their mean log-probability.

    Args:
        model: bmforge encoder-decoder trained on span corruption.
        tokenizer: the model's tokenizer.
        examples: labeled examples, encoded in one batch.
        words: label word of each example.
        pairs: True if the template has a second text at its end.
        beams: beam width.
        max_tokens: maximum length of a template in tokens, including sentinels.
        keep: number of templates to return.
        max_seq_len: maximum length of an example in tokens.

    Raises:
        ConfigError: there are no examples, the numbers of words and examples differ, or the
            model was not trained on span corruption.
    """
    if not examples or len(examples) != len(words) or min(beams, keep) < 1:
        raise ConfigError(
            f"there are {len(examples)} examples and {len(words)} words, with beams={beams} and "
            f"keep={keep} (expected: at least one example, one word per example, and values of at "
            "least 1 for beams and keep)."
        )
    template = Template(_SHAPES[pairs], tokenizer, model)
    if template.prompt_format.kind != "spans":
        raise ConfigError(
            f"a template with the format {template.prompt_format.kind!r} cannot be used for the "
            "template search. Use a T5 or CPM-2."
        )
    source, mask = _read_source(model, template, examples, words, max_seq_len)
    first, second = template.blanks
    third = tokenizer.token_to_id((model.traits.sentinel or "<extra_id_{}>").format(2))
    third = tokenizer.eos_id if third is None else third
    if third is None:
        raise ConfigError(
            "the tokenizer has neither a third sentinel token nor an end-of-sequence token. "
            "Use the tokenizer of a T5 or CPM-2."
        )
    start = model.config.decoder_start_token_id
    open_ones: list[tuple[list[int], float]] = [([start, first], 0.0)]
    closed: list[tuple[list[int], float]] = []
    banned = {*tokenizer.special_ids.values(), first} - {second, third}
    for _ in range(max_tokens):
        grown: list[tuple[list[int], float]] = []
        for ids, score in open_ones:
            chances = _go_on(model, source, mask, ids)
            chances[sorted(banned)] = -torch.inf
            stop = third if second in ids else second
            chances[second if stop == third else third] = -torch.inf
            top = chances.topk(min(beams, len(chances)))
            grown += [([*ids, id], score + value) for value, id in
                      zip(top.values.tolist(), top.indices.tolist(), strict=True)]  # fmt: skip
        grown.sort(key=lambda candidate: -candidate[1])
        closed += [candidate for candidate in grown if candidate[0][-1] == third]
        open_ones = [candidate for candidate in grown if candidate[0][-1] != third][:beams]
        best = sorted(closed, key=lambda candidate: -candidate[1])[:keep]
        if not open_ones or (len(best) == keep and best[-1][1] >= open_ones[0][1]):
            break
    best = sorted(closed, key=lambda candidate: -candidate[1])[:keep]
    return [(_write(ids[2:-1], second, tokenizer, pairs), score) for ids, score in best]


def _read_source(
    model: Any, template: Template, examples: Sequence[Any], words: Sequence[str], longest: int
) -> tuple[Any, Tensor]:
    """Run the encoder once on all examples with their label words."""
    questions = []
    for number, (example, word) in enumerate(zip(examples, words, strict=True)):
        fields = dict(example) if isinstance(example, dict) else {}
        if not fields:
            fields = {n: getattr(example, n) for n in ("text_a", "text_b") if hasattr(example, n)}
            fields = fields or dict(example.fields)
        filled = {**fields, "meta": {"label_word": word}}
        prompt = template.encode(filled, longest, name=f"example {number}")
        questions.append(Question([prompt], [], []))
    columns = collate_questions(questions, template.tokenizer.pad_id or 0)
    device = next(model.parameters()).device
    ids, mask = (torch.tensor(columns[n], device=device) for n in ("input_ids", "attention_mask"))
    return model.encode(ids, mask), mask


def _go_on(model: Any, source: Any, mask: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the next token's log-probabilities averaged over the examples, (V,)."""
    rows = torch.tensor([ids] * len(mask), device=mask.device)
    last = torch.full_like(rows[:, :1], len(ids) - 1)
    out = model(encoder_outputs=source, attention_mask=mask, decoder_input_ids=rows, logits_at=last)
    return out.logits[:, 0].float().log_softmax(-1).mean(0).cpu()


def _write(ids: Sequence[int], second: int, tokenizer: Tokenizer, pairs: bool) -> str:
    """Return the template text for generated ids, with braces escaped."""
    position = list(ids).index(second)
    parts = [
        tokenizer.decode_written(part).strip() for part in (ids[:position], ids[position + 1 :])
    ]
    shown = [
        f'{{"text":{json.dumps(part, ensure_ascii=False)}}}' if set(part) & set("{}") else part
        for part in parts
    ]
    ends = ['{"placeholder":"text_b"}'] if pairs else []
    pieces = ['{"placeholder":"text_a"}', shown[0], '{"mask"}', shown[1], *ends]
    return " ".join(piece for piece in pieces if piece)
