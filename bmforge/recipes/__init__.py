"""Complete runs as Python functions; names say what and on what.

Start reading at `pretrain.py`. `RECIPES` lists what `bmforge train` offers.
"""

from bmforge.recipes.pretrain import (
    GPT2PretrainConfig,
    LlamaPretrainConfig,
    PretrainConfig,
    pretrain,
)
from bmforge.recipes.quickstart import QuickstartConfig, quickstart
from bmforge.recipes.registry import RECIPES, Recipe, find_recipe

__all__ = [
    "RECIPES",
    "GPT2PretrainConfig",
    "LlamaPretrainConfig",
    "PretrainConfig",
    "QuickstartConfig",
    "Recipe",
    "find_recipe",
    "pretrain",
    "quickstart",
]
