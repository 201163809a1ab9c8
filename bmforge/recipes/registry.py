"""Registry of the tasks of `bmforge train`, and of the older recipe names.

A task has one or several implementations (`Form`); the properties of the model's family (`Traits`)
select one. An older recipe name is a task with a default model and settings.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.config import config_from_dict, config_to_dict, load_toml
from bmforge.data.tasks import TASKS as DATA_TASKS
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models.hub import FAMILIES
from bmforge.models.traits import Traits
from bmforge.recipes.blank_infilling import BlankConfig, train_blanks
from bmforge.recipes.cpm1 import ChIDConfig, CPM1TextsConfig, STCConfig, tune_chid, tune_stc
from bmforge.recipes.cpm_ant import AntConfig, CPMAntTrainConfig, train_ant
from bmforge.recipes.delta_search import DeltaSearchConfig, search_deltas
from bmforge.recipes.dialogue import DialogueConfig, EVADialogueConfig, train_dialogue
from bmforge.recipes.distill import OnPolicyDistillationConfig, train_distill
from bmforge.recipes.documents import CPMBeeTrainConfig, DocumentsConfig, train_documents
from bmforge.recipes.finetune import (
    BertSuperGLUEConfig,
    GPT2SuperGLUEConfig,
    LlamaSuperGLUEConfig,
    SQuADTuneConfig,
    T5SQuADConfig,
    T5SuperGLUEConfig,
    TaskTuneConfig,
    tune_squad,
    tune_task,
)
from bmforge.recipes.images import ImagesConfig, train_images
from bmforge.recipes.masked import MaskedConfig, train_masked
from bmforge.recipes.preferences import PreferencesConfig, train_preferences
from bmforge.recipes.pretrain import (
    CPM1PretrainConfig,
    GPT2PretrainConfig,
    LlamaPretrainConfig,
    PretrainConfig,
    pretrain,
)
from bmforge.recipes.prompt import (
    PromptGenerateConfig,
    PromptTuneConfig,
    train_classes,
    train_texts,
)
from bmforge.recipes.renamed_fields import rename_fields
from bmforge.recipes.reward import RewardConfig, train_reward
from bmforge.recipes.rl import ReinforcementConfig, train_rl
from bmforge.recipes.sft import ConversationsConfig, LlamaSFTConfig, train_sft
from bmforge.recipes.spans import CPM2SpansConfig, SpanConfig, T5SpansConfig, train_spans
from bmforge.recipes.speech import SpeechConfig, train_speech
from bmforge.recipes.start import Start, find_start, traits_of
from bmforge.task_names import ALSO, OLD_NAMES, TASK_NAMES, check_task

__all__ = [
    "RECIPES",
    "TASKS",
    "Form",
    "Recipe",
    "Task",
    "find_recipe",
    "read_config",
    "read_config_values",
]


@dataclass(frozen=True)
class Form:
    """One implementation of a task, for some of the model families.

    Args:
        fits: function (`Traits` of a family) -> True if the implementation supports the family.
        config: config class of the task, without `model`.
        run: function (config, `Launch`) that runs or checks the task.
        reads_audio: True if the task trains on audio.
    """

    fits: Callable[[Traits], bool]
    config: type[Any]
    run: Callable[..., Any]
    reads_audio: bool = False


@dataclass(frozen=True)
class Task:
    """A training task of `bmforge train`.

    Args:
        about: description of the task.
        forms: implementations; the first that supports the model's family is used.
        tunes: True if the task expects a pretrained model.
    """

    about: str
    forms: tuple[Form, ...]
    tunes: bool = False

    def form(self, traits: Traits) -> Form | None:
        """Return the implementation for a family; None if the task does not support the family."""
        fitting = (form for form in self.forms if form.fits(traits))
        return next((f for f in fitting if f.reads_audio == traits.has_audio), None)


@dataclass(frozen=True)
class Recipe:
    """A task for one model: a config class and the function that runs it.

    Args:
        config: config class whose fields are the command's options; the field `model` is the config
            of the family.
        run: function (config, `Launch`) that runs or checks the recipe.
        about: description of the recipe.
        task: name of the task.
    """

    config: type[Any]
    run: Callable[..., Any]
    about: str
    task: str


def _writes(traits: Traits) -> bool:
    """Return True if models of the family can learn to generate text after a prompt."""
    return traits.is_encoder_decoder or _continues(traits)


def _continues(traits: Traits) -> bool:
    """Return True if models of the family are decoders, which continue a text."""
    return (traits.attention, traits.objective) == ("causal", "next token")


def _generates_tokens(traits: Traits) -> bool:
    """Return True if models of the family generate token by token."""
    return _writes(traits) or traits.objective == "blanks"


def _is_batched(traits: Traits) -> bool:
    """Return True for causal decoders; the engine batches their generation requests."""
    return _continues(traits) and traits.positions in ("learned", "rotary", "alibi")


def _reads_texts(traits: Traits) -> bool:
    return traits.attention == "bidirectional" and not traits.has_images


def _objective(name: str) -> Callable[[Traits], bool]:
    return lambda traits: traits.objective == name


def _tokenizer(name: str) -> Callable[[Traits], bool]:
    return lambda traits: traits.tokenizer == name


_DIALOGUE = Form(_objective("dialogues"), DialogueConfig, train_dialogue)
_DOCUMENTS = Form(_objective("documents"), DocumentsConfig, train_documents)
_CPM1 = _tokenizer("CPM1Tokenizer")

TASKS: Mapping[str, Task] = {
    "pretrain": Task(
        TASK_NAMES["pretrain"],
        (
            Form(_objective("next token"), PretrainConfig, pretrain),
            Form(_objective("masked tokens"), MaskedConfig, train_masked),
            Form(_objective("spans"), SpanConfig, train_spans),
            Form(_objective("blanks"), BlankConfig, train_blanks),
            Form(_objective("hidden tokens"), AntConfig, train_ant),
            _DIALOGUE,
            _DOCUMENTS,
        ),
    ),
    "conversations": Task(
        TASK_NAMES["conversations"], (Form(_writes, ConversationsConfig, train_sft),), tunes=True
    ),
    "preferences": Task(
        TASK_NAMES["preferences"],
        (Form(_continues, PreferencesConfig, train_preferences),),
        tunes=True,
    ),
    "reward": Task(
        TASK_NAMES["reward"], (Form(_continues, RewardConfig, train_reward),), tunes=True
    ),
    "classify": Task(
        TASK_NAMES["classify"],
        (
            Form(_reads_texts, TaskTuneConfig, tune_task),
            Form(_writes, TaskTuneConfig, tune_task),
        ),
        tunes=True,
    ),
    "prompt-classify": Task(
        TASK_NAMES["prompt-classify"],
        (Form(lambda traits: not traits.has_images, PromptTuneConfig, train_classes),),
        tunes=True,
    ),
    "prompt-generate": Task(
        TASK_NAMES["prompt-generate"],
        (Form(_generates_tokens, PromptGenerateConfig, train_texts),),
        tunes=True,
    ),
    "squad": Task(TASK_NAMES["squad"], (Form(_writes, SQuADTuneConfig, tune_squad),), tunes=True),
    "dialogue": Task(TASK_NAMES["dialogue"], (_DIALOGUE,)),
    "documents": Task(TASK_NAMES["documents"], (_DOCUMENTS,)),
    "chid": Task(TASK_NAMES["chid"], (Form(_CPM1, CPM1TextsConfig, tune_chid),)),
    "stc": Task(TASK_NAMES["stc"], (Form(_CPM1, CPM1TextsConfig, tune_stc),)),
    "rl": Task(TASK_NAMES["rl"], (Form(_is_batched, ReinforcementConfig, train_rl),), tunes=True),
    "distill": Task(
        TASK_NAMES["distill"],
        (Form(_is_batched, OnPolicyDistillationConfig, train_distill),),
        tunes=True,
    ),
    "images": Task(
        TASK_NAMES["images"], (Form(lambda t: t.has_images, ImagesConfig, train_images),)
    ),
    "speech": Task(
        TASK_NAMES["speech"], (Form(_writes, SpeechConfig, train_speech, True),), tunes=True
    ),
    "delta-search": Task(
        TASK_NAMES["delta-search"],
        (
            Form(_reads_texts, DeltaSearchConfig, search_deltas),
            Form(_writes, DeltaSearchConfig, search_deltas),
        ),
        tunes=True,
    ),
}

# Older recipe name -> its task, default model and settings.
RECIPES: Mapping[str, Recipe] = {
    "gpt2-pretrain": Recipe(GPT2PretrainConfig, pretrain, OLD_NAMES["gpt2-pretrain"], "pretrain"),
    "llama-pretrain": Recipe(
        LlamaPretrainConfig, pretrain, OLD_NAMES["llama-pretrain"], "pretrain"
    ),
    "cpm1-pretrain": Recipe(CPM1PretrainConfig, pretrain, OLD_NAMES["cpm1-pretrain"], "pretrain"),
    "cpm1-chid": Recipe(ChIDConfig, tune_chid, OLD_NAMES["cpm1-chid"], "chid"),
    "cpm1-stc": Recipe(STCConfig, tune_stc, OLD_NAMES["cpm1-stc"], "stc"),
    "cpm2-pretrain": Recipe(CPM2SpansConfig, train_spans, OLD_NAMES["cpm2-pretrain"], "pretrain"),
    "t5-pretrain": Recipe(T5SpansConfig, train_spans, OLD_NAMES["t5-pretrain"], "pretrain"),
    "bert-superglue": Recipe(
        BertSuperGLUEConfig, tune_task, OLD_NAMES["bert-superglue"], "classify"
    ),
    "t5-superglue": Recipe(T5SuperGLUEConfig, tune_task, OLD_NAMES["t5-superglue"], "classify"),
    "gpt2-superglue": Recipe(
        GPT2SuperGLUEConfig, tune_task, OLD_NAMES["gpt2-superglue"], "classify"
    ),
    "llama-superglue": Recipe(
        LlamaSuperGLUEConfig, tune_task, OLD_NAMES["llama-superglue"], "classify"
    ),
    "llama-sft": Recipe(LlamaSFTConfig, train_sft, OLD_NAMES["llama-sft"], "conversations"),
    "t5-squad": Recipe(T5SQuADConfig, tune_squad, OLD_NAMES["t5-squad"], "squad"),
    "eva-dialogue": Recipe(
        EVADialogueConfig, train_dialogue, OLD_NAMES["eva-dialogue"], "dialogue"
    ),
    "cpm-ant-train": Recipe(CPMAntTrainConfig, train_ant, OLD_NAMES["cpm-ant-train"], "pretrain"),
    "cpm-bee-train": Recipe(
        CPMBeeTrainConfig, train_documents, OLD_NAMES["cpm-bee-train"], "documents"
    ),
}


def find_recipe(
    name: str, model: str | None = None, init_from: str | None = None, file: str | None = None
) -> Recipe:
    """Return the recipe that `bmforge train NAME` runs.

    Args:
        name: a task, an older recipe, or one of the published tasks (BoolQ, ag_news, ...).
        model: value of `--model`; see `find_start`.
        init_from: initial model if `model` is None.
        file: config file, which may name the family or an initial model.

    Raises:
        ConfigError: the task is unknown, no model is named, or the model does not support the task.
    """
    recipe = RECIPES.get(name)
    if recipe is not None and model is None:
        return recipe
    meant = _find_tasks(name if recipe is None else recipe.task)
    file_values = read_config_values(file)
    model = model or init_from or file_values.get("init_from") or file_values.get("family")
    if model is None:
        raise ConfigError(
            f"the task {name!r} needs a model. Pass --model with a preset (gpt2-small), a "
            "family (gpt2) or the directory of a model. Families that support the task: "
            f"{', '.join(_families_for(meant))}. With a model, --help-all lists the options."
        )
    start = find_start(model)
    has_audio = traits_of(start.config).has_audio
    traits = dataclasses.replace(start.family.family_traits, has_audio=has_audio)
    for task, published in meant:
        form = TASKS[task].form(traits)
        if form is not None:
            if TASKS[task].tunes and start.init_from is None and init_from is None:
                get_logger().info(
                    (
                        "--model %s is a preset: its weights are initialized randomly. Pass a "
                        "directory or hub id (%s) to start from pretrained weights"
                    ),
                    *(model, start.family.config_class.hub_ids.get(model, "OWNER/NAME")),
                )
            label = published or (name if recipe is None else recipe.task)
            config = _with_model(form.config, label, start, published)
            return Recipe(config, form.run, f"{name} with {model}", task)
    others = ", ".join(_families_for(meant)) or "speech models of transformers, such as Whisper"
    can = [key for key, other in TASKS.items() if other.form(traits)]
    raise ConfigError(
        f"{start.family.__name__} does not support the task {name!r}. Families that do: "
        f"{others}. Tasks of {start.family.__name__}: {', '.join(can)}."
    )


def read_config(recipe: Recipe, file: str | None) -> Any:
    """Return a recipe's default config, updated with the fields of a TOML file.

    If the task has a model, fields of `model` that the file omits have that model's values.

    Raises:
        ConfigError: the file is missing, is not TOML, or does not fit the recipe.
    """
    if file is None:
        return recipe.config()
    values = read_config_values(file)
    if recipe in RECIPES.values() or not isinstance(values.get("model"), dict):
        return config_from_dict(recipe.config, values) if values else load_toml(recipe.config, file)
    usual = config_to_dict(recipe.config().model.without_derived())
    return config_from_dict(recipe.config, {**values, "model": {**usual, **values["model"]}})


def _find_tasks(name: str) -> list[tuple[str, str | None]]:
    """Return (task, published task or None) pairs for a name.

    ChID has two pairs, since CPM-1 has its own recipe for it.
    """
    check_task(name)
    name = ALSO.get(name, name)
    matches: list[tuple[str, str | None]] = [(name, None)] if name in TASKS else []
    published = next((task for task in DATA_TASKS if task.lower() == name.lower()), None)
    if published is not None and name != "squad":
        matches.append(("squad" if DATA_TASKS[published].asks_for_text else "classify", published))
    return matches


def _families_for(tasks: Sequence[tuple[str, str | None]]) -> list[str]:
    """Return the names of the families that support one of the tasks."""
    return [
        name
        for name, family in FAMILIES.items()
        if any(TASKS[task].form(family.family_traits) for task, _ in tasks)
    ]


def read_config_values(file: str | None) -> dict[str, Any]:
    """Parse a TOML file; return {} if it is None or invalid (`read_config` reports errors)."""
    try:
        return {} if file is None else rename_fields(tomllib.loads(Path(file).read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _with_model(base: type[Any], name: str, start: Start, published: str | None) -> type[Any]:
    """Add the fields that depend on the model to a task's config class."""
    family = start.family.__name__
    run_dir = Path("runs") / f"{family}-{name}".lower()
    fields: list[tuple[str, Any, Any]] = [
        ("run_dir", Path, field(default=run_dir)),
        ("model", type(start.config), field(default_factory=lambda: start.config.replace())),
        ("family", str | None, field(default=family)),
    ]
    if start.init_from is not None:
        fields.append(("init_from", str | None, field(default=start.init_from)))
    usual = base().data
    changes = _data_changes(usual, start, published)
    if changes:
        data = field(default_factory=lambda: dataclasses.replace(usual, **changes))
        fields.append(("data", type(usual), data))
    config_class = dataclasses.make_dataclass(
        f"{family}{base.__name__}", fields, bases=(base,), kw_only=True
    )
    config_class.__doc__, config_class.__module__ = base.__doc__, __name__
    return config_class


def _data_changes(usual: Any, start: Start, published: str | None) -> dict[str, Any]:
    """Return the fields of `data` that depend on the model, such as the maximum sequence length."""
    changes: dict[str, Any] = {} if published is None else {"task": published}
    longest = start.config.max_seq_len
    has_end = start.family.family_traits.positions != "relative"
    if has_end and getattr(usual, "seq_len", 0) > longest:
        changes["seq_len"] = longest
    return changes
