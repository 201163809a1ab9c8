"""Loads a prompt run's template and verbalizer: the task's default, a file, or a user's class."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from bmforge.data.tasks import BenchmarkTask, TaskExample
from bmforge.errors import ConfigError, suggest
from bmforge.recipes.start import family_of, with_changes
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt import (
    GenerationVerbalizer,
    ManualVerbalizer,
    PTRVerbalizer,
    Template,
    read_template,
)
from bmforge.tune.prompt.files import read_verbalizer
from bmforge.tune.prompt.published_templates import find_published

__all__ = ["describe_template", "find_class", "find_words", "open_template", "open_words"]


def open_template(config: Any, task: BenchmarkTask, example: TaskExample) -> str:
    """Return the text of a run's prompt template."""
    if config.template is not None:
        return read_template(config.template, config.choice)
    templates = find_published(task, example).templates
    if not 0 <= config.choice < len(templates):
        raise ConfigError(
            f"choice={config.choice} is not a template of {task.name} (allowed: 0 to "
            f"{len(templates) - 1})."
        )
    return templates[config.choice]


def find_words(config: Any, task: BenchmarkTask, example: TaskExample) -> dict[str, list[str]]:
    """Return a dict from class to label words, from the run's file or the task's defaults."""
    if config.verbalizer is not None:
        rows = read_verbalizer(config.verbalizer, config.choice, task.label_names)
    else:
        rows = [list(row) for row in find_published(task, example).words]
        if not rows:
            raise ConfigError(
                f"{task.name} needs generated text. Train on it with prompt-generate "
                "instead of prompt-classify."
            )
    names = task.label_names or tuple(map(str, range(len(rows))))
    if len(names) != len(rows):
        raise ConfigError(
            f"the verbalizer has words for {len(rows)} classes, but {task.name} has {len(names)} "
            "classes. Define words for each class."
        )
    return dict(zip(names, rows, strict=True))


def open_words(
    config: Any, task: BenchmarkTask, example: TaskExample, tokenizer: Tokenizer, num_masks: int = 1
) -> Any:
    """Build the verbalizer of a run, for a template with `num_masks` masks."""
    words = find_words(config, task, example)
    if example.choices:
        if config.verbalizer_class:
            raise ConfigError(
                f"verbalizer_class={config.verbalizer_class!r} has no effect on "
                f"{task.name}, whose examples contain their own choices. Leave it out."
            )
        return GenerationVerbalizer(words, tokenizer, rule=True, per_token=True)
    if config.verbalizer_class:
        return _open_own_words(config, words, tokenizer)
    if num_masks > 1:
        return PTRVerbalizer(words, tokenizer, join=config.join)
    return ManualVerbalizer(words, tokenizer, join=config.join)


def _open_own_words(config: Any, words: dict[str, list[str]], tokenizer: Tokenizer) -> Any:
    """Build a verbalizer of a user-defined class."""
    kind = find_class(config.verbalizer_class, "verbalizer_class", nn.Module)
    options = {} if config.join == "first" else {"join": config.join}
    verbalizer = kind(words, tokenizer, **options)
    lacking = [
        n for n in ("takes", "num_masks", "num_classes", "normalize") if not hasattr(verbalizer, n)
    ]
    if lacking:
        raise ConfigError(
            f"{config.verbalizer_class!r} has no {', '.join(lacking)}, which every "
            "verbalizer must define. See bmforge.testing.verbalizer_suite."
        )
    trained = [name for name, _ in verbalizer.named_parameters()]
    if trained and not config.zero_shot:
        raise ConfigError(
            f"{config.verbalizer_class!r} has parameters ({', '.join(trained)}), but a run "
            "trains only the parameters of the model. Use --zero-shot, or train the verbalizer "
            "with PromptClassifier."
        )
    return verbalizer.requires_grad_(False)


def describe_template(config: Any, tokenizer: Tokenizer, text: str) -> Template:
    """Build the template for a model on the meta device, including its soft tokens."""
    sizes = with_changes(config)
    model = family_of(sizes).from_config(sizes, device="meta")
    behind = getattr(config, "behind", "refuse")
    kind: Any = Template
    if config.template_class:
        kind = find_class(config.template_class, "template_class", Template)
    template: Template = kind(text, tokenizer, model, front=config.soft_front, behind=behind)
    return template


def find_class(class_path: str, option: str, base: type) -> Any:
    """Import and return a user-defined class; its file or module is executed.

    Args:
        class_path: "package.module:Class", or "folder/file.py:Class".
        option: name of the option, for messages.
        base: required base class.

    Raises:
        ConfigError: the module, file or class does not exist, or the class has another base.
    """
    source, _, name = class_path.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(
            f"{option}={class_path!r} must be package.module:Class or path/to/file.py:Class."
        )
    module = _run_file(Path(source), option) if source.endswith(".py") else _import(source, option)
    attribute = getattr(module, name, None)
    if attribute is None:
        class_names = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(
            f"{option}={class_path!r}: {source} has no {name!r}.{suggest(name, class_names)}"
        )
    if not isinstance(attribute, type) or not issubclass(attribute, base):
        raise ConfigError(f"{option}={class_path!r} must be a class that inherits {base.__name__}.")
    return attribute


def _import(source: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ImportError as error:
        raise ConfigError(
            f"{option}: {source!r} cannot be imported ({error}). Pass an installed module, or a "
            "file: path/to/file.py:Class."
        ) from error


def _run_file(file: Path, option: str) -> ModuleType:
    """Import a file as a module, only once, so that its classes stay the same objects."""
    if not file.is_file():
        raise ConfigError(f"{option}: the file {str(file)!r} does not exist. Check its path.")
    name = f"_bmforge_own_{file.resolve().as_posix()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
