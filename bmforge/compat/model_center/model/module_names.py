"""Maps ModelCenter's module names to those of a bmforge model."""

from __future__ import annotations

import re

from torch import nn

from bmforge.models import Model
from bmforge.models.formats.model_center import their_name
from bmforge.models.formats.model_center_config import OLD_FAMILIES

__all__ = ["OldModules", "module_names"]

# Matches a projection inside an attention or MLP; group 1 is the block with its norm.
_INSIDE = re.compile(r"(.*\.(?:self_att|cross_att|ffn))\.(self_attention|ffn)\..*")


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
        old_name = their_name(model, family, name).rpartition(".")[0]
        if old_name and owner not in names.setdefault(old_name, []):
            names[old_name].append(owner)
        match = _INSIDE.fullmatch(old_name)
        if match is not None:
            part = re.sub(r"\.(attn|cross_attn|mlp)\..*", r".\1", owner)
            names.setdefault(match[1], [part])
            names.setdefault(f"{match[1]}.{match[2]}", [part])
    return names


class OldModules(dict[str, nn.Module]):
    """Child modules of a model (`_modules`), which can also be read under ModelCenter's names."""

    def __missing__(self, name: str) -> nn.Module:
        model = self.get("model")
        if isinstance(model, Model):
            paths = module_names(model, type(model).__name__).get(name, [])
            if len(paths) == 1:
                return model.get_submodule(paths[0])
        raise KeyError(name)
