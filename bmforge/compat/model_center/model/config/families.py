"""Config classes of all families; see `base.Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bmforge.compat.model_center.model.config.base import Config
from bmforge.compat.model_center.model.relative_cpm1 import RelativeCPM1
from bmforge.errors import ConfigError
from bmforge.models import Model
from bmforge.models.hub import FAMILIES

__all__ = [
    "BertConfig",
    "CPM1Config",
    "CPM2Config",
    "CPM3Config",
    "GLMConfig",
    "GPT2Config",
    "GPTjConfig",
    "LlamaConfig",
    "LongformerConfig",
    "OPTConfig",
    "RobertaConfig",
    "T5Config",
    "ViTConfig",
    "VitConfig",
]


def _define(name: str, family: str) -> type[Config]:
    """Create the config class of a family, for families without special fields."""
    doc = f"Config of a {family} model."
    return type(
        f"{name}Config", (Config,), {"__doc__": doc, "__module__": __name__, "family": family}
    )


BertConfig = _define("Bert", "Bert")
RobertaConfig = _define("Roberta", "Roberta")
LongformerConfig = _define("Longformer", "Longformer")
ViTConfig = VitConfig = _define("ViT", "ViT")
GPT2Config = _define("GPT2", "GPT2")
GPTjConfig = _define("GPTj", "GPTJ")
OPTConfig = _define("OPT", "OPT")
LlamaConfig = _define("Llama", "Llama")
GLMConfig = _define("GLM", "GLM")
T5Config = _define("T5", "T5")
CPM2Config = _define("CPM2", "CPM2")


class CPM1Config(Config):
    """Config of a CPM-1 model.

    `pos_bias_type` selects the model: "relative" (default) is ModelCenter's variant with relative
    positions; "none" is the original GPT-2 model, which `from_pretrained` also detects.
    """

    family = "CPM1"

    def __init__(self, **fields: Any) -> None:
        kind = {n: fields.pop(n) for n in ("pos_bias_type",) if n in fields}
        super().__init__(**kind, **fields)

    @property
    def is_relative(self) -> bool:
        """True for ModelCenter's variant of CPM-1 with relative positions."""
        return self._base is None and self._given.get("pos_bias_type", "relative") == "relative"

    def kind(self) -> type[Model]:
        """Return the bmforge model class for this config."""
        return RelativeCPM1 if self.is_relative else FAMILIES["CPM1"]

    def needed(self) -> Mapping[str, Any]:
        """Return a dict from field to value, for fields that support only one value."""
        biases = ("norm_bias", "att_bias", "ffn_bias", "attn_scale")
        return {
            "pos_bias_type": "relative" if self.is_relative else "none",
            "ffn_activate_fn": "gated_gelu" if self.is_relative else "gelu_new",
            **dict.fromkeys(biases, not self.is_relative),
            **dict.fromkeys(("length_scale", "int8", "post_layer_norm"), False),
        }

    def _check(self, name: str, value: Any) -> None:
        if name != "pos_bias_type":
            return super()._check(name, value)
        if value not in (("none",) if self._base is not None else ("relative", "none")):
            raise ConfigError(
                f"pos_bias_type={value!r} is unknown (known: 'relative', ModelCenter's default, "
                "and 'none', the released model's). Use the type of the checkpoint."
            )


class CPM3Config(Config):
    """Config of a CPM-3 model, whose architecture is CPM-Ant's."""

    family = "CPMAnt"
    fixed: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("norm_bias", "att_bias", "ffn_bias", "int8", "post_layer_norm"), False),
        **{"length_scale": True, "attn_scale": True, "pos_bias_type": "relative"},
        **{"max_exact_rate": 0.25, "max_distance_rate": 1.0, "absolute_inner_segment": True},
        "ffn_activate_fn": "gated_gelu",
    }
