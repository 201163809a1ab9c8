"""Contextual calibration under OpenPrompt's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.surgery import evaluating

__all__ = ["calibrate"]


@torch.no_grad()
def calibrate(prompt_model: Any, dataloader: Any) -> Tensor:
    """Return the mean logits at the masks over a loader's examples.

    Args:
        prompt_model: a `PromptForClassification`.
        dataloader: loader of examples; their labels are not used.

    Raises:
        ConfigError: the loader is empty.
    """
    device = prompt_model.device
    with evaluating(prompt_model):
        logits = [prompt_model.forward_without_verbalize(b.to(device)) for b in dataloader]
    if not logits:
        raise ConfigError(
            "calibration needs at least one text, but the support set is empty. Add examples."
        )
    return torch.cat(logits).mean(0)
