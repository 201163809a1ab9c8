"""Complete runs as Python functions; names say what and on what.

Start reading at `run.py`, which every run goes through: a recipe is a config and a function that
opens its data. `pretrain.py` reads token stores, `documents.py` CPM-Bee's documents, `images.py`
image folders, the others examples (`inputs/examples.py`): `spans.py`, `masked.py`, `blanks.py` and
`ant.py` what is hidden in a text, `finetune.py` tasks, `sft.py` conversations. `registry.py` has
the tasks that `bmforge train` offers and the old recipes' names; `start.py` finds the model.
`evaluate.py` measures a model without training it; how tasks are asked is in `asking.py` for both.
"""

from bmforge.recipes.compress import CompressRunConfig, run_compress
from bmforge.recipes.documents import CPMBeeTrainConfig, train_documents
from bmforge.recipes.pretrain import (
    CPM1PretrainConfig,
    GPT2PretrainConfig,
    LlamaPretrainConfig,
    PretrainConfig,
    pretrain,
)
from bmforge.recipes.quickstart import QuickstartConfig, quickstart
from bmforge.recipes.registry import RECIPES, TASKS, Recipe, Task, find_recipe
from bmforge.recipes.run import RunConfig, RunResult, TrainingData, run_recipe

__all__ = [
    "RECIPES",
    "TASKS",
    "CPM1PretrainConfig",
    "CPMBeeTrainConfig",
    "CompressRunConfig",
    "GPT2PretrainConfig",
    "LlamaPretrainConfig",
    "PretrainConfig",
    "QuickstartConfig",
    "Recipe",
    "RunConfig",
    "RunResult",
    "Task",
    "TrainingData",
    "find_recipe",
    "pretrain",
    "quickstart",
    "run_compress",
    "run_recipe",
    "train_documents",
]
