"""Complete runs as Python functions; names say what and on what.

Start reading at `run.py`, which every run goes through: a recipe is a config and a function that
opens its data. `pretrain.py` reads token stores, `documents.py` CPM-Bee's documents, the others
examples (`inputs/examples.py`): `spans.py` cut-out spans, `finetune.py` tasks, `sft.py`
conversations. `RECIPES` lists what `bmforge train` offers.
"""

from bmforge.recipes.documents import CPMBeeTrainConfig, train_documents
from bmforge.recipes.pretrain import (
    CPM1PretrainConfig,
    GPT2PretrainConfig,
    LlamaPretrainConfig,
    PretrainConfig,
    pretrain,
)
from bmforge.recipes.quickstart import QuickstartConfig, quickstart
from bmforge.recipes.registry import RECIPES, Recipe, find_recipe
from bmforge.recipes.run import RunConfig, RunResult, TrainingData, run_recipe

__all__ = [
    "RECIPES",
    "CPM1PretrainConfig",
    "CPMBeeTrainConfig",
    "GPT2PretrainConfig",
    "LlamaPretrainConfig",
    "PretrainConfig",
    "QuickstartConfig",
    "Recipe",
    "RunConfig",
    "RunResult",
    "TrainingData",
    "find_recipe",
    "pretrain",
    "quickstart",
    "run_recipe",
    "train_documents",
]
