"""Converts OpenPrompt's YAML configs to TOML configs of `bmforge train`.

Start at `read_config`. A key maps to a field by `config_keys.toml` or by a method of `_Reader`;
keys without an equivalent are listed with the reason, never dropped silently.
Source: openprompt/default_config.py of thunlp/OpenPrompt, 1.0.1, for keys and defaults.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bmforge.compat.cpm_pretrain.arguments import Migrated
from bmforge.config import config_from_dict
from bmforge.data.tasks import TASKS, read_task
from bmforge.errors import BmforgeError, ConfigError, MissingDependencyError, suggest
from bmforge.recipes.registry import TASKS as RUNS

__all__ = ["read_config"]

_KEYS = tomllib.loads(Path(__file__).with_name("config_keys.toml").read_text("utf-8"))
_DATASETS, _TYPES = _KEYS["datasets"], {kind.__name__: kind for kind in (str, int, float, list)}


def read_config(path: str | Path, files_dir: Path | None = None) -> Migrated:
    """Convert an OpenPrompt config to a config of `bmforge train`; no file is written.

    Args:
        path: path of the YAML file; relative paths in it are not changed.
        files_dir: directory in which the caller will write `Migrated.files` (templates and label
            words).

    Raises:
        ConfigError: the file is not an OpenPrompt config.
        MissingDependencyError: PyYAML is not installed.
    """
    file = Path(path)
    values = _load(file)
    task = str(values.get("task") or "classification")
    name = {"generation": "prompt-generate"}.get(task, "prompt-classify")
    out = Migrated(name)
    reader = _Reader(dict(_flatten(values)), out, files_dir or Path())
    reader.fill()
    out.command = f"bmforge train {name} --config {{config}}"
    _check(out)
    return out


def _load(file: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("PyYAML", "tasks", "OpenPrompt's configs") from error
    try:
        values = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read as an OpenPrompt config ({error}). Pass a YAML file "
            "with the sections plm, dataset and template."
        ) from error
    if not isinstance(values, dict) or not {"plm", "dataset", "template"} & set(values):
        raise ConfigError(
            f"{str(file)!r} is not a valid OpenPrompt config (required sections: plm, dataset and "
            "template)."
        )
    return values


def _flatten(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of each leaf in nested tables."""
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and not name.endswith("label_words"):
            yield from _flatten(value, f"{name}.")
        elif not name.endswith("parent_config"):
            yield name, value


def _check(out: Migrated) -> None:
    """Check the converted config, except for the model, by parsing it as the recipe does."""
    values = {key: value for key, value in out.values.items() if key != "model"}
    config_from_dict(RUNS[out.task].forms[0].config, values)


class _Reader:
    """Converts the keys of a config one after another.

    Args:
        settings: dict from dotted key, such as `plm.model_name`, to value.
        out: result to fill.
        files_dir: directory of the files that the converted config refers to.
    """

    def __init__(self, settings: dict[str, Any], out: Migrated, files_dir: Path) -> None:
        self.settings, self.out, self.files_dir = settings, out, files_dir
        self.put = out.put
        chosen = (settings.get(name) for name in ("template", "verbalizer", "calibrate"))
        self.chosen = {str(name) for name in chosen}

    def take(self, key: str, usual: Any = None) -> Any:
        """Remove a key; return its value, or `usual` if it is missing or None."""
        value = self.settings.pop(key, None)
        return usual if value is None else value

    def miss(self, key: str, why: str) -> None:
        """Record a key that has no equivalent in bmforge, and why."""
        self.out.unplaced.append((key, why))

    def fill(self) -> None:
        """Convert all keys of the OpenPrompt config to bmforge settings."""
        self.put("train.optim.betas", [0.9, 0.999])
        self.put("train.optim.weight_decay", 0.01)
        self.put("train.schedule.kind", "linear")
        self.put("data.seq_len", 256)
        for key, (field_path, kind) in _KEYS["plain"].items():
            value = self.take(key)
            if value is not None:
                self.put(
                    field_path,
                    [value] if field_path == "data.paths" else _read(key, value, _TYPES[kind]),
                )
        self.place_task()
        self.place_template()
        self.place_words()
        self.place_setting()
        self.place_loop()
        self.place_rest()

    def place_task(self) -> None:
        """Convert the dataset's name and the loss to the settings of the task."""
        if self.take("task") == "relation_classification":
            self.take("classification.loss_function")
        if (loss := self.take("classification.loss_function")) not in (
            None, "cross_entropy", "nll_loss",
        ):  # fmt: skip
            self.miss("classification.loss_function", f"{loss!r}: cross-entropy is minimized")
        name = str(self.take("dataset.name", ""))
        short = name.lower().removeprefix("super_glue.").removeprefix("superglue.")
        if short in _DATASETS:
            self.put("data.task", _DATASETS[short])
            if "dev" not in TASKS[_DATASETS[short]].files:
                self.put("data.dev_split", "test")
        else:
            self.miss(
                "dataset.name",
                f"{name!r} is not a known task{suggest(name, TASKS)}: set data.labels",
            )
        if (sep := self.take("dataset.label_path_sep")) not in (None, "-"):
            self.miss("dataset.label_path_sep", f"{sep!r}: the types must be separated by '-'")

    def place_template(self) -> None:
        """Convert the template and its training options."""
        kind = str(self.take("template", "manual_template")).removesuffix("_template")
        block = f"{kind}_template"
        if kind not in _KEYS["templates"]:
            self.miss("template", f"{block!r} is unknown.{suggest(kind, _KEYS['templates'])}")
        if (text := self.take(f"{block}.text")) is not None:
            self.out.files["template.txt"] = f"{text}\n"
            self.put("template", str(self.files_dir / "template.txt"))
        if (file := self.take(f"{block}.file_path")) is not None:
            self.put("template", str(file))
        self.put("choice", int(self.take(f"{block}.choice", 0)))
        if kind == "soft":
            self.put("soft_front", int(self.take(f"{block}.num_tokens", 20)))
        if kind == "prefix_tuning":
            self.put("adapter.kind", "prefix")
            self.put("adapter.length", int(self.take(f"{block}.num_token", 5)))
            self.put("adapter.inner", int(self.take(f"{block}.mid_dim", 512)))
            if float(self.take(f"{block}.prefix_dropout", 0)):
                self.miss(f"{block}.prefix_dropout", "a prefix has no dropout")
        if kind == "ptuning":
            encoder = self.take(f"{block}.prompt_encoder_type", "lstm")
            self.miss(
                f"{block}.prompt_encoder_type", f"{encoder}: a run trains only the soft tokens"
            )
        self.place_rates(kind, block)

    def place_rates(self, kind: str, block: str) -> None:
        """Convert the learning rates of the model and the template."""
        frozen = bool(self.take("plm.optimize.freeze_para", False))
        lr = float(self.take("plm.optimize.lr", 5e-4))
        warmup = int(self.take("plm.optimize.scheduler.num_warmup_steps", 500))
        own = self.take(f"{block}.optimize.lr")
        decay = self.take(f"{block}.optimize.weight_decay")
        own_warmup = self.take(f"{block}.optimize.scheduler.num_warmup_steps")
        for name in ("name", "eps", "adam_epsilon", "betas", "no_decay"):
            if self.take(f"{block}.optimize.{name}") not in (None, "AdamW"):
                self.miss(f"{block}.optimize.{name}", "all trained parameters use train.optim")
        if frozen and kind != "prefix_tuning":
            self.put("freeze_base", True)
        if frozen or kind == "prefix_tuning":
            lr, warmup = float(own or lr), int(warmup if own_warmup is None else own_warmup)
            if decay is not None:
                self.put("train.optim.weight_decay", float(decay))
        elif own is not None or decay is not None:
            if kind in ("soft", "ptuning"):
                group = {"glob": "embed.prompt.weight", "lr": float(own or lr)}
                decays = {} if decay is None else {"weight_decay": float(decay)}
                self.put("train.optim.groups", [group | decays])
            else:
                self.miss(
                    f"{block}.optimize",
                    "soft tokens of this template use the learning rate of the model",
                )
        self.put("train.optim.lr", lr)
        self.put("train.schedule.warmup_steps", warmup)

    def place_words(self) -> None:
        """Convert the section of the verbalizer and its label words."""
        name = self.take("verbalizer")
        if name is None:
            return
        kind, block = str(name).removesuffix("_verbalizer"), str(name)
        if kind not in _KEYS["verbalizers"]:
            why = "uses its label words unchanged; the class is in bmforge.tune.prompt"
            self.miss("verbalizer", f"{name!r}: a run does not train a verbalizer, but {why}")
        if (words := self.take(f"{block}.label_words")) is not None:
            if not _are_texts(words):
                raise ConfigError(
                    f"{block}.label_words={words!r:.80} contains a value that is not "
                    "a string: YAML reads No and yes as booleans. Put words in quotes."
                )
            self.out.files["verbalizer.json"] = json.dumps(words, ensure_ascii=False) + "\n"
            self.put("verbalizer", str(self.files_dir / "verbalizer.json"))
        if (file := self.take(f"{block}.file_path")) is not None:
            self.put("verbalizer", str(file))
        choice, line = int(self.take(f"{block}.choice", 0)), self.out.values["choice"]
        if file is not None and choice != line:
            self.miss(
                f"{block}.choice", f"{choice}: a run has one choice, and the template's is {line}"
            )
        self.put("join", str(self.take(f"{block}.multi_token_handler", "first")))
        if self.take(f"{block}.prefix", " ") != " ":
            self.miss(f"{block}.prefix", "write a word without a space before it as <!>word")
        self.take(f"{block}.num_classes")  # follows from the label words
        if self.out.task == "prompt-generate":
            self.miss("verbalizer", "the task generates texts and has no classes")
            for field in ("verbalizer", "join"):
                self.out.values.pop(field, None)

    def place_setting(self) -> None:
        """Convert the learning setting (few-shot, zero-shot or full data) and the calibration."""
        setting = str(self.take("learning_setting", "full")).replace("-", "_")
        self.take("few_shot.few_shot_sampling")
        shots = self.take("sampling_from_train.num_examples_per_label", 10)
        seeds = self.take("sampling_from_train.seed", [123])
        seeds = list(seeds) if isinstance(seeds, list) else [seeds]
        total = self.take("sampling_from_train.num_examples_total")
        if setting == "few_shot":
            self.put("data.shots", int(shots))
            if self.out.task == "prompt-generate":
                self.miss(
                    "sampling_from_train", f"data.shots={shots} counts all examples in bmforge"
                )
            self.put("data.seed", int(seeds[0]))
            self.put("data.seeds", len(seeds))
            if seeds != list(range(seeds[0], seeds[0] + len(seeds))):
                first, last = seeds[0], seeds[0] + len(seeds) - 1
                self.miss("sampling_from_train.seed", f"{seeds}: a run uses {first} to {last}")
            if total is not None:
                self.miss(
                    "sampling_from_train.num_examples_total", "data.shots counts examples per label"
                )
        elif setting == "zero_shot" and self.out.task == "prompt-classify":
            self.put("zero_shot", True)
        elif setting != "full":
            self.miss(
                "learning_setting", f"{setting!r} is not supported by a run of {self.out.task}"
            )
        if (kind := self.take("calibrate")) is not None:
            count = self.take("contextualized_calibrate.num_example")
            if kind != "contextualized_calibrate" or count is None:
                self.miss("calibrate", f"{kind!r}: only sampling of training examples is supported")
            else:
                self.put("calibrate", int(count))
            if (split := self.take("contextualized_calibrate.use_split", "train")) != "train":
                self.miss("contextualized_calibrate.use_split", f"{split!r}: train is always used")

    def place_loop(self) -> None:
        """Convert the training length and gradient clipping."""
        clip = float(self.take("train.max_grad_norm", -1.0))
        self.put("train.grad_clip", clip if clip > 0 else "none")
        steps = self.take("train.num_training_steps")
        epochs = self.take("train.num_epochs", 5)
        data = self.out.values["data"]
        data.setdefault("micro_batch_size", 2)
        data.setdefault("grad_accum_steps", 1)
        if steps is None and not self.out.values.get("zero_shot"):
            count = self.count_examples()
            if count is None:
                self.miss(
                    "train.num_epochs",
                    f"{epochs}: the number of examples is not known; pass --steps",
                )
                self.put("train.schedule.warmup_steps", 0)
                return
            rows = data["micro_batch_size"] * data["grad_accum_steps"]
            steps = epochs * math.ceil(count / rows)
        steps = int(steps or 1)
        self.put("train.steps", steps)
        if (warmup := self.out.values["train"]["schedule"]["warmup_steps"]) > steps:
            self.put("train.schedule.warmup_steps", steps)
            self.miss(
                "plm.optimize.scheduler.num_warmup_steps",
                (f"{warmup} is more than the {steps} steps: the learning rate rises until the end"),
            )

    def count_examples(self) -> int | None:
        """Return the number of training examples; None if it is not known."""
        data = self.out.values["data"]
        task = TASKS.get(data.get("task", ""))
        if task is not None and data.get("shots") and task.label_names:
            return int(data["shots"]) * len(task.label_names)
        if task is None or "paths" not in data:
            return None
        try:
            return len(read_task(task.name, data["paths"][0], "train"))
        except BmforgeError:
            return None

    def place_rest(self) -> None:
        """Record the remaining keys, each with the reason why it has no equivalent."""
        for key, value in self.settings.items():
            if value is None:
                continue
            why = _find_reason(key, _KEYS["needless"])
            if why is not None:
                self.out.dropped.append((key, why))
            elif (missing := _find_reason(key, _KEYS["missing"])) is not None:
                self.miss(key, missing)
            elif self.is_other(key.split(".")[0]):
                self.out.dropped.append((key, "the config selects another one"))
            else:
                self.miss(key, "unknown key")

    def is_other(self, block: str) -> bool:
        """Return True for a block of a template, verbalizer or calibration that is not selected."""
        kinds = ("_template", "_verbalizer", "_calibrate")
        return block not in self.chosen and block.endswith(kinds)


def _find_reason(key: str, reasons: Mapping[str, str]) -> str | None:
    """Return the reason listed for a key or its longest prefix; None if there is none."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        if (why := reasons.get(".".join(parts[:count]))) is not None:
            return why or "it needs no setting"
    return None


def _are_texts(words: Any) -> bool:
    """Return True if all leaves of a list or table of words are strings."""
    if isinstance(words, dict):
        return all(map(_are_texts, (*words, *words.values())))
    return all(map(_are_texts, words)) if isinstance(words, list) else isinstance(words, str)


def _read(key: str, value: Any, kind: type) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}={value!r} must be of type {kind.__name__}.") from error
