"""PEFT's form of a delta: its config's fields and the names of its tensors, both ways.

Tensors stand under the names of transformers' modules. Where that has one fused layer for several
of ours (`c_attn` = q, k and v), one pair of factors becomes one of each of ours with the same
`down`; ours with different ones become one pair of the summed rank, whose `up` is block by block.

Source: PEFT 0.21, `utils/save_and_load.py` and the configs of its tuners.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import CheckpointError, ConfigError
from bmforge.nn.low_rank import EmbeddingLowRank, LowRank, linear_sizes
from bmforge.tune.delta.address import find_places, fits, published_names
from bmforge.tune.delta.delta import Delta, Held

__all__ = ["Names", "can_write", "options_of", "read_tensors", "write_config", "write_tensors"]

_PREFIX = "base_model.model."
_METHODS = ("LORA", "IA3", "PREFIX_TUNING", "PROMPT_TUNING")
# Fields of a LORA config that would change numbers, and the values that we know.
_LORA_PLAIN = {
    "bias": ("none",),
    "target_parameters": (None, []),
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


def can_write(delta: Delta) -> bool:
    """Tell whether PEFT has this delta's method, for all that this one does."""
    if delta.peft_type not in _METHODS:
        return False
    if delta.peft_type in ("PREFIX_TUNING", "PROMPT_TUNING"):
        traits = getattr(delta.model, "traits", None)
        return delta.peft_type == "PROMPT_TUNING" or getattr(traits, "reads", "") != "apart"
    theirs = Names(delta.model).theirs
    return all(held.owner in theirs and not hasattr(held.part, "keys") for held in delta.held)


# --- reading ---------------------------------------------------------------------------------


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
    bare = {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in keys if ".lora_" in key}
    bare |= {key.removeprefix(_PREFIX).rpartition(".ia3_l")[0] for key in keys if ".ia3_l" in key}
    unknown = sorted(name for name in bare if name not in names.ours)
    if unknown:
        raise CheckpointError(
            f"the delta stands beside {', '.join(unknown[:5])}, which this "
            f"{type(model).__name__} has not."
        )
    told: dict[str, Any] = {"targets": [n for name in sorted(bare) for n in names.ours[name]]}
    if config.get("modules_to_save"):
        told["train_also"] = _saved_whole(names, config["modules_to_save"])
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


def _saved_whole(names: Names, given: Iterable[str]) -> list[str]:
    found = []
    for one in given:
        hits = [
            n
            for t, ours in names.ours.items()
            if fits(t, one) or f".{one}." in f".{t}."
            for n in ours
        ]
        found += hits or find_places(names.model, [one])
    return list(dict.fromkeys(found))


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
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        bare = key.removeprefix(_PREFIX)
        for mark in (".lora_", ".ia3_l"):
            theirs, is_there, leaf = bare.rpartition(mark)
            if is_there:
                parts = [held[n] for n in names.ours.get(theirs, []) if n in held]
                found |= _split(parts, leaf.removesuffix(".weight"), tensor, blocks.get(theirs))
                break
        else:
            theirs, _, leaf = bare.rpartition(".")
            if theirs.endswith("base_layer"):
                continue
            ours = [f"{n}.{leaf}" for n in names.ours.get(theirs, [theirs])]
            found |= {n: tensor for n in ours if n in wholes} or {bare: tensor}
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
    parts: list[Held], leaf: str, tensor: Tensor, ranks: list[int] | None
) -> dict[str, Tensor]:
    """Return a fused layer's tensor as those of our parts."""
    if leaf not in _LEAVES:
        raise CheckpointError(f"lora_{leaf} is no tensor of PEFT's that is known.")
    key = _LEAVES[leaf]
    names = [f"{owner}.{slot}.{key}" for owner, slot, _ in parts]
    if key == "down":
        pieces = [tensor] * len(parts) if ranks is None else list(tensor.split(ranks))
        pieces = [p for p in pieces if p.shape[0]] if ranks else pieces
        return dict(zip(names, pieces, strict=True))
    if key == "weight":
        tensor = tensor.flatten()
    rows = [getattr(part, key).shape[0] for _, _, part in parts]
    if len(parts) == 1 or sum(rows) != tensor.shape[0]:
        rows = [tensor.shape[0]] * len(parts) if len(parts) == 1 else rows
    pieces = list(tensor.split(rows)) if sum(rows) == tensor.shape[0] else [tensor] * len(parts)
    if key == "up" and ranks is not None:
        first = 0
        for number, rank in enumerate(r for r in ranks if r):
            pieces[number] = pieces[number][:, first : first + rank]
            first += rank
    return dict(zip(names, pieces, strict=True))


# --- writing ---------------------------------------------------------------------------------


def write_tensors(delta: Delta) -> tuple[dict[str, Tensor], dict[str, list[int]], dict[str, Any]]:
    """Return PEFT's tensors of a delta, what was written block by block, and patterns of ranks.

    The patterns are fields of the config: `rank_pattern` and `alpha_pattern`.
    """
    if delta.kind == "prompt":
        return {"prompt_embeddings": _prompt_rows(delta)}, {}, {}
    if delta.kind == "prefix":
        columns = [_columns(t) for held in delta.held for t in held.part()]
        return {"prompt_embeddings": torch.cat(columns, 1).contiguous()}, {}, {}
    names = Names(delta.model)
    groups: dict[str, list[Held]] = {}
    for held in delta.held:
        groups.setdefault(names.of(held.owner), []).append(held)
    found: dict[str, Tensor] = {}
    blocks: dict[str, list[int]] = {}
    ranks: dict[str, tuple[int, float]] = {}
    for theirs, parts in groups.items():
        whole = [next((h.part for h in parts if h.owner == n), None) for n in names.ours[theirs]]
        start = f"{_PREFIX}{theirs}."
        if delta.kind == "gain":
            found |= _join_gain(delta.model, names.ours[theirs], whole, start)
            continue
        made, split = _join_low_rank(delta.model, names.ours[theirs], whole, start)
        found |= made
        if split:
            blocks[theirs] = split
        part = parts[0].part
        rank = next(t for n, t in made.items() if n.endswith(("lora_A.weight", "embedding_A")))
        ranks[theirs] = (rank.shape[0], _alpha(part.scale, rank.shape[0], delta))
    for name, parameter in delta.wholes().items():
        owner, _, leaf = name.rpartition(".")
        found[f"{_PREFIX}{names.of(owner)}.{leaf}"] = parameter.detach()
    return found, blocks, _patterns(ranks)


def _alpha(scale: float, rank: int, delta: Delta) -> float:
    return scale * (math.sqrt(rank) if delta.options.get("root_scale") else rank)


def _patterns(ranks: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    if not ranks:
        return {}
    counted = list(ranks.values())
    usual = max(set(counted), key=counted.count)
    differing = {name: one for name, one in ranks.items() if one != usual}
    return {
        "r": usual[0],
        "lora_alpha": usual[1],
        "rank_pattern": {n: r for n, (r, _) in differing.items() if r != usual[0]},
        "alpha_pattern": {n: a for n, (_, a) in differing.items() if a != usual[1]},
    }


def _columns(heads: Tensor) -> Tensor:
    return heads.detach().transpose(0, 1).flatten(1)


def _prompt_rows(delta: Delta) -> Tensor:
    rows = delta.held[0].part.weight.detach()
    traits = getattr(delta.model, "traits", None)
    return torch.cat((rows, rows)) if getattr(traits, "reads", "") == "apart" else rows


def _rows_of(model: nn.Module, name: str) -> int:
    sizes = linear_sizes(model.get_submodule(name))
    assert sizes is not None
    return sizes[1]


def _join_gain(
    model: nn.Module, owners: list[str], parts: list[Any], start: str
) -> dict[str, Tensor]:
    pieces = [
        torch.ones(_rows_of(model, n)) if part is None else part.weight.detach()
        for n, part in zip(owners, parts, strict=True)
    ]
    enters = any(part is not None and part.enters for part in parts)
    if enters:
        return {f"{start}ia3_l": next(p.weight.detach() for p in parts if p is not None)[None]}
    return {f"{start}ia3_l": torch.cat([p.to(pieces[-1].dtype) for p in pieces])[:, None]}


def _join_low_rank(
    model: nn.Module, owners: list[str], parts: list[Any], start: str
) -> tuple[dict[str, Tensor], list[int]]:
    there: list[LowRank] = [part for part in parts if part is not None]
    first = there[0]
    if isinstance(first, EmbeddingLowRank):
        made = {f"{start}lora_embedding_A": first.down, f"{start}lora_embedding_B": first.up}
        return {n: t.detach() for n, t in made.items()}, []
    if len({part.scale for part in there}) > 1:
        raise ConfigError(f"parts of {start.removeprefix(_PREFIX)} have different scales.")
    alike = all(torch.equal(part.down, first.down) for part in there) and len(there) == len(parts)
    rows = [_rows_of(model, n) for n in owners]
    ranks = [0 if part is None else part.down.shape[0] for part in parts]
    made, split = {}, []
    if alike:
        made["lora_A.weight"] = first.down.detach()
        made["lora_B.weight"] = torch.cat([part.up.detach() for part in there])
    else:
        split = ranks
        made["lora_A.weight"] = torch.cat([part.down.detach() for part in there])
        up = first.up.detach().new_zeros(sum(rows), sum(ranks))
        for number, part in enumerate(parts):
            if part is not None:
                row, column = sum(rows[:number]), sum(ranks[:number])
                up[row : row + rows[number], column : column + ranks[number]] = part.up.detach()
        made["lora_B.weight"] = up
    for key, leaf in (("bias", "lora_B.bias"), ("magnitude", "lora_magnitude_vector")):
        pieces = [getattr(part, key) for part in there]
        if pieces[0] is not None:
            if len(there) != len(parts):
                raise ConfigError(
                    f"{key}: all of {', '.join(owners)}, one layer in files, must have it."
                )
            made[leaf] = torch.cat([p.detach() for p in pieces])
    return {f"{start}{leaf}": tensor.contiguous() for leaf, tensor in made.items()}, split


def write_config(delta: Delta, patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Return what PEFT's adapter_config.json says of a delta."""
    config: dict[str, Any] = {
        "peft_type": delta.peft_type,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "modules_to_save": None,
        "task_type": _task(delta.model),
    }
    names = Names(delta.model)
    if delta.train_also:
        owners = [n.rpartition(".")[0] for n in delta.wholes()]
        config["modules_to_save"] = sorted({names.of(owner) for owner in owners})
    if delta.kind in ("prefix", "prompt"):
        return {**config, **_prompt_config(delta)}
    config["target_modules"] = sorted({names.of(place) for place in delta.places()})
    first: Any = delta.held[0]
    turned = any(
        rule.transpose
        for rule in (delta.model.active_rules() if hasattr(delta.model, "active_rules") else ())  # type: ignore[operator]
        if rule.ours == f"{first.owner}.weight"
    )
    module = delta.model.get_submodule(first.owner)
    config["fan_in_fan_out"] = turned or hasattr(module, "nf")
    if delta.kind == "gain":
        into = [h.owner for h in delta.held if h.part.enters]
        config["feedforward_modules"] = sorted({names.of(n) for n in into})
        return config
    options = delta.describe()["options"]
    return {
        **config,
        **patterns,
        "lora_dropout": options["dropout"],
        "use_rslora": options["root_scale"],
        "use_dora": options["magnitude"],
        "lora_bias": options["bias"],
        "bias": "none",
    }


def _prompt_config(delta: Delta) -> dict[str, Any]:
    part: Any = delta.held[0].part
    sizes = delta.model.config  # type: ignore[union-attr]
    config: dict[str, Any] = {
        "num_virtual_tokens": int(delta.options["length"]),
        "num_layers": sizes.num_layers,  # type: ignore[union-attr]
        "num_transformer_submodules": 1,
        "num_attention_heads": sizes.num_heads,  # type: ignore[union-attr]
    }
    if delta.kind == "prompt":
        config["token_dim"] = part.weight.shape[1]
        traits = getattr(delta.model, "traits", None)
        config["num_transformer_submodules"] = 2 if getattr(traits, "reads", "") == "apart" else 1
        return config
    heads, _, width = part()[0].shape
    config |= {"num_attention_heads": heads, "token_dim": heads * width}
    return {**config, "encoder_hidden_size": heads * width, "prefix_projection": False}


_TASKS = {
    "language_model": "CAUSAL_LM",
    "sequence_to_sequence": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
}


def _task(model: nn.Module) -> str | None:
    head = getattr(getattr(model, "config", None), "head", None)
    is_causal = getattr(getattr(model, "traits", None), "objective", "") != "masked"
    return _TASKS.get(str(head)) if head != "language_model" or is_causal else None
