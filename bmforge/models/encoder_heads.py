"""Heads with several layers for text encoders, and mean pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.models.encoder_config import EncoderConfig
from bmforge.nn import LMHead, NormSpec, build_norm
from bmforge.nn.mlp import get_activation

__all__ = ["DeepClassifier", "MaskedHead", "PredictionClassifier", "mean_of_tokens"]


class MaskedHead(nn.Module):
    """Masked-LM head: linear layer, activation, norm, and a decoder tied to the embedding.

    Args:
        config: config with the sizes.
        activation: name of the activation.
        norm: hyperparameters of the norm.
        bias: whether the linear layer has a bias.

    Shape:
        x: (..., D) -> (..., D); `decoder` maps it to (..., V)
    """

    def __init__(
        self, config: EncoderConfig, activation: str, norm: NormSpec, bias: bool = True
    ) -> None:
        super().__init__()
        self.activation = get_activation(activation)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)
        self.norm = build_norm(norm, config.hidden_size)
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


class PredictionClassifier(nn.Module):
    """Linear layer, activation, norm, and a linear classifier (ModernBERT).

    Args:
        hidden_size: width D of the input.
        num_labels: number L of classes.
        activation: name of the activation.
        norm: hyperparameters of the norm.
        bias: whether the first linear layer has a bias.
        dropout: dropout probability before the last linear layer.

    Shape:
        x: (..., D) -> (..., L)
    """

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        activation: str,
        norm: NormSpec,
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.activation, self.dropout = get_activation(activation), dropout
        self.dense = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.norm = build_norm(norm, hidden_size)
        self.out = nn.Linear(hidden_size, num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.norm(self.activation(self.dense(x)))
        return self.out(F.dropout(x, self.dropout, self.training) if self.dropout else x)


def mean_of_tokens(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the mean hidden state of each sequence, excluding padding.

    Shape:
        x: (B, T, D); attention_mask: (B, T); returns (B, D)
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return x.mean(1)
    seen = attention_mask[..., None].to(x.dtype)
    return (x * seen).sum(1) / seen.sum(1).clamp(min=1e-9)
