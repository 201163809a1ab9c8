"""Default layout rules for the canonical names: data that `parallel` applies to any model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["LayoutRules", "TensorCut", "default_cuts"]


@dataclass(frozen=True)
class TensorCut:
    """How tensor parallelism cuts the modules of a glob.

    Args:
        glob: names of modules, see `surgery`.
        style: "part": what is cut inside begins with the whole input; "column": a linear layer by
            its outputs; "row": by its inputs; "key_value": by its outputs, or where there are fewer
            heads than processes each takes the one it needs; "bias": a table by its columns, one
            per head; "head_norm" and "gate": whole, but used by each process for its heads;
            "embedding" and "head": by rows of the vocabulary; "experts": each expert by its width.
        units: how many pieces cannot be cut further (heads); 0: every row or column can.
    """

    glob: str
    style: str
    units: int = 0


@dataclass(frozen=True)
class LayoutRules:
    """Name globs (see `surgery`) of what a layout does where.

    Args:
        zero_units: modules whose parameters are gathered together; the rest belongs to the root.
        recompute_units: modules whose activations may be recomputed in backward.
        tensor_parallel: what tensor parallelism cuts; empty where a family cannot be cut.
        stacks: containers of blocks that run one after the other, in the order in which they run.
        pipeline_first: names beside a stack that belong to where it begins, and
        pipeline_last: to where it ends; what neither names is wherever its stack is.
        quantize_targets: what may be kept as integers; norms, biases, routers and tables of
            positions stay floats. Those that a model has not are passed over.
    """

    zero_units: tuple[str, ...] = ("layers.*",)
    recompute_units: tuple[str, ...] = ("layers.*",)
    tensor_parallel: tuple[TensorCut, ...] = ()
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


# Last part of a module's name -> style and what its units are.
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


def default_cuts(
    names: Iterable[str],
    num_heads: int,
    num_kv_heads: int,
    without: Iterable[str] = (),
    differing: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[TensorCut, ...]:
    """Return the cuts of a model that uses the canonical names.

    A bias on the scores that layers with different numbers of heads share stays whole: which of its
    columns a process needs is another question in each of them.

    Args:
        names: of all its modules.
        num_heads: N.
        num_kv_heads: K.
        without: last parts of names that stay whole.
        differing: names of attentions that have other numbers of heads -> these, (N, K).
    """
    units = {"heads": num_heads, "kv_heads": num_kv_heads, "": 0}
    left_out, differing = set(without), differing or {}
    found: dict[str, TensorCut] = {}
    single: dict[str, TensorCut] = {}
    for name in names:
        before, _, last = name.rpartition(".")
        if last not in _STYLES or last in left_out:
            continue
        if last == "decoder" and before != "mlm_head":  # the stack of an encoder-decoder
            continue
        style, unit = _STYLES[last]
        style = "head_norm" if differing and style == "bias" else style
        glob = f"**.{last}" if before else last
        glob = name if last == "decoder" else glob
        found[glob] = TensorCut(glob, style, 0 if style == "head_norm" else units[unit])
        if unit and before in differing:
            single[name] = TensorCut(name, style, differing[before][unit == "kv_heads"])
    return (*found.values(), *single.values())
