"""Classification by a prompt: a model, a template and a verbalizer put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, ShapeError
from bmforge.surgery import evaluating
from bmforge.tune.prompt.call import Answers, ask_model
from bmforge.tune.prompt.questions import Question, ask_example, lay_questions, score_words
from bmforge.tune.prompt.template import Encoded, Template

__all__ = ["ClassOutput", "PromptClassifier", "calibrate", "class_loss", "score_batch"]

Batch = dict[str, Tensor]


class ClassOutput(NamedTuple):
    """What a `PromptClassifier` answers.

    Attributes:
        class_logits: (B, C), of most verbalizers log-probabilities.
        loss: the mean of the rows' losses; None without labels.
        vocab_logits: (B, V), or (B, M, V) for several masks; of a verbalizer that takes words
            their log-probabilities, (B, W).
    """

    class_logits: Tensor
    loss: Tensor | None
    vocab_logits: Tensor


class PromptClassifier(nn.Module):
    """A model that classifies by what it would write at a template's mask.

    Args:
        model: predicts tokens, and is the template's.
        template: makes its input.
        verbalizer: turns what the model says into scores of classes.
        frozen: train only the template's rows and the verbalizer.

    Raises:
        ConfigError: the verbalizer needs another number of masks than the template has, or what
            stands behind the mask would not be scored.
    """

    def __init__(
        self, model: nn.Module, template: Template, verbalizer: Any, *, frozen: bool = False
    ) -> None:
        super().__init__()
        check_masks(template, verbalizer)
        self.model, self.template, self.verbalizer = model, template, verbalizer
        self.pad_id = template.tokenizer.pad_id or 0
        if frozen:
            model.requires_grad_(False)
            for parameter in template.soft_parameters:
                parameter.requires_grad_(True)

    def forward(
        self, mask_at: Tensor, labels: Tensor | None = None, **inputs: Tensor
    ) -> ClassOutput:
        """Score the classes of prompts.

        Args:
            mask_at: where answers are predicted.
            labels: the right classes, see `class_loss`; returns the loss too.
            inputs: what else `collate` puts together.

        Shape:
            mask_at: (B, M)
        """
        found = score_batch(self.model, self.verbalizer, {"mask_at": mask_at, **inputs})
        assert found is not None, "a pipeline's stages are asked by `prompt_objective`"
        scores, said = found
        loss = None
        if labels is not None:
            loss = class_loss(scores, labels, self.verbalizer).mean()
        return ClassOutput(scores, loss, said)

    def collate(
        self,
        prompts: Sequence[Encoded | Question],
        labels: Sequence[Any] | None = None,
    ) -> Batch:
        """Return a batch of prompts, or of what `ask` gives, padded behind."""
        device = next(self.model.parameters()).device
        asked = [p if isinstance(p, Question) else Question([p], [], []) for p in prompts]
        columns = lay_questions(asked, self.pad_id)
        if labels is not None:
            columns["labels"] = list(labels)
        return {name: torch.tensor(values, device=device) for name, values in columns.items()}

    def ask(self, example: Any, **options: Any) -> Question:
        """Return what is asked about an example; `options` as for `Template.encode`."""
        return ask_example(self.template, self.verbalizer, example, **options)

    def batches(self, examples: Sequence[Any], size: int = 32, **options: Any) -> Iterator[Batch]:
        """Yield batches of examples, each tokenised when it is asked for; `options` as there."""
        for begin in range(0, len(examples), size):
            part = range(begin, min(begin + size, len(examples)))
            yield self.collate(
                [self.ask(examples[n], **{"name": f"example {n}", **options}) for n in part]
            )

    @torch.no_grad()
    def classify(self, examples: Sequence[Any], **options: Any) -> Tensor:
        """Return the classes' scores of examples, (N, C); `options` as for `batches`."""
        with evaluating(self):
            found = [self(**batch).class_logits for batch in self.batches(examples, **options)]
        return torch.cat(found)

    @torch.no_grad()
    def look(self, examples: Sequence[Any], hidden: bool = False, **options: Any) -> Answers:
        """Return what the model says at the masks of examples: what verbalizers are fitted by.

        Args:
            examples: as for `batches`.
            hidden: the last hidden states too.
            options: as for `batches`.

        Shape:
            logits: (N, V), or (N, M, V); hidden: (N, D), or (N, M, D)
        """
        logits, states = [], []
        with evaluating(self):
            for batch in self.batches(examples, **options):
                places = batch.pop("mask_at")
                found = ask_model(self.model, _inputs(batch), places, hidden)
                assert found is not None
                one = _single(found)
                logits.append(one.logits)
                states.append(one.hidden)
        return Answers(torch.cat(logits), torch.cat(states) if hidden else None)  # type: ignore[arg-type]


def check_masks(template: Template, verbalizer: Any) -> None:
    """Refuse a template and a verbalizer that do not go together.

    Raises:
        ConfigError: they do not.
    """
    if verbalizer.num_masks != template.num_masks:
        raise ConfigError(
            f"the template has {template.num_masks} masks, and the verbalizer reads "
            f"{verbalizer.num_masks}."
        )
    if template.behind == "score" and verbalizer.takes != "words":
        raise ConfigError(
            "behind='score' scores the text after each word: give a verbalizer with join='joint'."
        )


def score_batch(
    model: Any, verbalizer: Any, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the scores of classes, and what the verbalizer was given of the model.

    None where a pipeline's stage has only carried on.
    """
    given = dict(batch)
    takes, mask_at = verbalizer.takes, given.pop("mask_at")
    found = ask_model(model, _inputs(given), mask_at, takes in ("hidden", "both"))
    if found is None:
        return None
    if takes == "words":
        scores = score_words(found.logits, given["answers"], given["which"])
        if getattr(verbalizer, "per_token", False):
            scores = scores / (given["answers"] != IGNORE_INDEX).sum(-1)
        return verbalizer(scores), scores
    one = _single(found)
    if takes == "logits":
        return verbalizer(one.logits), one.logits
    extra = (one.logits,) if takes == "both" else ()
    return verbalizer(one.hidden, *extra), one.logits


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name not in ("answers", "which")}


def _single(found: Answers) -> Answers:
    """Leave the dim of masks out where there is one."""
    if found.logits.shape[1] > 1:
        return found
    return Answers(found.logits[:, 0], None if found.hidden is None else found.hidden[:, 0])


def class_loss(scores: Tensor, labels: Tensor, verbalizer: Any) -> Tensor:
    """Return every row's loss, (B,); 0 for rows labelled -100.

    Args:
        scores: of a verbalizer.
        labels: numbers of classes; or (B, C) floats, 1 for each class that a row has; or (B,)
            floats between 0 and 1: how far from the first of two classes to the second.
        verbalizer: that gave them.

    Shape:
        scores: (B, C)

    Raises:
        ConfigError: several classes a row need scores that are not normalized.
        ShapeError: floats that are neither.

    Source: Gao et al., "Making pre-trained language models better few-shot learners" (2021) for
    regression between two words.
    """
    if not labels.is_floating_point():
        return F.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="none")
    if labels.shape == scores.shape:
        if verbalizer.normalize:
            raise ConfigError(
                "several classes a row: their scores compete in one softmax. Give the verbalizer "
                "normalize=False."
            )
        found = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return found.mean(-1)
    if labels.shape != scores.shape[:1] or scores.shape[1] != 2:
        raise ShapeError(
            f"labels {tuple(labels.shape)} of floats: needed is one for each of the classes "
            f"{tuple(scores.shape)}, or one a row for two classes."
        )
    chances = scores.log_softmax(-1)
    return -((1 - labels) * chances[:, 0] + labels * chances[:, 1])


@torch.no_grad()
def calibrate(classifier: PromptClassifier, texts: Sequence[Any], **options: Any) -> None:
    """Let a classifier's verbalizer divide by what the words score on texts of no class.

    Args:
        classifier: with a verbalizer that has `calibrate_`.
        texts: examples; of one whose fields are empty the words' own frequency is left.
        options: as for `PromptClassifier.batches`.

    Raises:
        ConfigError: there are no texts.

    Source: Zhao et al., "Calibrate before use" (2021); Hu et al., "Knowledgeable prompt-tuning".
    """
    if not texts:
        raise ConfigError("calibration needs at least one text; the support set is empty.")
    with evaluating(classifier):
        found = [classifier(**batch).vocab_logits for batch in classifier.batches(texts, **options)]
    classifier.verbalizer.calibrate_(torch.cat(found))
