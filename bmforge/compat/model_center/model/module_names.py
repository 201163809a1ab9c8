"""What ModelCenter called the modules of a model of the zoo."""

from __future__ import annotations

import re

from bmforge.models import Model
from bmforge.models.formats.model_center import their_name
from bmforge.models.formats.model_center_config import OLD_FAMILIES

__all__ = ["module_names"]

# A layer of an attention or MLP, and what it is in: with a norm, and alone.
_INSIDE = re.compile(r"(.*\.(?:self_att|cross_att|ffn))\.(self_attention|ffn)\..*")


def module_names(model: Model, family: str, before: str = "") -> dict[str, list[str]]:
    """Return ModelCenter's names of modules -> those that they have here.

    Its attention with a norm, ``self_att``, is the attention alone here, and ``ffn`` the MLP.

    Args:
        model: of the zoo.
        family: its name.
        before: stands before the names here.
    """
    found: dict[str, list[str]] = {}
    for name, _ in model.named_parameters() if family in OLD_FAMILIES else ():
        owner = before + name.rpartition(".")[0]
        theirs = their_name(model, family, name).rpartition(".")[0]
        if theirs and owner not in found.setdefault(theirs, []):
            found[theirs].append(owner)
        match = _INSIDE.fullmatch(theirs)
        if match is not None:
            part = re.sub(r"\.(attn|cross_attn|mlp)\..*", r".\1", owner)
            found.setdefault(match[1], [part])
            found.setdefault(f"{match[1]}.{match[2]}", [part])
    return found
