"""Configuration of MoEfication, which splits MLPs into experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from bmforge.errors import ConfigError

__all__ = ["Grouping", "MoEfyConfig", "RouterForm"]

Grouping = Literal["weights", "coactivation", "random"]
RouterForm = Literal["two_layer", "linear", "similarity"]


@dataclass(frozen=True)
class MoEfyConfig:
    """Settings of MoEfication.

    Args:
        num_experts: number of experts E; must divide the number of features of every split MLP.
        share: fraction of the experts that are active per token.
        shares: dict from glob of block names to a fraction that overrides `share`.
        where: name globs of the blocks whose MLPs to split.
        group: grouping of features: "weights" (balanced k-means of rows), "coactivation" (graph
            cut by METIS) or "random" (control).
        router: kind of router: "two_layer" and "linear" are trained on feature activity;
            "similarity" compares a token with the mean row of every expert.
        always: number of features, the most active ones, that are computed for every token.
        choice: selection of experts: "top_k" for each token, or "per_call" for all tokens of a
            forward pass together, so that tokens need no sorting by expert.
        relu: first replace the activation with ReLU, which is sparser; the model must be trained or
            distilled afterwards.
        max_tokens: number of calibration tokens.
        epochs: number of epochs of router training; the best epoch is selected on a held-out tenth
            of the tokens.
        batch_size: number of tokens per training step of the router.
        lr: learning rate of the router (Adam).
        seed: random seed.
    """

    num_experts: int = 32
    share: float = 0.2
    shares: dict[str, float] = field(default_factory=dict)
    where: tuple[str, ...] = ("**",)
    group: Grouping = "weights"
    router: RouterForm = "two_layer"
    always: int = 0
    choice: Literal["top_k", "per_call"] = "top_k"
    relu: bool = False
    max_tokens: int = 8192
    epochs: int = 30
    batch_size: int = 512
    lr: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range."""
        problems = []
        if self.num_experts < 2:
            problems.append(f"num_experts={self.num_experts} must be at least 2")
        for name, share in {"share": self.share, **self.shares}.items():
            if not 0 < share <= 1:
                problems.append(f"{name}={share} must be above 0 and at most 1")
        words = {"group": Grouping, "router": RouterForm, "choice": Literal["top_k", "per_call"]}
        for name, choices in words.items():
            value, fits = getattr(self, name), get_args(choices)
            if value not in fits:
                problems.append(f"{name}={value!r} must be one of {', '.join(map(repr, fits))}")
        for name in ("max_tokens", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be above 0")
        if self.always < 0:
            problems.append(f"always={self.always} must be at least 0")
        if problems:
            raise ConfigError(f"moefy: {'; '.join(problems)}.")
