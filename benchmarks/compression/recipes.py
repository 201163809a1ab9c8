"""Compression recipes that `quality.py` measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bmforge.compress import (
    CompressConfig,
    DistillConfig,
    DistillLoss,
    MoEfyConfig,
    PruneConfig,
    QuantizeConfig,
    StructureConfig,
)
from bmforge.compress.phases import PhaseSteps

__all__ = ["NEWS", "RECIPES", "TEXT", "Recipe", "Shapes"]

LOGITS = DistillLoss(kind="logits", temperature=2.0)


@dataclass(frozen=True)
class Shapes:
    """Sizes of the pruned models of a task.

    Args:
        num_heads: heads of the model with half of the blocks' parameters.
        intermediate_size: MLP width of that model.
        few_heads: heads of the smallest model.
        num_layers: layers of the smallest model.
        embed: glob of the embeddings.
        relu: replace the activation of the MLPs by ReLU before MoEfication.
    """

    num_heads: int
    intermediate_size: int
    few_heads: int
    num_layers: int
    embed: str
    relu: bool


# Both models have 6 blocks with hidden size 384 and MLP width 1536: 2/3 of the heads and an MLP
# width of 640 are half of the blocks' parameters.
NEWS = Shapes(8, 640, 6, 2, "embed", relu=True)
TEXT = Shapes(4, 640, 3, 2, "embed", relu=False)


@dataclass(frozen=True)
class Recipe:
    """A compression recipe.

    Args:
        config: function that returns the config for the sizes of a task.
        shares: shares of the training steps for structured pruning, MoEfication and weights.
        wanted: targets by task in per cent: the least share of the dense model's accuracy, or the
            largest increase of the bits per byte.
        then: (scheme, globs) of post-training quantization at the end.
        faster: learning rate divided by that of the dense model.
    """

    config: Callable[[Shapes], CompressConfig] = field(repr=False)
    shares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    wanted: Mapping[str, float] = field(default_factory=dict)
    then: tuple[tuple[str, tuple[str, ...]], ...] = ()
    faster: float = 1.0

    @property
    def trains(self) -> bool:
        """Whether the recipe trains."""
        return any(self.shares)

    def build(self, shapes: Shapes, steps: int) -> tuple[CompressConfig, PhaseSteps]:
        """Return the config and the steps of each phase, which sum to `steps`."""
        counts = [round(share * steps) for share in self.shares]
        return self.config(shapes), PhaseSteps(*counts)


def distill(*, inside: bool = True, layers: Any = "same") -> DistillConfig:
    """Return the distillation from the dense model.

    Args:
        inside: distill hidden states too.
        layers: layers whose hidden states are distilled.
    """
    hidden = (DistillLoss(kind="hidden", layers=layers),) if inside else ()
    return DistillConfig(losses=(LOGITS, *hidden))


def half(shapes: Shapes) -> StructureConfig:
    """Return structured pruning to half of the blocks' parameters."""
    sizes = {"num_heads": shapes.num_heads, "intermediate_size": shapes.intermediate_size}
    return StructureConfig(**sizes, by="taylor")


def experts(shapes: Shapes, count: int) -> MoEfyConfig:
    """Return MoEfication in which a fifth of the experts computes."""
    return MoEfyConfig(num_experts=count, share=0.2, relu=shapes.relu, max_tokens=12288)


ZEROS = PruneConfig(method="sparsegpt", pattern="2:4")
INT8 = QuantizeConfig(scheme="int8-dynamic")


def together(shapes: Shapes, inside: bool) -> CompressConfig:
    """Return all four methods, with structured pruning to a half."""
    return CompressConfig(
        structure=half(shapes),
        moefy=experts(shapes, 20),
        prune=ZEROS,
        quantize=INT8,
        distill=distill(inside=inside),
    )


def headline(shapes: Shapes) -> CompressConfig:
    """Return all four methods for the smallest model."""
    sizes = {"num_heads": shapes.few_heads, "intermediate_size": shapes.intermediate_size}
    return CompressConfig(
        structure=StructureConfig(**sizes, num_layers=shapes.num_layers, by="taylor"),
        moefy=experts(shapes, 20),
        prune=ZEROS,
        quantize=INT8,
        distill=distill(layers="uniform"),
    )


def _one(part: str, make: Callable[[Shapes], Any], **options: Any) -> Callable[..., CompressConfig]:
    return lambda shapes: CompressConfig(distill=distill(**options), **{part: make(shapes)})


RECIPES: dict[str, Recipe] = {
    "int8": Recipe(
        lambda shapes: CompressConfig(quantize=QuantizeConfig()),
        wanted={"news": 99.5, "text": 0.5},
    ),
    "int8-dynamic": Recipe(
        lambda shapes: CompressConfig(quantize=INT8), wanted={"news": 99.5, "text": 0.5}
    ),
    "2:4": Recipe(_one("prune", lambda shapes: ZEROS), (0, 0, 1), {"news": 98, "text": 2}),
    "structure": Recipe(_one("structure", half), (1, 0, 0), {"news": 97, "text": 3}),
    "experts": Recipe(
        _one("moefy", lambda shapes: experts(shapes, 32)), (0, 1, 0), {"news": 97, "text": 3}
    ),
    "all": Recipe(
        lambda shapes: together(shapes, True), (0.5, 0.25, 0.25), {"news": 95, "text": 5}
    ),
    "4x and 2x": Recipe(
        lambda shapes: CompressConfig(structure=half(shapes), distill=distill(), quantize=None),
        (1, 0, 0),
        {"news": 97, "text": 3},
        then=(("int8-dynamic", ()), ("int8", ("embed",))),
    ),
    "headline": Recipe(headline, (0.6, 0.2, 0.2), {"news": 90, "text": 10}),
    "structure, logits": Recipe(_one("structure", half, inside=False), (1, 0, 0)),
    "experts, logits": Recipe(
        _one("moefy", lambda shapes: experts(shapes, 32), inside=False), (0, 1, 0)
    ),
    "2:4, logits": Recipe(_one("prune", lambda shapes: ZEROS, inside=False), (0, 0, 1)),
    "all, logits": Recipe(lambda shapes: together(shapes, False), (0.5, 0.25, 0.25)),
}
