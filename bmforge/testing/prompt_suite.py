"""Tests of prompt-based classification for every family: zero-shot, soft tokens, label words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.models import Model
from bmforge.testing.capability import capability
from bmforge.testing.character_tokenizer import character_tokenizer_for
from bmforge.testing.suite_base import SuiteBase
from bmforge.testing.tolerance import assert_close
from bmforge.tune.prompt import ManualVerbalizer, PromptClassifier, Template

__all__ = ["PROMPT", "PROMPTED", "PromptSuite", "open_prompted"]

PROMPT = '{"placeholder":"text_a"} {"soft"}{"soft"} it is {"mask"}'
PROMPTED = [{"text_a": "a film"}, {"text_a": "not a good one"}]
_WORDS = [["good", "fine"], ["bad"]]
_HEADS = ("masked_lm", "language_model", "sequence_to_sequence")


def prompted_config(config: Any) -> Any:
    """Return a tiny config with an LM head; for GLM, with the tokenizer's special tokens."""
    config = config.replace(head=next(head for head in _HEADS if head in config.heads))
    if hasattr(config, "sop_token_id"):
        config = config.replace(sop_token_id=5, mask_token_id=4)
    if hasattr(config, "num_relations"):  # a document tree needs at least this many relations
        config = config.replace(num_relations=80)
    return config


def open_prompted(model_class: type[Model], config: Any, **options: Any) -> tuple[Any, Any]:
    """Return a float64 model for prompts, and its tokenizer."""
    model = model_class.from_config(prompted_config(config), dtype=torch.float64, **options)
    return model.eval(), character_tokenizer_for(model)


class PromptSuite(SuiteBase):
    """Tests of prompts; `FamilySuite` inherits this."""

    @capability("prompt")
    def test_prompt(self) -> None:
        """Class logits are correct for label words of one and of several tokens.

        The expected values are computed from the logits at all positions. Training soft tokens
        reduces the loss.
        """
        model, tokenizer = open_prompted(self.model_class, self.tiny_config())
        template = Template(PROMPT, tokenizer, model)
        words = ManualVerbalizer(_WORDS, tokenizer, join="mean", normalize=False)
        _check_first(PromptClassifier(model, template, words, frozen=True))
        _check_whole(model, template, tokenizer)
        _check_learning(PromptClassifier(model, template, words, frozen=True))


def _all_logits(classifier: PromptClassifier, prompts: Any) -> tuple[Tensor, Tensor]:
    """Return the logits at all positions, and the positions of the answers."""
    batch = classifier.collate(prompts)
    positions = batch.pop("mask_at")
    return classifier.model(**batch).logits, positions


def _check_first(classifier: PromptClassifier) -> None:
    template, words = classifier.template, classifier.verbalizer
    with torch.no_grad():
        scored = classifier.classify(PROMPTED)
        logits, positions = _all_logits(
            classifier, [template.encode(example) for example in PROMPTED]
        )
    for row in range(len(PROMPTED)):
        token_logits = logits[row, positions[row, 0]]
        scores = [
            torch.stack([token_logits[ids].mean() for ids in own]).mean() for own in words.tokens
        ]
        assert_close(scored[row], torch.stack(scores))


def _check_whole(model: Any, template: Template, tokenizer: Any) -> None:
    """Check label words of several tokens, predicted autoregressively or at one mask per token."""
    words = ManualVerbalizer(_WORDS, tokenizer, join="joint", normalize=False)
    classifier = PromptClassifier(model, template, words, frozen=True)
    scored = classifier.classify(PROMPTED)
    with torch.no_grad():
        for row, example in enumerate(PROMPTED):
            scores = []
            for ids in words.answers(example):
                prompt = template.encode(example, answer=ids)
                logits, positions = _all_logits(classifier, [prompt])
                log_probs = logits[0, positions[0]].log_softmax(-1)
                assert prompt.predicted == ids
                scores.append(sum(log_probs[n, id] for n, id in enumerate(ids)))
            totals = torch.stack(scores)
            assert_close(scored[row], torch.stack([totals[:2].mean(), totals[2]]))


def _check_learning(classifier: PromptClassifier) -> None:
    """Check that three training steps of the soft tokens reduce the loss."""
    (rows,) = classifier.template.soft_parameters
    batch = classifier.collate([classifier.ask(example) for example in PROMPTED], [0, 1])
    optimizer, losses = torch.optim.Adam([rows], lr=1e-3), []
    for _ in range(4):
        loss = classifier(**batch).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert rows.grad is not None
    assert bool(rows.grad.any(1).all())
    assert losses[3] < losses[0]
    assert all(p.grad is None for p in classifier.model.parameters() if p is not rows)
