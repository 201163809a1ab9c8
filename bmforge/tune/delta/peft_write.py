"""Writing deltas in PEFT's form; see `peft_format.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.low_rank import EmbeddingLowRank, LowRank
from bmforge.tune.delta.delta import Delta
from bmforge.tune.delta.held import Held, whole_model
from bmforge.tune.delta.peft_format import PREFIX, Names, rows_of

__all__ = ["can_write", "write_config", "write_tensors"]

_METHODS = ("LORA", "IA3", "PREFIX_TUNING", "PROMPT_TUNING")


def can_write(delta: Delta) -> bool:
    """Tell whether PEFT has this delta's method, for all that this one does."""
    if delta.peft_type not in _METHODS or any(map(_is_of_a_part(delta), delta.wholes())):
        return False
    if delta.peft_type in ("PREFIX_TUNING", "PROMPT_TUNING"):
        traits = getattr(delta.model, "traits", None)
        return delta.peft_type == "PROMPT_TUNING" or getattr(traits, "reads", "") != "apart"
    model = whole_model(delta.model)
    theirs = Names(model).theirs
    if not _keep_their_form(model, delta.wholes()):
        return False
    return all(held.owner in theirs and not hasattr(held.part, "keys") for held in delta.held)


def _is_of_a_part(delta: Delta) -> Callable[[str], bool]:
    """Return what tells of a parameter that a part of ours has it, which PEFT does not know."""
    model = whole_model(delta.model)
    return lambda name: hasattr(model.get_submodule(name.rpartition(".")[0]), "is_delta")


def _keep_their_form(model: nn.Module, wholes: Iterable[str]) -> bool:
    """Tell whether parameters trained whole are all of their modules, and as they are published."""
    names = set(wholes)
    for owner in {name.rpartition(".")[0] for name in names}:
        own = model.get_submodule(owner).named_parameters(recurse=False)
        if any(f"{owner}.{key}" not in names for key, _ in own):
            return False
    rules = getattr(model, "active_rules", None)
    if not callable(rules):
        return True
    return names <= {rule.ours for rule in rules() if rule.is_renaming}


def write_tensors(
    delta: Delta, wholes: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[int]], dict[str, Any]]:
    """Return PEFT's tensors of a delta, what was written block by block, and patterns of ranks.

    The patterns are fields of the config: `rank_pattern` and `alpha_pattern`.

    Args:
        delta: with all its parts, whole.
        wholes: what is trained whole.
    """
    if delta.kind == "prompt":
        return {"prompt_embeddings": _prompt_rows(delta)}, {}, {}
    if delta.kind == "prefix":
        columns = [_columns(t) for held in delta.held for t in type(held.part).forward(held.part)]
        return {"prompt_embeddings": torch.cat(columns, 1).contiguous()}, {}, {}
    names = Names(whole_model(delta.model))
    groups: dict[str, list[Held]] = {}
    for held in delta.held:
        groups.setdefault(names.of(held.owner), []).append(held)
    found: dict[str, Tensor] = {}
    blocks: dict[str, list[int]] = {}
    ranks: dict[str, tuple[int, float]] = {}
    for theirs, parts in groups.items():
        whole = [next((h.part for h in parts if h.owner == n), None) for n in names.ours[theirs]]
        start = f"{PREFIX}{theirs}."
        if delta.kind == "gain":
            found |= _join_gain(whole_model(delta.model), names.ours[theirs], whole, start)
            continue
        made, split = _join_low_rank(whole_model(delta.model), names.ours[theirs], whole, start)
        found |= made
        if split:
            blocks[theirs] = split
        part = parts[0].part
        rank = next(t for n, t in made.items() if n.endswith(("lora_A.weight", "embedding_A")))
        ranks[theirs] = (rank.shape[0], _alpha(part.scale, rank.shape[0], delta))
    for name, tensor in wholes.items():
        owner, _, leaf = name.rpartition(".")
        found[f"{PREFIX}{names.of(owner)}.{leaf}"] = tensor
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


def _join_gain(
    model: nn.Module, owners: list[str], parts: list[Any], start: str
) -> dict[str, Tensor]:
    pieces = [
        torch.ones(rows_of(model, n)) if part is None else part.weight.detach()
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
        raise ConfigError(f"parts of {start.removeprefix(PREFIX)} have different scales.")
    alike = all(torch.equal(part.down, first.down) for part in there) and len(there) == len(parts)
    rows = [rows_of(model, n) for n in owners]
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


def write_config(
    delta: Delta, patterns: Mapping[str, Any], wholes: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return what PEFT's adapter_config.json says of a delta."""
    config: dict[str, Any] = {
        "peft_type": delta.peft_type,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "modules_to_save": None,
        "task_type": _task(delta.model),
    }
    names = Names(whole_model(delta.model))
    if wholes:
        owners = [n.rpartition(".")[0] for n in wholes]
        config["modules_to_save"] = sorted({names.of(owner) for owner in owners})
    if delta.kind in ("prefix", "prompt"):
        return {**config, **_prompt_config(delta)}
    config["target_modules"] = sorted({names.of(place) for place in delta.places()})
    first: Any = delta.held[0]
    model: Any = whole_model(delta.model)
    rules = model.active_rules() if hasattr(model, "active_rules") else ()
    turned = any(rule.transpose for rule in rules if rule.ours == f"{first.owner}.weight")
    module = model.get_submodule(first.owner)
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
    heads, _, width = type(part).forward(part)[0].shape
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
