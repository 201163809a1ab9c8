"""Configuration of structured pruning: exact sizes or a cost target, and how units are selected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from bmforge.compress.prune.importance import By
from bmforge.compress.prune.make_plan import round_to_unit
from bmforge.compress.prune.plan import blocks_of
from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.models.sizes import Sizes

__all__ = ["GATE_KINDS", "StructureConfig", "Target", "requested_sizes"]

Target = Literal["sizes", "parameters", "flops", "milliseconds"]
GATE_KINDS = ("heads", "dims", "features", "attn", "mlp", "block", "hidden")
# Per-layer size fields, named as in `models.sizes.Sizes`.
_COUNTS = ("hidden_size", "num_layers", "attn_layers", "mlp_layers")
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "num_experts")


@dataclass(frozen=True)
class StructureConfig:
    """Settings of structured pruning; a size of 0 keeps the current size.

    Args:
        num_heads: number of query heads per layer.
        num_kv_heads: number of key-value heads per layer; in models with grouped-query attention, 0
            keeps the current number.
        head_dim: size of a head.
        intermediate_size: width of every MLP, or of every expert.
        num_experts: number of experts per mixture-of-experts layer.
        hidden_size: size of the hidden states.
        num_layers: number of blocks to keep per stack.
        attn_layers: number of blocks per stack that keep self-attention (the most important ones).
        mlp_layers: number of blocks per stack that keep the MLP (the most important ones).
        layers: dict from a glob of block names to a dict of sizes (`num_heads`,
            `intermediate_size`, `attn = false`, ...), which override the sizes above.
        target: "sizes" uses the sizes above; "parameters", "flops" or "milliseconds" (measured
            on this machine) removes heads and MLP features, least important first, until
            `keep_ratio` of the blocks' cost remains.
        keep_ratio: fraction of the blocks' cost to keep.
        by: importance measure: "size" (weight norm), "activation", "taylor" (needs labels), or
            "influence" (change of the hidden states' direction).
        gates: kinds of trained gates ("heads", "dims" of heads, "features", "attn", "mlp",
            "block", "hidden" for the hidden states); if empty, pruning is one-shot.
        compensate: fit the layers after removed neurons and heads to their original outputs on
            the calibration batches, if there are any (default: True).
        uniform: raise an error for sizes that the family's classes in transformers cannot load.
        multiple_of: divisor of the MLP widths that a cost target or gates may choose.
        tensor_parallel: tensor-parallel size by which heads and widths must be divisible.
        gate_steps: number of training steps of the gates.
        warmup_steps: number of steps at the beginning over which the target grows to its final
            value.
        gate_lr: learning rate of gates and of the Lagrangian's multipliers.
        seq_len: sequence length in tokens for "flops" and "milliseconds".
        seed: random seed of the gates.
    """

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    num_experts: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    attn_layers: int = 0
    mlp_layers: int = 0
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    target: Target = "sizes"
    keep_ratio: float = 0.5
    by: By = "size"
    gates: tuple[str, ...] = ()
    compensate: bool = True
    uniform: bool = False
    multiple_of: int = 1
    tensor_parallel: int = 1
    gate_steps: int = 1000
    warmup_steps: int = 200
    gate_lr: float = 0.1
    seq_len: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range and settings without effect."""
        problems = [
            f"{f.name}={getattr(self, f.name)!r} must be at least 0"
            for f in fields(self)
            if isinstance(getattr(self, f.name), int) and getattr(self, f.name) < 0
        ]
        problems += [
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("multiple_of", "tensor_parallel", "seq_len")
            if getattr(self, name) < 1
        ]
        if self.target not in get_args(Target):
            problems.append(
                f"target={self.target!r} must be one of {', '.join(map(repr, get_args(Target)))}"
            )
        sizes = [name for name in (*_SIZES, *_COUNTS) if getattr(self, name)]
        if self.target == "sizes" and not sizes and not self.layers:
            problems.append("at least one size, or a target, must be set")
        if self.target != "sizes" and (sizes or self.layers):
            given_sizes = ", ".join([*sizes, *(["layers"] if self.layers else [])])
            problems.append(f"{given_sizes} and target={self.target!r} cannot be used together")
        if self.target != "sizes" and not 0 < self.keep_ratio < 1:
            problems.append(f"keep_ratio={self.keep_ratio} must be above 0 and below 1")
        problems += [
            f"gates has the unknown kind {kind!r} (supported: {', '.join(GATE_KINDS)})"
            for kind in self.gates
            if kind not in GATE_KINDS
        ]
        if self.gates and not self.warmup_steps <= self.gate_steps:
            problems.append(
                f"warmup_steps={self.warmup_steps} must be at most gate_steps={self.gate_steps}"
            )
        for kind in {"dims", "hidden"} & set(self.gates):
            if self.target == "milliseconds":
                problems.append(
                    f"gates of {kind} support sizes, parameters and flops, but not {self.target}"
                )
        if problems:
            raise ConfigError(f"structure: {'; '.join(problems)}.")

    @property
    def chooses_widths(self) -> bool:
        """Whether a cost target or gates choose a width that the config does not give."""
        given = {"features": self.intermediate_size, "hidden": self.hidden_size}
        is_open = any(kind in self.gates and not size for kind, size in given.items())
        return self.target != "sizes" or is_open


def requested_sizes(model: Any, config: StructureConfig) -> dict[str, Sizes]:
    """Return a dict from block name to requested sizes; later globs take precedence.

    Raises:
        ConfigError: the model or tensor parallelism does not allow a size; the message names the
            nearest valid one.
    """
    common = {name: getattr(config, name) for name in _SIZES if getattr(config, name)}
    sizes_by_name: dict[str, Sizes] = {}
    for name, block in blocks_of(model).items():
        options: dict[str, Any] = dict(sizes_that_apply(block.spec, common))
        if options:
            sizes_by_name[name] = Sizes(**options)
    lacking = [n for n in common if not any(getattr(sizes, n) for sizes in sizes_by_name.values())]
    if lacking:
        raise ConfigError(
            f"{lacking[0]}={common[lacking[0]]} has no effect, because it applies to no "
            f"layer of this {type(model).__name__}. Leave {lacking[0]} out."
        )
    for glob, options in config.layers.items():
        sizes_by_name[glob] = config_from_dict(Sizes, dict(options), f"layers.{glob}.")
    _check_layout(model, config)
    return sizes_by_name


def sizes_that_apply(spec: Any, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the entries of `sizes` that apply to a layer of this spec."""
    heads = spec.attn is not None or spec.cross_attn is not None
    has = {"num_heads": heads, "num_kv_heads": heads, "head_dim": heads}
    has["intermediate_size"] = spec.mlp is not None
    has["num_experts"] = spec.mlp is not None and hasattr(spec.mlp, "num_experts")
    return {name: size for name, size in sizes.items() if has[name]}


def _check_layout(model: Any, config: StructureConfig) -> None:
    """Raise `ConfigError` for sizes that are not divisible by the tensor-parallel size."""
    if config.tensor_parallel == 1:
        return
    block = next(block for block in blocks_of(model).values() if block.spec.attn is not None)
    spec = block.spec.attn
    assert spec is not None
    most = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
    most["intermediate_size"] = block.spec.mlp.intermediate_size if block.spec.mlp else 0
    for name, limit in most.items():
        size = getattr(config, name)
        shares = name == "num_kv_heads" and size and config.tensor_parallel % size == 0
        if size and size % config.tensor_parallel and not shares:
            raise ConfigError(
                f"{name}={size} is not divisible by tp={config.tensor_parallel}. The nearest "
                f"valid size is {round_to_unit(size, config.tensor_parallel, limit)}."
            )
