"""`moefy`: splits MLPs into experts, of which only some are active per token.

The features of an MLP are permuted so that groups are contiguous. The MLP then runs as an MoE layer
that sums the selected experts' outputs; with all experts selected it equals the original MLP. A
checkpoint stores the dense MLP with permuted features, and the router.

Source: Zhang et al., "MoEfication: Transformer Feed-forward Layers are Mixtures of Experts" (2022),
and BMCook, which records inputs for MoEfication's scripts but has no layer that runs experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.moefy.activity import collect_inputs, each_activity, sum_groups
from bmforge.compress.moefy.cluster import group_at_random, group_rows, order_of
from bmforge.compress.moefy.coactivation import count_together, group_together
from bmforge.compress.moefy.config import MoEfyConfig
from bmforge.compress.moefy.router import captured_share, make_router, train_router_
from bmforge.errors import ConfigError
from bmforge.logging import get_logger, track
from bmforge.models.changes import Change
from bmforge.models.sizes import Sizes, sizes_of
from bmforge.nn import MLP, Block, MoE, MoESpec
from bmforge.nn.part import adapters_of
from bmforge.surgery import match_names

__all__ = ["LayerReport", "MoEfyReport", "moefy"]


@dataclass(frozen=True)
class LayerReport:
    """Result of MoEfication for one MLP.

    Args:
        num_experts: number of experts E.
        experts_per_token: number of active experts per token.
        captured: fraction of the total activity that the selected experts cover.
        oracle: the same fraction for an ideal selection of each token's most active experts.
    """

    num_experts: int
    experts_per_token: int
    captured: float
    oracle: float


@dataclass(frozen=True)
class MoEfyReport:
    """Results of MoEfication for a model: one `LayerReport` per split block."""

    layers: Mapping[str, LayerReport]

    @property
    def captured(self) -> float:
        """Captured activity relative to the oracle, averaged over layers."""
        shares = [layer.captured / max(layer.oracle, 1e-30) for layer in self.layers.values()]
        return sum(shares) / len(shares)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        return {name: dict(vars(layer)) for name, layer in self.layers.items()}


def moefy(
    model: Any, config: MoEfyConfig | None = None, batches: Iterable[Any] = ()
) -> MoEfyReport:
    """Split a model's MLPs into experts, in place.

    Args:
        model: bmforge model of any family, with its weights, before `parallelize`.
        config: settings; if None, the defaults.
        batches: keyword arguments of the model's forward, used to group features (if
            configured), train routers and measure activity.

    Returns:
        report with the activity that the routers capture in every layer

    Raises:
        ConfigError: an MLP already has experts, is quantized or has adapters, its features are
            not divisible by the number of experts, or there are no batches. The model is then
            unchanged.
    """
    config = config or MoEfyConfig()
    shares = _find_layers(model, config)
    for name in shares:
        _check_layer(model, name, config)
    batches = list(batches)
    if not batches:
        raise ConfigError(
            "moefy needs batches of real texts, because experts are formed from the features "
            "that are active together. Pass batches."
        )
    undo = _use_relu_(model) if config.relu else None
    try:
        names = [f"{name}.mlp" for name in shares]
        inputs = collect_inputs(model, names, batches, config.max_tokens)
        splits: dict[str, _Split] = {}
        for name, per_token in track(list(shares.items()), "experts"):
            mlp = model.get_submodule(f"{name}.mlp")
            splits[name] = _split_layer(mlp, inputs.pop(f"{name}.mlp"), per_token, config)
    except BaseException:
        if undo is not None:
            undo()
        raise
    _apply_splits_(model, shares, splits, config)
    report = MoEfyReport({name: split.report for name, split in splits.items()})
    get_logger().info(
        (
            "split %d MLPs into experts; the routers reach %.3f of the activity that ideal routers "
            "would reach"
        ),
        *(len(splits), report.captured),
    )
    return report


@dataclass(frozen=True)
class _Split:
    """Planned split of one MLP: order of its features, router, and captured activity."""

    order: Tensor
    router: nn.Module
    report: LayerReport


@torch.no_grad()
def _apply_splits_(
    model: Any, shares: Mapping[str, int], splits: Mapping[str, _Split], config: MoEfyConfig
) -> None:
    """Apply the planned splits to the model, in place."""
    for name, split in splits.items():
        _permute_(model.get_submodule(f"{name}.mlp"), split.order)
    groups: dict[int, list[str]] = {}
    for name, per_token in shares.items():
        groups.setdefault(per_token, []).append(name)
    for per_token, names in groups.items():
        model.change_(Change("resize", tuple(names), _options(config, per_token)))
    for name, split in splits.items():
        feed: MoE = model.get_submodule(f"{name}.mlp")
        for key, parameter in feed.router.named_parameters():
            parameter.copy_(split.router.get_parameter(key))


def _options(config: MoEfyConfig, per_token: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_experts": config.num_experts,
        "experts_per_token": per_token,
        "split": True,
        "router": "two_layer" if config.router == "two_layer" else "linear",
        "choice": config.choice,
    }
    return options | ({"shared_size": config.always} if config.always else {})


def _find_layers(model: Any, config: MoEfyConfig) -> dict[str, int]:
    """Return a dict from the name of a block to split to its number of active experts per token."""
    blocks = {n: m for n, m in model.named_modules() if isinstance(m, Block) and m.mlp is not None}
    if not blocks or getattr(model, "spec", None) is None:
        raise ConfigError(
            f"a {type(model).__name__} has no MLPs of bmforge that can be split. Load it with "
            "bmforge.models.AutoModel."
        )
    names = match_names(blocks, config.where, "layer")
    shares = dict.fromkeys(names, config.share)
    for glob, share in config.shares.items():
        shares |= dict.fromkeys(match_names(names, (glob,), "layer"), share)
    return {name: max(1, round(share * config.num_experts)) for name, share in shares.items()}


def _check_layer(model: Any, name: str, config: MoEfyConfig) -> None:
    block: Block = model.get_submodule(name)
    if isinstance(block.spec.mlp, MoESpec):
        raise ConfigError(
            f"{name} already has experts. Exclude the layer from `where`. To reduce the number of "
            "experts, use StructureConfig.num_experts."
        )
    parts = [part for _, part in block.mlp.named_modules()]  # type: ignore[union-attr]
    strange = [type(p).__name__ for p in parts[1:] if not isinstance(p, nn.Linear)]
    strange += [n for part in parts for n, _ in adapters_of(part)]
    if type(block.mlp) is not MLP or strange:
        raise ConfigError(
            f"the MLP of {name} already has changes "
            f"({', '.join(strange) or type(block.mlp).__name__}). Apply the methods in this order: "
            "structured pruning, MoEfication, sparsity, quantization, adapters."
        )
    options = Sizes(**_options(config, 1))
    sizes_of(block.spec).resized(options, name)


def _use_relu_(model: Any) -> Callable[[], None]:
    """Replace the activation of all MLPs with ReLU; return a function that restores it."""
    config = model.config
    if hasattr(config, "feed_forward"):
        gate = "gated-" if config.is_gated else ""
        changed = config.replace(feed_forward=f"{gate}relu")
    elif "activation" in config.__dataclass_fields__:
        changed = config.replace(activation="relu")
    else:
        raise ConfigError(
            f"relu=True is not supported for a {type(model).__name__}, whose activation is fixed. "
            "Leave relu out."
        )
    described = type(model).from_config(changed, device="meta")
    before: list[tuple[Any, str, Any]] = [
        (model, "config", model.config),
        (model, "spec", model.spec),
    ]
    for name, block in model.named_modules():
        if isinstance(block, Block):
            new: Block = described.get_submodule(name)
            before.append((block, "spec", block.spec))
            block.spec = new.spec
            if isinstance(block.mlp, MLP) and isinstance(new.mlp, MLP):
                before.append((block.mlp, "activation", block.mlp.activation))
                block.mlp.activation = new.mlp.activation
    model.config, model.spec = changed, described.spec

    def undo() -> None:
        for owner, key, value in before:
            setattr(owner, key, value)

    return undo


def _split_layer(mlp: MLP, tokens: Tensor, per_token: int, config: MoEfyConfig) -> _Split:
    """Plan the experts of one MLP and train its router; the MLP is unchanged."""
    groups = _group(mlp, tokens, config)
    order = torch.cat([(groups < 0).nonzero()[:, 0], _inside(groups)])
    parts = [sum_groups(part, groups, config.num_experts) for part in each_activity(mlp, tokens)]
    activity = torch.cat(parts)
    first = mlp.up_proj if mlp.gate_proj is None else mlp.gate_proj
    router = make_router(first.weight, groups, config)
    captured = train_router_(router, tokens, activity, config, per_token)
    oracle = captured_share(activity, activity, per_token)
    report = LayerReport(config.num_experts, per_token, captured, oracle)
    return _Split(order, router, report)


def _inside(groups: Tensor) -> Tensor:
    """Return the indices of the features that belong to a group, sorted by group."""
    order = order_of(groups)
    return order[(groups[order] >= 0)]


@torch.no_grad()
def _group(mlp: MLP, tokens: Tensor, config: MoEfyConfig) -> Tensor:
    """Return the expert index of every feature; -1 for always-active features."""
    weight = mlp.up_proj.weight
    width = weight.shape[0]
    free = torch.arange(width, device=weight.device)
    if config.always:
        nothing = torch.zeros(width, device=weight.device)
        total = sum((part.sum(0) for part in each_activity(mlp, tokens)), nothing)
        free = total.argsort(descending=True, stable=True)[config.always :].sort().values
    if config.group == "random":
        grouped = group_at_random(len(free), config.num_experts, config.seed)
    elif config.group == "weights":
        first = mlp.up_proj if mlp.gate_proj is None else mlp.gate_proj
        grouped = group_rows(first.weight[free], config.num_experts, config.seed)
    else:
        parts = (part[:, free] for part in each_activity(mlp, tokens))
        grouped = group_together(
            count_together(parts, config.share), config.num_experts, config.seed
        )
    groups = torch.full((width,), -1, device=weight.device)
    groups[free] = grouped.to(weight.device)
    return groups


@torch.no_grad()
def _permute_(mlp: MLP, order: Tensor) -> None:
    """Permute the features of an MLP in place, which leaves its outputs unchanged."""
    for linear in (mlp.gate_proj, mlp.up_proj):
        for parameter in () if linear is None else linear.parameters():
            parameter.copy_(parameter[order].clone())
    mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order].clone())
