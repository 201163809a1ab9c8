"""How MLPs become experts: data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from bmforge.errors import ConfigError, suggest

__all__ = ["Grouping", "MoEfyConfig", "RouterForm"]

Grouping = Literal["weights", "coactivation", "random"]
RouterForm = Literal["two_layer", "linear", "similarity"]


@dataclass(frozen=True)
class MoEfyConfig:
    """What to make of a model's MLPs.

    Args:
        num_experts: E; divides the features of every MLP that is split.
        share: of its experts that work on a token.
        shares: name glob of blocks -> another share for those.
        where: name globs of the blocks whose MLPs are split.
        group: features belong together whose rows are alike ("weights", balanced k-means), that
            are active together ("coactivation", a graph cut by METIS), or at "random", as a
            control.
        router: "two_layer" and "linear" are trained on what the features do with the batches'
            tokens; "similarity" compares a token with the mean row of every expert.
        always: so many features, the most active ones, work on every token.
        choice: "top_k": every token has its own experts; "per_call": all tokens of a call the same,
            which needs no sorting.
        relu: swap the activation for ReLU first, which is seldom active; the model must be trained
            (or distilled) afterwards.
        max_tokens: of the batches that are looked at.
        epochs: how often the router sees them, the tenth apart on which the best one is found.
        batch_size: tokens of one step of the router.
        lr: of the router's Adam.
        seed: of what is drawn.
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
        """Check each by itself."""
        problems = []
        if self.num_experts < 2:
            problems.append(f"num_experts={self.num_experts} must be 2 or more")
        for name, share in {"share": self.share, **self.shares}.items():
            if not 0 < share <= 1:
                problems.append(f"{name}={share} must be above 0 and at most 1")
        words = {"group": Grouping, "router": RouterForm, "choice": Literal["top_k", "per_call"]}
        for name, known in words.items():
            value, fits = getattr(self, name), get_args(known)
            if value not in fits:
                problems.append(f"{name}={value!r} is unknown{suggest(value, fits)}")
        for name in ("max_tokens", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be above 0")
        if self.always < 0:
            problems.append(f"always={self.always} must not be below 0")
        if problems:
            raise ConfigError(f"moefy: {'; '.join(problems)}.")
