"""Heads of text encoders with more than one layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.models.encoder_config import EncoderConfig
from bmforge.nn import LMHead, NormSpec, build_norm
from bmforge.nn.mlp import get_activation

__all__ = ["DeepClassifier", "MaskedHead"]


class MaskedHead(nn.Module):
    """Masked-LM head: linear layer, activation, norm, and a decoder tied to the embedding.

    Shape:
        x: (..., D) -> (..., D); `decoder` maps it to (..., V)
    """

    def __init__(self, config: EncoderConfig, activation: str) -> None:
        super().__init__()
        self.activation = get_activation(activation)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = build_norm(NormSpec("layer", config.norm_eps), config.hidden_size)
        self.decoder = LMHead(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the input of `decoder`."""
        return self.norm(self.activation(self.dense(x)))


class DeepClassifier(nn.Module):
    """Classifier of two linear layers with tanh between them.

    Shape:
        x: (B, D) -> (B, L)
    """

    def __init__(self, hidden_size: int, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = torch.tanh(self.dense(x))
        return self.out(F.dropout(x, self.dropout, self.training) if self.dropout else x)
