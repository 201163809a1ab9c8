"""Table of all model families, which are imported when they are first used.

The exports of `bmforge.models`, the checkpoints that `AutoModel` loads, the presets, and the rows
of docs/reference/capabilities.md and docs/reference/presets.md are derived from `MODULES`. To add a
family, add an entry there, and an import in `bmforge.models` for type checkers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from bmforge.models.base import Model

__all__ = ["FAMILIES", "MODULES", "FamilyTable"]

# Module of this package -> the model classes in it. The config of Name is NameConfig.
MODULES: dict[str, tuple[str, ...]] = {
    "bert": ("Bert",),
    "bloom": ("Bloom",),
    "cohere": ("Cohere",),
    "cohere2": ("Cohere2",),
    "cpm1": ("CPM1",),
    "cpm2": ("CPM2",),
    "cpm_ant": ("CPMAnt",),
    "cpm_bee": ("CPMBee",),
    "deepseek": ("DeepSeekV2", "DeepSeekV3"),
    "eva": ("EVA",),
    "falcon": ("Falcon",),
    "gemma": ("Gemma", "Gemma2", "Gemma3"),
    "glm": ("GLM",),
    "glm4": ("GLM4",),
    "glm4_moe": ("GLM4Moe",),
    "gpt2": ("GPT2",),
    "gpt_neox": ("GPTNeoX",),
    "gpt_oss": ("GptOss",),
    "gptj": ("GPTJ",),
    "granite": ("Granite",),
    "internlm3": ("InternLM3",),
    "llama": ("Llama",),
    "longformer": ("Longformer",),
    "minicpm": ("MiniCPM",),
    "minicpm3": ("MiniCPM3",),
    "mistral": ("Mistral",),
    "mixtral": ("Mixtral",),
    "modernbert": ("ModernBert",),
    "olmo2": ("OLMo2", "OLMo3"),
    "opt": ("OPT",),
    "phi": ("Phi",),
    "phi3": ("Phi3",),
    "qwen": ("Qwen",),
    "qwen_moe": ("Qwen2Moe", "Qwen3Moe"),
    "roberta": ("Roberta",),
    "seed_oss": ("SeedOss",),
    "smollm3": ("SmolLM3",),
    "stablelm": ("StableLM",),
    "starcoder2": ("Starcoder2",),
    "t5": ("T5",),
    "vit": ("ViT",),
    "xlm_roberta": ("XLMRoberta",),
}


class FamilyTable(Mapping[str, type[Model]]):
    """Mapping from class name to model class, sorted by name; classes are imported on first use.

    Importing all of them takes about a tenth of the time that importing torch takes, but a command
    needs only one of them.

    Args:
        modules: mapping from module of `bmforge.models` to its class names.
    """

    def __init__(self, modules: Mapping[str, tuple[str, ...]]) -> None:
        module_of = {name: module for module, names in modules.items() for name in names}
        self._modules = dict(sorted(module_of.items()))

    def __getitem__(self, name: str) -> type[Model]:
        """Import the model class with this name, and return it."""
        module = importlib.import_module(f"bmforge.models.{self._modules[name]}")
        family = getattr(module, name)
        assert issubclass(family, Model)
        return family

    def __iter__(self) -> Iterator[str]:
        """Iterate over the class names."""
        return iter(self._modules)

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self._modules)

    def by_similarity(self, model_type: str) -> Iterator[type[Model]]:
        """Iterate over all model classes, starting with the names most similar to `model_type`.

        The order only saves imports: `ModelConfig.opens` decides which family reads a config.json.
        """
        kind = model_type.replace("-", "").replace("_", "").lower()
        return (self[n] for n in sorted(self, key=lambda n: -len(_shared_start(kind, n.lower()))))


def _shared_start(a: str, b: str) -> str:
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return b[:size]


FAMILIES = FamilyTable(MODULES)
