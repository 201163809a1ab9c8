"""What `bmforge train` can run, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bmforge.errors import ConfigError, suggest
from bmforge.recipes.ant import CPMAntTrainConfig, train_ant
from bmforge.recipes.cpm1 import ChIDConfig, STCConfig, tune_chid, tune_stc
from bmforge.recipes.dialogue import EVADialogueConfig, train_dialogue
from bmforge.recipes.documents import CPMBeeTrainConfig, train_documents
from bmforge.recipes.finetune import (
    BertSuperGLUEConfig,
    GPT2SuperGLUEConfig,
    LlamaSuperGLUEConfig,
    T5SQuADConfig,
    T5SuperGLUEConfig,
    tune_squad,
    tune_task,
)
from bmforge.recipes.pretrain import (
    CPM1PretrainConfig,
    GPT2PretrainConfig,
    LlamaPretrainConfig,
    pretrain,
)
from bmforge.recipes.sft import LlamaSFTConfig, train_sft
from bmforge.recipes.spans import CPM2SpansConfig, T5SpansConfig, train_spans

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
    "cpm1-pretrain": Recipe(CPM1PretrainConfig, pretrain, "pretrain a CPM-1 on prepared text"),
    "cpm1-chid": Recipe(ChIDConfig, tune_chid, "fine-tune a CPM-1 to choose idioms (ChID)"),
    "cpm1-stc": Recipe(STCConfig, tune_stc, "fine-tune a CPM-1 to answer posts (STC)"),
    "cpm2-pretrain": Recipe(CPM2SpansConfig, train_spans, "train a CPM-2 to fill cut-out spans"),
    "t5-pretrain": Recipe(T5SpansConfig, train_spans, "train a T5 to fill cut-out spans"),
    "bert-superglue": Recipe(BertSuperGLUEConfig, tune_task, "fine-tune a BERT on a task"),
    "t5-superglue": Recipe(T5SuperGLUEConfig, tune_task, "fine-tune a T5 on a task"),
    "gpt2-superglue": Recipe(GPT2SuperGLUEConfig, tune_task, "fine-tune a GPT-2 on a task"),
    "llama-superglue": Recipe(LlamaSuperGLUEConfig, tune_task, "fine-tune a Llama on a task"),
    "llama-sft": Recipe(LlamaSFTConfig, train_sft, "fine-tune a Llama on conversations"),
    "t5-squad": Recipe(T5SQuADConfig, tune_squad, "fine-tune a T5 to answer questions on a text"),
    "eva-dialogue": Recipe(EVADialogueConfig, train_dialogue, "train an EVA on dialogues"),
    "cpm-ant-train": Recipe(
        CPMAntTrainConfig, train_ant, "train a CPM-Ant on hidden tokens and on the rest of texts"
    ),
    "cpm-bee-train": Recipe(CPMBeeTrainConfig, train_documents, "train a CPM-Bee on documents"),
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
