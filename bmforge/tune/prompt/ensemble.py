"""Ensembles of templates: averages the predictions of several prompt classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.tune.prompt.classifier import PromptClassifier

__all__ = ["classify_together"]


def classify_together(
    classifiers: Sequence[PromptClassifier],
    examples: Sequence[Any],
    mean: Literal["probabilities", "logits"] = "probabilities",
    **options: Any,
) -> Tensor:
    """Return the class log-probabilities of examples, averaged over several classifiers.

    Args:
        classifiers: classifiers of the same classes; usually one model with several templates.
        examples: examples in any form that `Template.wrap` accepts.
        mean: values to average: "probabilities", or "logits" (scores before the softmax).
        options: options of `PromptClassifier.batches`.

    Shape:
        returns (N, C)

    Raises:
        ConfigError: there are no classifiers, their numbers of classes differ, or `mean` is
            unknown.
    """
    if not classifiers:
        raise ConfigError("classify_together has no classifiers. Pass one or more classifiers.")
    counts = sorted({classifier.verbalizer.num_classes for classifier in classifiers})
    if len(counts) != 1:
        raise ConfigError(
            f"the classifiers have different numbers of classes: {', '.join(map(str, counts))}. "
            "Use classifiers with the same classes."
        )
    if mean not in ("probabilities", "logits"):
        raise ConfigError(f"unknown mean: mean={mean!r} (supported: probabilities, logits).")
    logits = torch.stack([each.classify(examples, **options) for each in classifiers])
    if mean == "logits":
        return logits.mean(0).log_softmax(-1)
    return logits.softmax(-1).mean(0).log()
