"""What `bmforge train` can run, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bmforge.errors import ConfigError, suggest
from bmforge.recipes.pretrain import GPT2PretrainConfig, LlamaPretrainConfig, pretrain

__all__ = ["RECIPES", "Recipe", "find_recipe"]


@dataclass(frozen=True)
class Recipe:
    """A named run: the type of its config, and the function that runs it."""

    config: type[Any]
    run: Callable[[Any], Any]
    about: str


RECIPES = {
    "gpt2-pretrain": Recipe(GPT2PretrainConfig, pretrain, "pretrain a GPT-2 on prepared text"),
    "llama-pretrain": Recipe(LlamaPretrainConfig, pretrain, "pretrain a Llama on prepared text"),
}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by its name.

    Raises:
        ConfigError: there is none; the nearest name is given.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"recipe {name!r} is unknown.{suggest(name, RECIPES)} Known: {', '.join(RECIPES)}."
        )
    return RECIPES[name]
