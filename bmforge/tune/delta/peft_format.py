"""PEFT's form of a delta: reading its config's fields and the names of its tensors.

Tensors stand under the names of transformers' modules. Where that has one fused layer for several
of ours (`c_attn` = q, k and v), one pair of factors becomes one of each of ours with the same
`down`; ours with different ones become one pair of the summed rank, whose `up` is block by block.

Source: PEFT 0.21, `utils/save_and_load.py` and the configs of its tuners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from bmforge.errors import CheckpointError, ConfigError
from bmforge.nn.low_rank import LowRank, linear_sizes
from bmforge.tune.delta.address import fits, published_names
from bmforge.tune.delta.delta import Delta
from bmforge.tune.delta.held import Held
from bmforge.tune.delta.peft_experts import expert_owner, read_experts

__all__ = ["PREFIX", "Names", "options_of", "read_tensors", "rows_of", "tie_factors_"]

PREFIX = "base_model.model."
# Fields of a LORA config that would change numbers, and the values that we know.
_LORA_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "megatron_config": (None,),
    "arrow_config": (None,),
}


class Names:
    """How modules of a model are called in files: their name -> names of ours, in order of rows.

    Args:
        model: ours, or any other, whose own names hold.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        published = published_names(model)
        own = {n: [n] for n, m in model.named_modules() if n and not hasattr(m, "tensor_notes")}
        self.ours: dict[str, list[str]] = published or own
        self.theirs = {n: t for t, names in self.ours.items() for n in names}

    def of(self, name: str) -> str:
        """Return what files call a module of ours.

        Raises:
            ConfigError: published checkpoints have no such module.
        """
        if name not in self.theirs:
            raise ConfigError(f"{name} is no module of published checkpoints.")
        return self.theirs[name]


def rows_of(model: nn.Module, name: str) -> int:
    """Return how many features come out of a linear layer."""
    sizes = linear_sizes(model.get_submodule(name))
    assert sizes is not None
    return sizes[1]


def options_of(model: nn.Module, config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return what a delta of ours is told, of PEFT's config and its tensors' names.

    Raises:
        ConfigError: a setting that would change numbers and that we do not have.
    """
    kind = config.get("peft_type")
    if kind == "PROMPT_TUNING":
        return {"length": config["num_virtual_tokens"]}
    if kind == "PREFIX_TUNING":
        if config.get("prefix_projection"):
            raise ConfigError("prefix_projection=True: save it from PEFT in inference mode.")
        return {"length": config["num_virtual_tokens"]}
    names = Names(model)
    bare = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in keys if ".lora_" in key}
    bare |= {key.removeprefix(PREFIX).rpartition(".ia3_l")[0] for key in keys if ".ia3_l" in key}
    experts = {name: ours for name in bare if (ours := expert_owner(model, name))}
    bare -= experts.keys()
    unknown = sorted(name for name in bare if name not in names.ours)
    if unknown:
        raise CheckpointError(
            f"the delta stands beside {', '.join(unknown[:5])}, which this "
            f"{type(model).__name__} has not."
        )
    targets = [n for name in sorted(bare) for n in names.ours[name]]
    told: dict[str, Any] = {"targets": [*targets, *sorted(set(experts.values()))]}
    told["train_also"] = _saved_whole(names, keys)
    if kind == "IA3":
        feedforward = config.get("feedforward_modules") or []
        into = [name for name in bare if _named(name, feedforward)]
        return {**told, "into": [n for name in into for n in names.ours[name]]}
    for field, fine in _LORA_PLAIN.items():
        if field in config and config[field] not in fine:
            raise ConfigError(f"{field}={config[field]!r} is not known to this version of bmforge.")
    told |= {"rank": config["r"], "alpha": float(config["lora_alpha"])}
    told |= {"dropout": float(config.get("lora_dropout") or 0)}
    told |= {
        "root_scale": bool(config.get("use_rslora")),
        "magnitude": bool(config.get("use_dora")),
    }
    told["bias"] = bool(config.get("lora_bias"))
    for pattern, field in (("rank_pattern", "ranks"), ("alpha_pattern", "alphas")):
        given = config.get(pattern) or {}
        told[field] = {
            n: value
            for name in bare
            for key, value in given.items()
            if fits(name, key) or fits(name, f"[r]{key}")
            for n in names.ours[name]
        }
    return told


def _named(name: str, given: Any) -> bool:
    if isinstance(given, str):
        return fits(name, f"[r]^{given}$")
    return any(fits(name, one) for one in given)


def _saved_whole(names: Names, keys: Iterable[str]) -> list[str]:
    """Return the modules of ours that are in a file whole."""
    found: dict[str, None] = {}
    for key in keys:
        theirs = key.removeprefix(PREFIX).rpartition(".")[0]
        if ".lora_" not in key and ".ia3_l" not in key and not theirs.endswith(".base_layer"):
            if theirs not in names.ours:
                raise CheckpointError(
                    f"{key} is of no module of this {type(names.model).__name__}."
                )
            found.update(dict.fromkeys(names.ours[theirs]))
    return list(found)


def read_tensors(
    delta: Delta, tensors: Mapping[str, Tensor], blocks: Mapping[str, list[int]]
) -> dict[str, Tensor]:
    """Bring PEFT's tensors into our names.

    Args:
        delta: ours, made of its config.
        tensors: by PEFT's names.
        blocks: fused layer -> ranks of our parts of it, where we wrote them block by block.
    """
    if "prompt_embeddings" in tensors:
        return _read_prompt(delta, tensors["prompt_embeddings"])
    names, held = Names(delta.model), {one.owner: one for one in delta.held}
    wholes = delta.wholes()
    stacks: dict[str, dict[str, dict[str, Tensor]]] = {}
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        bare = key.removeprefix(PREFIX)
        theirs, _, leaf = bare.removesuffix(".weight").rpartition(".lora_")
        owner = expert_owner(delta.model, theirs)
        if owner is not None:
            stacks.setdefault(owner, {}).setdefault(theirs, {})[leaf] = tensor
            continue
        for mark in (".lora_", ".ia3_l"):
            theirs, is_there, leaf = bare.rpartition(mark)
            if is_there:
                owners = names.ours.get(theirs, [])
                rows = [rows_of(delta.model, n) for n in owners] if len(owners) > 1 else []
                parts = [held.get(n) for n in owners]
                leaf = leaf.removesuffix(".weight")
                found |= _split(parts, rows, leaf, tensor, blocks.get(theirs))
                break
        else:
            theirs, _, leaf = bare.rpartition(".")
            if theirs.endswith("base_layer"):
                continue
            ours = [f"{n}.{leaf}" for n in names.ours.get(theirs, [theirs])]
            found |= {n: tensor for n in ours if n in wholes} or {bare: tensor}
    for owner, pairs in stacks.items():
        place = f"{owner}.{held[owner].slot}"
        made = read_experts(place, held[owner].part, pairs)
        found |= {f"{place}.{key}": tensor for key, tensor in made.items()}
    return found


def _read_prompt(delta: Delta, rows: Tensor) -> dict[str, Tensor]:
    if delta.kind == "prompt":
        owner, slot, part = delta.held[0]
        return {f"{owner}.{slot}.weight": rows[: part.weight.shape[0]]}
    found = {}
    each = rows.chunk(2 * len(delta.held), 1)  # layer by layer: keys, values
    for number, (owner, slot, part) in enumerate(delta.held):
        heads, _, width = part.key.shape
        for key, one in zip(("key", "value"), each[2 * number : 2 * number + 2], strict=True):
            found[f"{owner}.{slot}.{key}"] = one.unflatten(1, (heads, width)).transpose(0, 1)
    return found


_LEAVES = {
    "A": "down",
    "B": "up",
    "embedding_A": "down",
    "embedding_B": "up",
    "B.bias": "bias",
    "magnitude_vector": "magnitude",
    "": "weight",
}


def _split(
    parts: list[Held | None], rows: list[int], leaf: str, tensor: Tensor, ranks: list[int] | None
) -> dict[str, Tensor]:
    """Return a fused layer's tensor as those of our parts.

    Args:
        parts: of the layer, in order; None where nothing stands.
        rows: of each; [] where the layer is not fused.
        leaf: what PEFT calls the tensor.
        tensor: of the whole layer.
        ranks: of each, where they lie block by block.
    """
    if leaf not in _LEAVES:
        raise CheckpointError(f"lora_{leaf} is no tensor of PEFT's that is known.")
    key = _LEAVES[leaf]
    tensor = tensor.flatten() if key == "weight" else tensor
    pieces = [tensor] * len(parts)
    if key == "down" and ranks is not None:
        pieces = list(tensor.split(ranks))
    elif key != "down" and rows and sum(rows) == tensor.shape[0]:
        pieces = list(tensor.split(rows))
        if key == "up" and ranks is not None:
            ends = [sum(ranks[: number + 1]) for number in range(len(ranks))]
            pieces = [p[:, e - r : e] for p, e, r in zip(pieces, ends, ranks, strict=True)]
    return {
        f"{held.owner}.{held.slot}.{key}": piece
        for held, piece in zip(parts, pieces, strict=True)
        if held is not None
    }


def tie_factors_(delta: Delta, blocks: Mapping[str, Any]) -> None:
    """Let parts that are one layer in files, with one `down`, have one here.

    Args:
        delta: of PEFT's file.
        blocks: layers whose parts have their own.
    """
    names, held = Names(delta.model), {one.owner: one.part for one in delta.held}
    for theirs, owners in names.ours.items():
        parts = [held[n] for n in owners if n in held]
        if len(parts) > 1 and theirs not in blocks and isinstance(parts[0], LowRank):
            for part in parts[1:]:
                part.down = parts[0].down
