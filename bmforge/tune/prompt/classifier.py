"""Classification by a prompt: a model, a template and a verbalizer put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.tune.prompt.template import Encoded, Template
from bmforge.tune.prompt.truncate import Cut

__all__ = ["ClassOutput", "PromptClassifier", "calibrate"]

Batch = dict[str, Tensor]


class ClassOutput(NamedTuple):
    """What a `PromptClassifier` answers.

    Attributes:
        class_logits: (B, C), of most verbalizers log-probabilities.
        loss: the mean cross-entropy; None without labels.
        vocab_logits: (B, V), or (B, M, V) for several masks.
    """

    class_logits: Tensor
    loss: Tensor | None
    vocab_logits: Tensor


class PromptClassifier(nn.Module):
    """A model that classifies by what it would write at a template's mask.

    Args:
        model: predicts tokens, and is the template's.
        template: makes its input.
        verbalizer: turns scores of tokens into scores of classes.
        frozen: train only the template's rows and the verbalizer.

    Raises:
        ConfigError: the verbalizer needs another number of masks than the template has.
    """

    def __init__(
        self, model: nn.Module, template: Template, verbalizer: Any, *, frozen: bool = False
    ) -> None:
        super().__init__()
        needed = verbalizer.num_masks
        if needed != template.num_masks:
            raise ConfigError(
                f"the template has {template.num_masks} masks, and the verbalizer reads {needed}."
            )
        self.model, self.template, self.verbalizer = model, template, verbalizer
        self.pad_id = template.tokenizer.pad_id or 0
        if frozen:
            model.requires_grad_(False)
            for parameter in template.soft_parameters:
                parameter.requires_grad_(True)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        mask_at: Tensor,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> ClassOutput:
        """Score the classes of prompts.

        Args:
            input_ids: as `collate` puts them together.
            attention_mask: 1 for tokens, 0 for padding.
            mask_at: where answers are predicted.
            decoder_input_ids: of a decoder of its own.
            labels: the right classes; returns the loss too.

        Shape:
            input_ids, attention_mask: (B, T); mask_at: (B, M); decoder_input_ids: (B, S);
            labels: (B,)
        """
        apart = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **apart)
        rows = torch.arange(len(mask_at), device=mask_at.device)[:, None]
        logits = out.logits[rows, mask_at]
        logits = logits[:, 0] if self.template.num_masks == 1 else logits
        scores = self.verbalizer(logits)
        loss = None if labels is None else F.cross_entropy(scores, labels)
        return ClassOutput(scores, loss, logits)

    def collate(self, prompts: Sequence[Encoded], labels: Sequence[int] | None = None) -> Batch:
        """Return a batch of prompts, padded behind."""
        device = next(self.model.parameters()).device
        width = max(len(prompt.input_ids) for prompt in prompts)
        spare = [width - len(prompt.input_ids) for prompt in prompts]
        filled = [p.input_ids + [self.pad_id] * n for p, n in zip(prompts, spare, strict=True)]
        columns: dict[str, list[Any]] = {
            "input_ids": filled,
            "attention_mask": [[1] * (width - n) + [0] * n for n in spare],
            "mask_at": [prompt.mask_at for prompt in prompts],
        }
        if self.template.asking.writes_apart:
            columns["decoder_input_ids"] = [prompt.decoder_input_ids for prompt in prompts]
        if labels is not None:
            columns["labels"] = list(labels)
        return {name: torch.tensor(values, device=device) for name, values in columns.items()}

    def batches(
        self, examples: Sequence[Any], size: int = 32, max_seq_len: int = 512, cut: Cut = "tail"
    ) -> Iterator[Batch]:
        """Yield batches of examples, each tokenised when it is asked for."""
        for begin in range(0, len(examples), size):
            part = range(begin, min(begin + size, len(examples)))
            yield self.collate(
                [self.template.encode(examples[n], max_seq_len, cut, f"example {n}") for n in part]
            )

    @torch.no_grad()
    def classify(self, examples: Sequence[Any], **options: Any) -> Tensor:
        """Return the classes' scores of examples, (N, C); `options` as for `batches`."""
        was_training = self.training
        self.eval()
        found = [self(**batch).class_logits for batch in self.batches(examples, **options)]
        self.train(was_training)
        return torch.cat(found)


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
    was_training = classifier.training
    classifier.eval()
    found = [classifier(**batch).vocab_logits for batch in classifier.batches(texts, **options)]
    classifier.train(was_training)
    classifier.verbalizer.calibrate_(torch.cat(found))
