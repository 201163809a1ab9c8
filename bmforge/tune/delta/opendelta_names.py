"""Names of tensors inside the adapter modules of OpenDelta and of bmforge.

Source: opendelta 0.3.2, `delta_models/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["INSIDE", "LEAVES", "old_inner_name", "rename_inner"]

INSIDE = re.compile(
    r"(.*?)\.?(lora|adapter|low_rank_adapter|compactor|parallel_adapter|prefix|soft_prompt_layer)"
    r"\.([\w.]+)"
)
LEAVES = {
    "lora_A": "down",
    "lora_B": "up",
    "past_key": "key",
    "past_value": "value",
    "soft_embeds": "weight",
    "modulelist.down_proj.weight": "down_weight",
    "modulelist.down_proj.bias": "down_bias",
    "modulelist.up_proj.weight": "up_weight",
    "modulelist.up_proj.bias": "up_bias",
    **{
        f"{stem}_sampler.{old_name}": f"{stem}_{own_name}"
        for stem in ("down", "up")
        for old_name, own_name in (
            ("W_left", "left"),
            ("W_right", "right"),
            ("W", "whole"),
            ("phm_rule", "rule"),
            ("b", "bias"),
        )
    },
}
# OpenDelta's name of an adapter module -> bmforge's name, if it differs.
_SLOTS = {"compactor": "compacter", "soft_prompt_layer": "soft_prompt"}
# OpenDelta's type -> prefixes of the tensor names inside its adapter module.
_STARTS: Mapping[str, tuple[str, ...]] = {
    "lora": ("lora_",),
    "prefix": ("past_",),
    "soft_prompt": ("soft_",),
    **dict.fromkeys(("adapter", "parallel_adapter"), ("modulelist.",)),
    **dict.fromkeys(("low_rank_adapter", "compacter"), ("down_sampler.", "up_sampler.")),
}


def rename_inner(name: str) -> str:
    """Replace the part of a tensor name inside an adapter module with bmforge's name.

    `...project_q.lora.lora_A` becomes `...project_q.lora.down`; other names do not change.
    """
    match = INSIDE.fullmatch(name)
    if match is None or match[3] not in LEAVES:
        return name
    slot = _SLOTS.get(match[2], match[2])
    return ".".join(filter(None, (match[1], slot, LEAVES[match[3]])))


def old_inner_name(kind: str, key: str) -> str | None:
    """Return OpenDelta's name of a tensor in an adapter module; None if OpenDelta lacks the tensor.

    Args:
        kind: OpenDelta's type, such as "lora".
        key: bmforge's name in the adapter module, such as "down" (OpenDelta: "lora.lora_A").
    """
    starts = _STARTS.get(kind, ())
    names = [n for n, own in LEAVES.items() if own == key and n.startswith(starts)]
    slots = {own: old for old, own in _SLOTS.items()}
    return f"{slots.get(kind, kind)}.{names[0]}" if names else None
