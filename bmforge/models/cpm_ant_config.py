"""Config of CPM-Ant: CPM-Live's names, transformers' names, and the published sizes.

Source: the config files of OpenBMB/CPM-Live and openbmb/cpm-ant-10b; for the compressed models, the
README of CPM-Live's branch cpm-ant and BMCook's ``cpm_live_example``. The example lacks the 7B
model, which is assumed to have the layers of the 3B model that was compressed from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.cpm_live import HF_FIELDS, CPMLiveConfig, read_masks
from bmforge.models.heads import Head

__all__ = ["TEXT_SEGMENT", "CPMAntConfig"]

# Segment type of plain text.
TEXT_SEGMENT = 2
_HF_ARCHITECTURES = {"language_model": "CpmAntForCausalLM", "none": "CpmAntModel"}
# Fields of config.json that only bmforge writes.
_OWN_FIELDS = ("sum_scale", "task_id", "prompts_in_vocabulary", "mask_modules")
_MASKS_7B = read_masks("..fff.f......xfa...a.f...xf.a.f.afxx..a..f.x.af.")
_MASKS_1B = read_masks(".ffxf.f.f.x.fxxx.a.x.xaf.xx.aff.xfxx.ax..xfxaaxa")


def _pruned(heads: int, size: int, masks: tuple[tuple[bool, bool], ...]) -> dict[str, Any]:
    return {"num_heads": heads, "intermediate_size": size, "mask_modules": masks}


@dataclass(kw_only=True)
class CPMAntConfig(CPMLiveConfig):
    """Config of CPM-Ant; other fields are those of `CPMLiveConfig`.

    Args:
        prompt_types: number of task prompts.
        prompt_length: length of a prompt in tokens.
        segment_types: number of segment types.
        task_id: index of the prompt for plain text.
        prompts_in_vocabulary: store the prompts as embedding rows after the vocabulary (CPM-Ant+).
        folded: True if the weights already include the muP scales, as in transformers.
    """

    family: ClassVar[str] = "cpm_ant"
    model_types: ClassVar[tuple[str, ...]] = ("cpm_ant", "cpmant")
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head(
            "CPMAnt",
            {"lm_head.weight": "lm_head.weight"},
            aliases=("CPMAntPlus", "CpmAntForCausalLM", "CPMAntForCausalLM"),
        ),
        "none": Head("CPMAntModel", prefix="", aliases=("CpmAntModel",)),
    }
    hf_names: ClassVar[dict[str, str]] = {
        **CPMLiveConfig.hf_names,
        "prompt_types": "prompt_types",
        "prompt_length": "prompt_length",
        "segment_types": "segment_types",
        "task_id": "task_id",
        "prompts_in_vocabulary": "prompts_in_vocabulary",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpm-ant-10b": {},
        "cpm-ant-7b": _pruned(32, 10240, _MASKS_7B),
        "cpm-ant-3b": _pruned(20, 3735, _MASKS_7B),
        "cpm-ant-1b": _pruned(16, 700, _MASKS_1B),
        "cpm-ant-300m": _pruned(4, 350, _MASKS_1B),
        "cpm-ant-plus-10b": {"vocab_size": 86579, "prompts_in_vocabulary": True},
    }
    hub_ids: ClassVar[dict[str, str]] = {"cpm-ant-10b": "openbmb/cpm-ant-10b"}

    prompt_types: int = 32
    prompt_length: int = 32
    segment_types: int = 32
    task_id: int = 2
    prompts_in_vocabulary: bool = False
    folded: bool = False

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for CPM-Ant; files without model_type are recognized by prompt fields."""
        live = "model_type" not in raw and {"prompt_types", "dim_model"} <= set(raw)
        return live or raw.get("model_type") in cls.model_types

    @property
    def scales_weights(self) -> bool:
        """True if the muP scales are applied separately from the weights."""
        return not self.folded

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if not 0 <= self.task_id < self.prompt_types:
            yield f"task_id={self.task_id} must be below prompt_types={self.prompt_types}"
        if self.segment_types <= TEXT_SEGMENT:
            yield f"segment_types={self.segment_types} must be above {TEXT_SEGMENT}"
        fixed = {"sum_scale": 1.0, "task_id": 2, "prompts_in_vocabulary": False, "mask_modules": ()}
        for name, value in fixed.items() if self.folded else ():
            if (current := getattr(self, name)) != value:
                yield f"{name}={current!r} must be {value!r} in transformers' format (folded=True)"
        if not self.folded and not self.tie_word_embeddings:
            yield "tie_word_embeddings=False exists only in the format of transformers"

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        folded = raw.get("model_type") == "cpmant"
        if folded:
            for name, value in {"num_layers": 48, "num_heads": 32, "dim_head": 128}.items():
                if not {name, *(t for t, live in HF_FIELDS.items() if live == name)} & set(raw):
                    raw[name] = value
            raw.pop("tie_word_embeddings", None)
        values, others = super()._read_special(raw)
        return {**values, "folded": folded, "tie_word_embeddings": not folded}, others

    def to_hf(self) -> dict[str, Any]:
        """Return the config with CPM-Live's names, or transformers' for folded weights."""
        out = super().to_hf()
        if not self.folded:
            return out
        for published, live in HF_FIELDS.items():
            out[published] = out.pop(live)
        has_class = set(self.raw.get("architectures") or ()) & set(out["architectures"])
        if not has_class:
            out["architectures"] = [_HF_ARCHITECTURES[self.head]]
        fields = {n: v for n, v in out.items() if n not in _OWN_FIELDS or n in self.raw}
        return {**fields, "model_type": "cpmant"}
