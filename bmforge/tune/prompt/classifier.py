"""Prompt-based classification: combines a model, a template and a verbalizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, ShapeError
from bmforge.surgery import eval_mode
from bmforge.tune.prompt.call import PositionOutputs, run_at_answers
from bmforge.tune.prompt.questions import Question, collate_questions, encode_question, score_words
from bmforge.tune.prompt.template import Encoded, Template

__all__ = ["ClassOutput", "PromptClassifier", "calibrate", "class_loss", "score_batch"]

Batch = dict[str, Tensor]


class ClassOutput(NamedTuple):
    """Output of a `PromptClassifier`.

    Attributes:
        class_logits: (B, C); log-probabilities with most verbalizers.
        loss: mean loss over the samples; None without labels.
        vocab_logits: (B, V), or (B, M, V) for several masks; for a verbalizer that scores words,
            the log-probabilities of the W label words, (B, W).
    """

    class_logits: Tensor
    loss: Tensor | None
    vocab_logits: Tensor


class PromptClassifier(nn.Module):
    """Classifier that uses a language model's predictions at the mask of a template.

    Args:
        model: language model that the template was built for.
        template: template that encodes the examples.
        verbalizer: module that maps the model's predictions to class scores.
        frozen: True to train only the template's soft tokens and the verbalizer.

    Raises:
        ConfigError: template and verbalizer have different numbers of masks, or text after the mask
            would not be scored.
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
        """Return the class scores of a batch of prompts.

        Args:
            mask_at: answer positions.
            labels: target classes, see `class_loss`; if given, the loss is computed too.
            inputs: the other tensors that `collate` returns.

        Shape:
            mask_at: (B, M)
        """
        scored = score_batch(self.model, self.verbalizer, {"mask_at": mask_at, **inputs})
        assert scored is not None, "the stages of a pipeline are trained with `prompt_objective`"
        scores, word_logits = scored
        loss = None
        if labels is not None:
            loss = class_loss(scores, labels, self.verbalizer).mean()
        return ClassOutput(scores, loss, word_logits)

    def collate(
        self,
        prompts: Sequence[Encoded | Question],
        labels: Sequence[Any] | None = None,
    ) -> Batch:
        """Collate prompts (or results of `ask`) into a batch, padded on the right."""
        device = next(self.model.parameters()).device
        questions = [p if isinstance(p, Question) else Question([p], [], []) for p in prompts]
        columns = collate_questions(questions, self.pad_id)
        if labels is not None:
            columns["labels"] = list(labels)
        return {name: torch.tensor(values, device=device) for name, values in columns.items()}

    def ask(self, example: Any, **options: Any) -> Question:
        """Encode an example as a `Question`; `options` are those of `Template.encode`."""
        return encode_question(self.template, self.verbalizer, example, **options)

    def batches(self, examples: Sequence[Any], size: int = 32, **options: Any) -> Iterator[Batch]:
        """Yield batches of encoded examples; `options` are those of `Template.encode`."""
        for begin in range(0, len(examples), size):
            part = range(begin, min(begin + size, len(examples)))
            yield self.collate(
                [self.ask(examples[n], **{"name": f"example {n}", **options}) for n in part]
            )

    @torch.no_grad()
    def classify(self, examples: Sequence[Any], **options: Any) -> Tensor:
        """Return the class scores of examples, (N, C); `options` are those of `batches`."""
        with eval_mode(self):
            logits = [self(**batch).class_logits for batch in self.batches(examples, **options)]
        return torch.cat(logits)

    @torch.no_grad()
    def look(
        self, examples: Sequence[Any], hidden: bool = False, **options: Any
    ) -> PositionOutputs:
        """Return the model's outputs at the masks of examples, for fitting a verbalizer.

        Args:
            examples: examples in any form that `Template.wrap` accepts.
            hidden: True to return the last hidden states too.
            options: options of `batches`.

        Shape:
            logits: (N, V), or (N, M, V); hidden: (N, D), or (N, M, D)
        """
        logits, states = [], []
        with eval_mode(self):
            for batch in self.batches(examples, **options):
                places = batch.pop("mask_at")
                outputs = run_at_answers(self.model, _inputs(batch), places, hidden)
                assert outputs is not None
                outputs_at_mask = _single(outputs)
                logits.append(outputs_at_mask.logits)
                states.append(outputs_at_mask.hidden)
        return PositionOutputs(torch.cat(logits), torch.cat(states) if hidden else None)  # type: ignore[arg-type]


def check_masks(template: Template, verbalizer: Any) -> None:
    """Check that a template and a verbalizer are compatible.

    Raises:
        ConfigError: the numbers of masks differ, or text after the mask would not be scored.
    """
    if verbalizer.num_masks != template.num_masks:
        raise ConfigError(
            f"the template has {template.num_masks} masks, but the verbalizer needs "
            f"{verbalizer.num_masks}. Add or remove masks."
        )
    if template.behind == "score" and verbalizer.takes != "words":
        raise ConfigError(
            "behind='score' scores the text after each label word, which needs a "
            "verbalizer with join='joint'. Create the verbalizer with join='joint'."
        )


def score_batch(
    model: Any, verbalizer: Any, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Run the model on a batch; return the class scores, and the logits or word scores.

    The result is None on a pipeline stage other than the last.
    """
    arguments = dict(batch)
    takes, mask_at = verbalizer.takes, arguments.pop("mask_at")
    outputs = run_at_answers(model, _inputs(arguments), mask_at, takes in ("hidden", "both"))
    if outputs is None:
        return None
    if takes == "words":
        scores = score_words(outputs.logits, arguments["answers"], arguments["which"])
        if getattr(verbalizer, "per_token", False):
            scores = scores / (arguments["answers"] != IGNORE_INDEX).sum(-1)
        return verbalizer(scores), scores
    at_mask = _single(outputs)
    if takes == "logits":
        return verbalizer(at_mask.logits), at_mask.logits
    extra = (at_mask.logits,) if takes == "both" else ()
    return verbalizer(at_mask.hidden, *extra), at_mask.logits


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name not in ("answers", "which")}


def _single(outputs: PositionOutputs) -> PositionOutputs:
    """Remove the mask dimension if there is only one mask."""
    if outputs.logits.shape[1] > 1:
        return outputs
    return PositionOutputs(
        outputs.logits[:, 0], None if outputs.hidden is None else outputs.hidden[:, 0]
    )


def class_loss(scores: Tensor, labels: Tensor, verbalizer: Any) -> Tensor:
    """Return the loss of every sample, (B,); 0 for samples with the label -100.

    Args:
        scores: class scores of a verbalizer.
        labels: class indices; or (B, C) floats, 1 for each class of a sample; or (B,) floats
            between 0 and 1 that interpolate between the first and the second of two classes.
        verbalizer: verbalizer that computed the scores.

    Shape:
        scores: (B, C)

    Raises:
        ConfigError: samples have several classes, but the scores are normalized.
        ShapeError: float labels have a different shape.

    Source: Gao et al., "Making pre-trained language models better few-shot learners" (2021) for
    regression between two words.
    """
    if not labels.is_floating_point():
        return F.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="none")
    if labels.shape == scores.shape:
        if verbalizer.normalize:
            raise ConfigError(
                "the labels assign several classes to one sample, but the verbalizer normalizes "
                "scores with a softmax. Create the verbalizer with normalize=False."
            )
        losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return losses.mean(-1)
    if labels.shape != scores.shape[:1] or scores.shape[1] != 2:
        raise ShapeError(
            f"float labels have the shape {tuple(labels.shape)} (expected: {tuple(scores.shape)}, "
            "one value per sample and class; with two classes also one value per sample)."
        )
    chances = scores.log_softmax(-1)
    return -((1 - labels) * chances[:, 0] + labels * chances[:, 1])


@torch.no_grad()
def calibrate(classifier: PromptClassifier, texts: Sequence[Any], **options: Any) -> None:
    """Calibrate a classifier's verbalizer with the label words' scores on content-free texts.

    Args:
        classifier: classifier whose verbalizer has `calibrate_`.
        texts: content-free examples, such as examples with empty fields.
        options: options of `PromptClassifier.batches`.

    Raises:
        ConfigError: there are no texts.

    Source: Zhao et al., "Calibrate before use" (2021); Hu et al., "Knowledgeable prompt-tuning".
    """
    if not texts:
        raise ConfigError("calibration needs at least one text. Pass texts.")
    with eval_mode(classifier):
        logits = [
            classifier(**batch).vocab_logits for batch in classifier.batches(texts, **options)
        ]
    classifier.verbalizer.calibrate_(torch.cat(logits))
