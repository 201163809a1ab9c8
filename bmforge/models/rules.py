"""Default sharding rules by module name, which `parallel` applies to any model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["LayoutRules", "TensorParallelRule", "default_tensor_parallel_rules", "whole_attention"]


@dataclass(frozen=True)
class TensorParallelRule:
    """Tensor-parallel style of all modules whose names match a glob.

    Args:
        glob: module glob, see `surgery`.
        style: "part" (of a block): sublayer with sharded children, whose input is replicated;
            "whole": sublayer that is replicated and needs all tokens; "column": linear layer
            sharded by outputs; "row": linear layer sharded by inputs; "key_value": sharded by
            outputs, or replicated if there are fewer heads than ranks; "bias": table sharded by
            columns, one per head; "head_norm" and "gate": replicated, each rank uses the entries of
            its heads; "embedding" and "head": sharded by vocabulary; "experts": each expert sharded
            by width. For linear layers of other libraries' modules: "own_column": like "column",
            but sums its own input gradient; "gathered_column": like "own_column", with all outputs
            on every rank; "split_row": like "row", with a replicated input; "shared_tail":
            replicated; gradients of the last `units` outputs, which the heads of all ranks share,
            are summed.
        units: number of indivisible units (heads); 0 if every row or column is a unit.
    """

    glob: str
    style: str
    units: int = 0


@dataclass(frozen=True)
class LayoutRules:
    """Sharding plan of a model, as module globs (see `surgery`).

    Args:
        zero_units: modules whose parameters are all-gathered as one unit; all other parameters
            belong to the unit of the root module.
        recompute_units: modules whose activations can be recomputed in backward.
        tensor_parallel: tensor-parallel plan; empty if the family does not support it.
        stacks: containers of blocks, in execution order.
        pipeline_first: modules on the pipeline stage with the first block.
        pipeline_last: modules on the pipeline stage with the last block; all other modules
            outside of the blocks are on every stage.
        quantize_targets: modules to quantize by default; norms, biases, routers and position
            tables remain floats. Globs without a match are skipped.
        tensor_refusal: reason why there is no tensor-parallel plan; "" if there is one.
        pipeline_refusal: reason why the model cannot be split into pipeline stages; "" if it can.
    """

    zero_units: tuple[str, ...] = ("layers.*",)
    recompute_units: tuple[str, ...] = ("layers.*",)
    tensor_parallel: tuple[TensorParallelRule, ...] = ()
    stacks: tuple[str, ...] = ("layers",)
    pipeline_first: tuple[str, ...] = ("embed*", "project_in")
    pipeline_last: tuple[str, ...] = (
        "norm",
        "project_out",
        "lm_head",
        "mlm_head",
        "pooler",
        "classifier",
    )
    quantize_targets: tuple[str, ...] = (
        "**.*_proj",
        "**.experts",
        "embed",
        "lm_head",
        "mlm_head.decoder",
        "project_in",
        "project_out",
    )
    tensor_refusal: str = ""
    pipeline_refusal: str = ""


# Last component of a module's name -> style, and kind of its units.
_STYLES = {
    "attn": ("part", ""),
    "cross_attn": ("part", ""),
    "mlp": ("part", ""),
    "shared_expert": ("part", ""),
    "q_proj": ("column", "heads"),
    "k_proj": ("key_value", "kv_heads"),
    "v_proj": ("key_value", "kv_heads"),
    "prefix": ("key_value", "kv_heads"),
    "q_global_proj": ("column", "heads"),
    "k_global_proj": ("key_value", "kv_heads"),
    "v_global_proj": ("key_value", "kv_heads"),
    "o_proj": ("row", "heads"),
    "q_norm": ("head_norm", ""),
    "k_norm": ("head_norm", ""),
    "sinks": ("head_norm", ""),
    "thin": ("gate", ""),
    "thin_dims": ("gate", ""),
    "gate_proj": ("column", ""),
    "up_proj": ("column", ""),
    "down_proj": ("row", ""),
    "experts": ("experts", ""),
    "rel_bias": ("bias", "heads"),
    "embed": ("embedding", ""),
    "lm_head": ("head", ""),
    "decoder": ("head", ""),
}


def default_tensor_parallel_rules(
    names: Iterable[str],
    num_heads: int,
    num_kv_heads: int,
    without: Iterable[str] = (),
    differing: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[TensorParallelRule, ...]:
    """Return the tensor-parallel plan for a model with canonical module names.

    A position bias that layers with different numbers of heads share is replicated, because a rank
    needs different columns of the bias in each layer.

    Args:
        names: names of all modules.
        num_heads: number N of heads.
        num_kv_heads: number K of key-value heads.
        without: last name components of modules to replicate.
        differing: mapping from the name of each attention module with other head counts to (N, K).
    """
    units = {"heads": num_heads, "kv_heads": num_kv_heads, "": 0}
    excluded, differing = set(without), differing or {}
    plan: dict[str, TensorParallelRule] = {}
    single: dict[str, TensorParallelRule] = {}
    for name in names:
        before, _, last = name.rpartition(".")
        if last not in _STYLES or last in excluded:
            continue
        if last == "decoder" and before != "mlm_head":  # the decoder stack of an encoder-decoder
            continue
        style, unit = _STYLES[last]
        style = "head_norm" if differing and style == "bias" else style
        glob = f"**.{last}" if before else last
        glob = name if last == "decoder" else glob
        plan[glob] = TensorParallelRule(glob, style, 0 if style == "head_norm" else units[unit])
        if unit and before in differing:
            single[name] = TensorParallelRule(name, style, differing[before][unit == "kv_heads"])
    return (*plan.values(), *single.values())


# Names of an attention layer's modules that have a sharding style.
_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "sinks", "prefix")


def whole_attention(rules: tuple[TensorParallelRule, ...]) -> tuple[TensorParallelRule, ...]:
    """Return a tensor-parallel plan in which attention is replicated."""
    last_names = [rule.glob.rpartition(".")[2] for rule in rules]
    return tuple(
        TensorParallelRule(rule.glob, "whole") if name == "attn" else rule
        for name, rule in zip(last_names, rules, strict=True)
        if name not in _ATTENTION_PARTS
    )
