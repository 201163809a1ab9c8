"""Complete training, compression and evaluation runs as Python functions.

Start reading at `run.py`, which every training run goes through: a recipe is a config and a
function that loads its data. `pretrain.py` reads token stores, `documents.py` reads CPM-Bee's
documents and `images.py` reads image folders. All other recipes read examples
(`inputs/examples.py`): `spans.py`, `masked.py`, `blank_infilling.py` and `cpm_ant.py` for denoising
objectives, `finetune.py` for tasks, `sft.py` for conversations. `registry.py` lists the tasks of
`bmforge train` and the older recipe names; `start.py` resolves the model name. `evaluate.py`
measures a model without training it; `task_prompts.py` has the task prompts and metrics for
fine-tuning and evaluation.
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
