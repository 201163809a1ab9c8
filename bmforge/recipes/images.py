"""Training of a ViT to classify images in a folder, whose subfolders are the classes.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020); with `init_from` the model is
fine-tuned. `inputs/image_folder.py` has the preprocessing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bmforge.batch import Batch
from bmforge.errors import ConfigError
from bmforge.infer.score import score_classes
from bmforge.models import Model
from bmforge.parallel import World
from bmforge.recipes.inputs.examples import ExampleLoader, iter_held_out
from bmforge.recipes.inputs.image_folder import (
    ImageConfig,
    ImageFolder,
    save_preprocessing,
    stack_images,
)
from bmforge.recipes.run import Launch, Results, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.run_dir import check_new_run
from bmforge.train import EvalResult

__all__ = ["ImagesConfig", "train_images"]


@dataclass(kw_only=True)
class ImagesConfig(RunConfig):
    """Config for training on images; the other fields are those of `RunConfig`.

    Args:
        data: image folders, preprocessing, and batch sizes.
    """

    data: ImageConfig = field(default_factory=ImageConfig)


def train_images(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training on an image folder.

    Args:
        config: an `ImagesConfig` whose `model` is a ViT's config; its number of classes is set to
            the number of subfolders.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    config.data.check()
    check_new_run(config.run_dir)
    classes = ImageFolder(config.data.paths[0], config.data, config.model).classes
    if len(classes) < 2:
        raise ConfigError(
            f"{config.data.paths[0]!r} has only one class, {classes}. Use a folder with "
            "subfolders for at least two classes."
        )
    return launch(config, _open_data, head="image_classification", num_labels=len(classes))


def _open_data(config: Any, rows: World) -> TrainingData:
    data, model = config.data, config.model
    source = ImageFolder(data.paths[0], data, model)
    names = source.classes
    held_out = None
    if data.validation:
        held_out = ImageFolder(data.validation[0], data, model, names, learns=False)
    parts = {}
    if held_out is not None:
        parts["validation"] = lambda: iter_held_out(held_out, data, rows.rank, rows.size)

    def make(numbers: Sequence[int]) -> Batch:
        assert held_out is not None
        return stack_images([held_out.make(n, ()) for n in numbers])

    def figures(trained: Model, evaluation: EvalResult) -> Results:
        assert held_out is not None
        count = len(held_out)
        if data.validation_batches is not None:
            count = min(count, data.validation_batches * data.micro_batch_size)
        chosen = score_classes(trained, count, make, data.micro_batch_size, rows).argmax(-1)
        right = sum(int(chosen[n]) == held_out.label(n) for n in range(count))
        return {"accuracy": {"model": right / count}}

    return TrainingData(
        ExampleLoader(source, data, rows.rank, rows.size),
        model.max_seq_len,
        parts,
        save_tokenizer=lambda directory: save_preprocessing(directory, data, model),
        special_ids={
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        },
        figures=figures,
    )
