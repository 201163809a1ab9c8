"""Writes adapters in PEFT's format; `peft_format.py` reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.low_rank import EmbeddingLowRank, LowRank
from bmforge.surgery import shared_tensors
from bmforge.tune.delta.attached import AttachedModule, whole_model
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.peft_format import PREFIX, Names, rows_of
from bmforge.tune.delta.peft_fused import interleave_rows
from bmforge.tune.delta.peft_tokens import can_write_tokens, layer_parts, write_token_rows

__all__ = ["can_write", "written_whole", "fold_weight_", "write_config", "write_tensors"]

_METHODS = ("LORA", "IA3", "PREFIX_TUNING", "PROMPT_TUNING", "LN_TUNING")
_PROMPTS = ("PREFIX_TUNING", "PROMPT_TUNING")


def can_write(delta: AttachedDelta) -> bool:
    """Return True if PEFT would compute the same outputs with this adapter."""
    model = whole_model(delta.model)
    fully_trained = delta.fully_trained_parameters()
    if delta.peft_type not in _METHODS or any(map(_is_of_a_part(delta), fully_trained)):
        return False
    if not _keeps_form(model, delta) or not _can_fold(delta):
        return False
    names = Names(model)
    if delta.peft_type in _PROMPTS:
        is_prefix = delta.peft_type == "PREFIX_TUNING"
        return hasattr(model, "traits") and (
            not is_prefix
            or (bool(delta.options.get("shift_positions")) and not model.traits.is_encoder_decoder)  # type: ignore[union-attr]
        )
    parts = layer_parts(delta)
    if any(part.owner not in names.published or hasattr(part.part, "keys") for part in parts):
        return False
    if not can_write_tokens(delta, names):
        return False
    return delta.kind != "low_rank" or all(
        _is_one_layer(names.own[name], parts) for name, parts in _by_layer(names, delta).items()
    )


def _can_fold(delta: AttachedDelta) -> bool:
    """Return True if the adapter's weight is 0 or 1, or can be multiplied into alpha."""
    is_sum = delta.kind == "low_rank" and not delta.options.get("use_dora")
    is_sum = is_sum and not delta.options.get("trainable_token_indices")
    return delta.weight in (0, 1) or is_sum


def fold_weight_(config: dict[str, Any], delta: AttachedDelta) -> dict[str, Any]:
    """Multiply alpha by the adapter's weight; return the metadata with which loading undoes this.

    Args:
        config: adapter config in PEFT's format, changed in place.
        delta: the adapter; if it is disabled, alpha is unchanged, since PEFT does not save this.
    """
    mark: dict[str, Any] = {"weight": float(delta.weight)} if delta.weight != 1 else {}
    if delta.weight not in (0, 1):
        pattern = config.get("alpha_pattern") or {}
        mark["unfolded"] = {"lora_alpha": config["lora_alpha"], "alpha_pattern": pattern}
        config["lora_alpha"] = config["lora_alpha"] * delta.weight
        config["alpha_pattern"] = {n: alpha * delta.weight for n, alpha in pattern.items()}
    return mark


def _by_layer(names: Names, delta: AttachedDelta) -> dict[str, list[AttachedModule]]:
    """Return a dict from Hugging Face module name to its bmforge layers' adapter modules."""
    groups: dict[str, list[AttachedModule]] = {}
    for attached in layer_parts(delta):
        groups.setdefault(names.of(attached.owner), []).append(attached)
    return groups


def _is_one_layer(owners: list[str], parts: list[AttachedModule]) -> bool:
    """Return True if a fused layer's LoRAs, one per bmforge layer, can be written as one LoRA."""
    if len(owners) == 1:
        return True
    loras = [attached.part for attached in parts]
    if len({part.scale for part in loras}) > 1:
        return False
    for key in ("magnitude", "bias"):
        count = sum(getattr(part, key) is not None for part in loras)
        if count and count != len(owners):
            return False
    return loras[0].magnitude is None or all(
        torch.equal(part.down, loras[0].down) for part in loras if not part.down.is_meta
    )


def _is_of_a_part(delta: AttachedDelta) -> Callable[[str], bool]:
    """Return a predicate on parameter names that is True for parameters of adapter modules."""
    model = whole_model(delta.model)
    return lambda name: hasattr(model.get_submodule(name.rpartition(".")[0]), "is_delta")


def _keeps_form(model: nn.Module, delta: AttachedDelta) -> bool:
    """Return True if PEFT can represent the parameters that are trained in full.

    PEFT stores only whole modules with Hugging Face names; for a prompt, only the task's head.
    """
    fully_trained = set(delta.fully_trained_parameters())
    if delta.peft_type == "LN_TUNING":
        owners = tuple(f"{name}." for name in delta.places())
        fully_trained = {name for name in fully_trained if not name.startswith(owners)}
    if delta.origin is not None:  # loaded from PEFT's format
        return True
    heads = set(_heads(model))
    shared, named = shared_tensors(model), dict(model.named_parameters())
    for name in fully_trained:
        owner = name.rpartition(".")[0]
        own = model.get_submodule(owner).named_parameters(recurse=False)
        if any(f"{owner}.{key}" not in fully_trained for key, _ in own):
            return False
        if delta.peft_type in _PROMPTS and name not in heads:
            return False
        if id(named[name]) in shared and delta.peft_type != "LORA":
            return False
    rules = getattr(model, "published_rules", None)
    if not callable(rules):
        return True
    return fully_trained <= {rule.parameter for rule in rules() if rule.is_renaming}


def _heads(model: nn.Module) -> list[str]:
    """Return the parameters of a task's head, which PEFT saves with every adapter."""
    if _task(model) not in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"):
        return []
    names = Names(model)
    head_names = []
    for name, _ in model.named_parameters():
        published_name = names.published.get(name.rpartition(".")[0], "")
        if any(head in published_name for head in ("classifier", "score", "qa_outputs")):
            head_names.append(name)
    return head_names


def written_whole(delta: AttachedDelta) -> set[str]:
    """Return the names of the base parameters that a directory of the adapter contains."""
    is_prompt = delta.peft_type in _PROMPTS and can_write(delta)
    heads = _heads(whole_model(delta.model)) if is_prompt else ()
    return {*delta.fully_trained_parameters(), *heads}


def write_tensors(
    delta: AttachedDelta, fully_trained: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[int]], dict[str, Any]]:
    """Return an adapter's tensors and the config fields that depend on them.

    Args:
        delta: adapter with all its modules, unsharded.
        fully_trained: parameters trained in full (`modules_to_save`).

    Returns:
        tensors by PEFT's name, ranks by fused layer, and PEFT's config fields for these ranks
    """
    names = Names(whole_model(delta.model))
    if delta.peft_type in _PROMPTS:
        return _write_prompt(delta, names, fully_trained), {}, {}
    groups = _by_layer(names, delta)
    written: dict[str, Tensor] = {}
    blocks: dict[str, list[int]] = {}
    ranks: dict[str, tuple[int, float]] = {}
    for published_name, parts in groups.items():
        fused_parts = [
            next((h.part for h in parts if h.owner == n), None) for n in names.own[published_name]
        ]
        start = f"{PREFIX}{published_name}."
        join = _join_gain if delta.kind == "gain" else _join_low_rank
        owners, order = names.own[published_name], names.row_order(published_name)
        factors, split = join(whole_model(delta.model), owners, fused_parts, start)
        written |= {n: interleave_rows(n, tensor, order) for n, tensor in factors.items()}
        if delta.kind == "gain":
            continue
        if split:
            blocks[published_name] = split
        part = parts[0].part
        rank = next(t for n, t in factors.items() if n.endswith(("lora_A.weight", "embedding_A")))
        ranks[published_name] = (rank.shape[0], _alpha(part.scale, rank.shape[0], delta))
    written |= write_token_rows(delta, names, PREFIX)
    return written | _write_fully_trained(delta, names, fully_trained), blocks, _patterns(ranks)


def _write_fully_trained(
    delta: AttachedDelta, names: Names, fully_trained: Mapping[str, Tensor], prefix: str = PREFIX
) -> dict[str, Tensor]:
    """Return a dict from PEFT's name to tensor, of the parameters trained in full."""
    written: dict[str, Tensor] = {}
    places, norms = set(delta.places()), delta.peft_type == "LN_TUNING"
    for published_name, tensor in names.sources_of(fully_trained).items():
        owner, _, leaf = published_name.rpartition(".")
        inside = [n for n in names.own.get(owner, ()) if n in places]
        if norms and inside:
            leaf = f"ln_tuning_layers.{leaf}"
        elif inside:  # PEFT wraps the module that the adapter is attached to
            leaf = f"base_layer.{leaf}"
        written[f"{prefix}{owner}.{leaf}"] = tensor
        for tied in names.tied.get(published_name, ()):
            written[f"{prefix}{tied}"] = tensor.clone()
    return written


def _write_prompt(
    delta: AttachedDelta, names: Names, fully_trained: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a dict from PEFT's name to tensor, of the prompt and of the task's head."""
    if delta.kind == "prompt":
        written = {"prompt_embeddings": _prompt_rows(delta)}
    else:
        columns = [
            _columns(t)
            for attached in delta.held
            for t in type(attached.part).forward(attached.part)
        ]
        written = {"prompt_embeddings": torch.cat(columns, 1).contiguous()}
    named = dict(whole_model(delta.model).named_parameters())
    heads = {n: named[n].detach() for n in _heads(whole_model(delta.model)) if not named[n].is_meta}
    return written | _write_fully_trained(delta, names, {**heads, **fully_trained}, "base_model.")


def _alpha(scale: float, rank: int, delta: AttachedDelta) -> float:
    return scale * (math.sqrt(rank) if delta.options.get("use_rslora") else rank)


def _patterns(ranks: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    if not ranks:
        return {}
    counted = list(ranks.values())
    usual = max(set(counted), key=counted.count)
    differing = {name: entry for name, entry in ranks.items() if entry != usual}
    return {
        "r": usual[0],
        "lora_alpha": usual[1],
        "rank_pattern": {n: r for n, (r, _) in differing.items() if r != usual[0]},
        "alpha_pattern": {n: a for n, (_, a) in differing.items() if a != usual[1]},
    }


def _columns(heads: Tensor) -> Tensor:
    return heads.detach().transpose(0, 1).flatten(1)


def _prompt_rows(delta: AttachedDelta) -> Tensor:
    rows = delta.held[0].part.weight.detach()
    traits = getattr(delta.model, "traits", None)
    return torch.cat((rows, rows)) if getattr(traits, "is_encoder_decoder", False) else rows


def _join_gain(
    model: nn.Module, owners: list[str], parts: list[Any], start: str
) -> tuple[dict[str, Tensor], list[int]]:
    chunks = [
        torch.ones(rows_of(model, n)) if part is None else part.weight.detach()
        for n, part in zip(owners, parts, strict=True)
    ]
    on_input = any(part is not None and part.on_input for part in parts)
    if on_input:
        first = next(p.weight.detach() for p in parts if p is not None)
        return {f"{start}ia3_l": first[None]}, []
    return {f"{start}ia3_l": torch.cat([p.to(chunks[-1].dtype) for p in chunks])[:, None]}, []


def _join_low_rank(
    model: nn.Module, owners: list[str], parts: list[Any], start: str
) -> tuple[dict[str, Tensor], list[int]]:
    present: list[LowRank] = [part for part in parts if part is not None]
    first = present[0]
    if isinstance(first, EmbeddingLowRank):
        factors = {f"{start}lora_embedding_A": first.down, f"{start}lora_embedding_B": first.up}
        return {n: t.detach() for n, t in factors.items()}, []
    if len({part.scale for part in present}) > 1:
        raise ConfigError(
            f"the adapters of {start.removeprefix(PREFIX)} have different scales, but PEFT stores "
            "one scale per layer. Use the same rank and alpha for all of them."
        )
    alike = all(torch.equal(part.down, first.down) for part in present) and len(present) == len(
        parts
    )
    rows = [rows_of(model, n) for n in owners]
    ranks = [0 if part is None else part.down.shape[0] for part in parts]
    factors, split = {}, []
    if alike:
        factors["lora_A.weight"] = first.down.detach()
        factors["lora_B.weight"] = torch.cat([part.up.detach() for part in present])
    else:
        split = ranks
        factors["lora_A.weight"] = torch.cat([part.down.detach() for part in present])
        up = first.up.detach().new_zeros(sum(rows), sum(ranks))
        for number, part in enumerate(parts):
            if part is not None:
                row, column = sum(rows[:number]), sum(ranks[:number])
                up[row : row + rows[number], column : column + ranks[number]] = part.up.detach()
        factors["lora_B.weight"] = up
    for key, leaf in (("bias", "lora_B.bias"), ("magnitude", "lora_magnitude_vector")):
        chunks = [getattr(part, key) for part in present]
        if chunks[0] is not None:
            if len(present) != len(parts):
                raise ConfigError(
                    f"{key} is set for only some of {', '.join(owners)}, which are one layer in "
                    f"PEFT's format. Set {key} for all of them, or for none."
                )
            factors[leaf] = torch.cat([p.detach() for p in chunks])
    return {f"{start}{leaf}": tensor.contiguous() for leaf, tensor in factors.items()}, split


def write_config(
    delta: AttachedDelta, patterns: Mapping[str, Any], fully_trained: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return PEFT's adapter_config.json; `patterns` are the config fields of `write_tensors`."""
    config: dict[str, Any] = {
        "peft_type": delta.peft_type,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "modules_to_save": None,
        "task_type": _task(delta.model),
    }
    full_model = whole_model(delta.model)
    names, heads = Names(full_model), _heads(full_model)
    if delta.peft_type not in _PROMPTS and not set(heads) <= set(fully_trained):
        config["task_type"] = None  # with a task type, PEFT requires the head in the file
    norms = delta.places() if delta.peft_type == "LN_TUNING" else []
    owners = {n.rpartition(".")[0] for n in fully_trained} - set(norms)
    if owners:
        config["modules_to_save"] = sorted({names.of(owner) for owner in owners})
    if delta.kind in ("prefix", "prompt"):
        return {**config, **_prompt_config(delta)}
    config["target_modules"] = sorted({names.of(module_name) for module_name in delta.places()})
    if norms:
        return config
    first: Any = layer_parts(delta)[0]
    model: Any = whole_model(delta.model)
    rules = model.active_rules() if hasattr(model, "active_rules") else ()
    turned = any(rule.transpose for rule in rules if rule.parameter == f"{first.owner}.weight")
    module = model.get_submodule(first.owner)
    config["fan_in_fan_out"] = turned or hasattr(module, "nf")
    if delta.kind == "gain":
        into = [h.owner for h in delta.held if h.part.on_input]
        config["feedforward_modules"] = sorted({names.of(n) for n in into})
        return config
    options = delta.describe()["options"]
    indices = options["trainable_token_indices"]
    return {
        **config,
        "trainable_token_indices": {names.of(n): rows for n, rows in indices.items()} or None,
        **patterns,
        "lora_dropout": options["dropout"],
        "use_rslora": options["use_rslora"],
        "use_dora": options["use_dora"],
        "lora_bias": options["bias"],
        "bias": "none",
        "ensure_weight_tying": _trains_tied(full_model, fully_trained),
    }


def _trains_tied(model: nn.Module, fully_trained: Mapping[str, Tensor]) -> bool:
    """Return True if a weight trained in full is tied to another weight."""
    shared, named = shared_tensors(model), dict(model.named_parameters())
    return any(id(named[name]) in shared for name in fully_trained if name in named)


def _prompt_config(delta: AttachedDelta) -> dict[str, Any]:
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
        config["num_transformer_submodules"] = 1 + getattr(traits, "is_encoder_decoder", False)
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
