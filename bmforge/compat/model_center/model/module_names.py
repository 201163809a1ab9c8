"""Maps ModelCenter's names of modules and parameters to those of a bmforge model."""

from __future__ import annotations

import re
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.models import Model
from bmforge.models.formats.model_center import model_center_name, t5_factor, undo_factor
from bmforge.models.formats.model_center_config import OLD_FAMILIES
from bmforge.tune.delta.opendelta_names import rename_inner

__all__ = [
    "InputEmbedding", "OldModules", "module_names", "parameter_names", "rename_loaded_",
    "rename_saved_",
]  # fmt: skip

# Matches the name of a projection in attention or MLP; group 1 is the block with the norm.
_INSIDE = re.compile(r"(.*\.(?:self_att|cross_att|ffn))\.(self_attention|ffn)\..*")
# Modules that contain an adapter -> ModelCenter's names; further names in its ViT.
_SIDES = ((r"\.attn\.", ".self_att."), (r"\.cross_attn\.", ".cross_att."), (r"\.mlp\.", ".ffn."))
_CONTAINERS = (_SIDES, (*_SIDES, (r"^encoder\.", "blocks."), (r"^cls_projection\.", "head.")))


def module_names(model: Model, family: str, before: str = "") -> dict[str, list[str]]:
    """Return a dict from ModelCenter's module names to those of a bmforge model.

    ModelCenter's ``self_att`` (with norm) maps to the attention module, ``ffn`` to the MLP.

    Args:
        model: bmforge model.
        family: name of its family.
        before: prefix of the bmforge names.
    """
    names: dict[str, list[str]] = {}
    for name, _ in model.named_parameters() if family in OLD_FAMILIES else ():
        owner = before + name.rpartition(".")[0]
        old_name = model_center_name(model, family, name).rpartition(".")[0]
        if old_name and owner not in names.setdefault(old_name, []):
            names[old_name].append(owner)
        match = _INSIDE.fullmatch(old_name)
        if match is not None:
            part = re.sub(r"\.(attn|cross_attn|mlp)\..*", r".\1", owner)
            names.setdefault(match[1], [part])
            names.setdefault(f"{match[1]}.{match[2]}", [part])
    return names


def parameter_names(base: Any) -> dict[str, str]:
    """Return a dict from the parameter names of a `BaseModel` to ModelCenter's."""
    model, family = base.model, base.config.family
    head = "mlm_head" if hasattr(base.head, "decoder") else "lm_head"
    names = {}
    for name, _ in base.named_parameters(remove_duplicate=False):
        part, _, inner = name.partition(".")
        if part == "head":
            inner = f"{head}.{inner}"
        old_name = name if part == "cls_projection" else model_center_name(model, family, inner)
        for own, old in _CONTAINERS[family == "ViT"]:
            old_name = re.sub(own, old, old_name)
        names[name] = old_name
    return names


def rename_loaded_(base: Any, state_dict: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
    """Hook of `load_state_dict` that accepts ModelCenter's parameter names.

    The stored tensor of a tied parameter is replaced by the embedding, as ModelCenter ignores it.
    """
    names = base.published_parameters()
    stored_names = {
        rename_inner(n.removeprefix(prefix)): n for n in state_dict if n.startswith(prefix)
    }
    old_tensors = {
        old: state_dict[stored_names[old]] for old in names.values() if old in stored_names
    }
    factor = 1.0
    if base.config.family == "T5" and "input_embedding.weight" in old_tensors:
        factor = t5_factor({"scale": base.config.scale}, old_tensors)
    sources: dict[int, str] = {}
    for own, parameter in base.named_parameters(remove_duplicate=False):
        source = sources.setdefault(id(parameter), own)
        is_loaded = prefix + own in state_dict
        if names.get(own) in old_tensors and not is_loaded:
            value = state_dict.pop(stored_names[names[own]])
            undo = undo_factor(own.removeprefix("model."), factor)
            state_dict[prefix + own] = value if undo == 1.0 else value * undo
        if source != own and prefix + source in state_dict:
            state_dict[prefix + own] = state_dict[prefix + source]


def rename_saved_(base: Any, state_dict: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
    """State-dict hook that writes ModelCenter's parameter names.

    ModelCenter has no `output_projection` if the head is tied. T5 keeps bmforge's names, because
    ModelCenter's T5 files contain weights that are scaled down for fp16.
    """
    if base.config.family == "T5":
        return
    names = base.published_parameters()
    is_tied = len(names) > sum(1 for _ in base.parameters())
    for name in [n for n in state_dict if n.startswith(prefix)]:
        value = state_dict.pop(name)
        old_name = names.get(name.removeprefix(prefix), name.removeprefix(prefix))
        if not (is_tied and old_name == "output_projection.weight"):
            state_dict[prefix + old_name] = value


class OldModules(dict[str, nn.Module]):
    """Child modules of a model (`_modules`), which can also be read under ModelCenter's names."""

    def __missing__(self, name: str) -> nn.Module:
        model = self.get("model")
        if isinstance(model, Model):
            paths = module_names(model, type(model).__name__).get(name, [])
            if len(paths) == 1:
                return model.get_submodule(paths[0])
        raise KeyError(f"the model has no module {name!r}.")


class InputEmbedding:
    """Wraps the token embedding with the interface of `input_embedding`.

    Args:
        embed: embedding of the bmforge model.
    """

    def __init__(self, embed: nn.Embedding) -> None:
        self.embed, self.dim_model = embed, embed.embedding_dim

    @property
    def weight(self) -> Tensor:
        """Embedding table."""
        return self.embed.weight

    def __call__(self, ids: Tensor) -> Tensor:
        """Look up embeddings."""
        rows: Tensor = self.embed(ids)
        return rows

    def projection(self, x: Tensor) -> Tensor:
        """Return the logits over the whole vocabulary, including padding entries."""
        return F.linear(x, self.embed.weight)
