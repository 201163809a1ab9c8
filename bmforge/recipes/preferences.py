"""Preference optimization (`bmforge train preferences`): DPO, SimPO, ORPO, CPO, KTO, ...

Answers are rendered and tokenized as in `bmforge train conversations`. The reference is the model
with its adapter off, a frozen copy, or log-probabilities that are computed before training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bmforge.align.kept_reference import keep_reference_
from bmforge.align.losses import METHODS, MethodOptions
from bmforge.align.preferences import PairObjective, UnpairedObjective
from bmforge.align.reference import adapter_off
from bmforge.data.sources.preferences import PreferenceExample, read_preferences
from bmforge.errors import ConfigError, DataError, suggest
from bmforge.parallel import World
from bmforge.recipes.inputs.document_segments import find_tokenizer, open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig, open_examples
from bmforge.recipes.inputs.preference_rows import (
    EncodedPair,
    MarkedAnswers,
    PreferencePairs,
    encode_preference,
)
from bmforge.recipes.inputs.splitting import refuse_split
from bmforge.recipes.prefix_sharing import check_prefix_sharing, check_shared_width
from bmforge.recipes.reference_model import (
    ReferenceDtype,
    check_reference_copy,
    open_reference_copy,
)
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.sft import read_template
from bmforge.recipes.start import traits_of
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.train import OptimConfig, TrainConfig
from bmforge.value_ranges import check_values

__all__ = [
    "PairData",
    "PreferencesConfig",
    "ReferenceKind",
    "encode_files",
    "open_template",
    "reference_kind",
    "train_preferences",
]

ReferenceKind = Literal["adapter", "copy", "precomputed"]


@dataclass(kw_only=True)
class PairData(ExampleConfig):
    """Preference data options of a run; the other fields are those of `ExampleConfig`.

    Args:
        global_batch_size, micro_batch_size: number of pairs (two sequences each) instead of
            sequences.
        ignore: fields of the records to ignore; any other field that the chat template does not
            read is an error.
        prefix_sharing: put both answers of a pair into one sequence after a single copy of their
            prompt, so that the prompt is computed once; loss and gradients stay the same. For pairs
            in `train preferences` only.
    """

    seq_len: int = 1024
    micro_batch_size: int = 4
    ignore: tuple[str, ...] = ("id",)
    prefix_sharing: bool = False

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, or an option without effect."""
        super().check()
        refuse_split(self.split)


@dataclass(kw_only=True)
class PreferencesConfig(RunConfig):
    """Config of preference optimization; the other fields are those of `RunConfig`.

    Args:
        data: `paths` are JSON files or tables, or folders of them, with `prompt`,
            `chosen` and `rejected` (texts or messages) or, for kto, `prompt`, `completion` and
            `label`.
        template: chat template: a file, or a name (chatml, llama3, ...) (if None: the tokenizer's,
            or the default one). The template is exported with the model.
        method: training objective: dpo, robust, hinge, ipo, sigmoid_norm, simpo, orpo, cpo or kto.
        beta: coefficient of the preference term (if None: 0.1, or 2 for simpo).
        label_smoothing: assumed fraction of wrong preferences, at least 0 and below 0.5; above 0,
            dpo becomes conservative DPO.
        simpo_gamma: reward margin of simpo between the chosen and the rejected answer (if None:
            0.5).
        nll_weight: weight of the negative log-likelihood per token of the chosen answers; called
            `rpo_alpha` or `cpo_alpha` in TRL (if None: 1 for orpo and cpo, else 0).
        nll_on_prompt: include the tokens of the prompt in the negative log-likelihood, as TRL's
            ORPO does.
        desirable_weight: weight of the desirable answers in the loss of kto (if None: 1).
        undesirable_weight: weight of the undesirable answers in the loss of kto (if None: 1).
        reference: reference model: adapter (the model with its adapter disabled), copy (a frozen
            copy of the initial model) or precomputed (log-probabilities that are computed once
            before training and stored in the run directory) (if None: adapter for a run with an
            adapter, else copy).
        reference_dtype: dtype of the linear layers of the copied reference model: int8 or int4 (if
            None: fp32).
        reference_offload: keep the weights of the copied reference model in host memory, and move
            them to the device only while it scores answers.
    """

    run_dir: Path = Path("runs/preferences")
    data: PairData = field(default_factory=PairData)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            optim=OptimConfig(lr=1e-6, weight_decay=0.0), disable_dropout=True
        )
    )
    template: Path | None = None
    method: str = "dpo"
    beta: float | None = None
    label_smoothing: float = 0.0
    simpo_gamma: float | None = None
    nll_weight: float | None = None
    nll_on_prompt: bool = False
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    reference: ReferenceKind | None = None
    reference_dtype: ReferenceDtype | None = None
    reference_offload: bool = False


def train_preferences(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training on preferences.

    Args:
        config: a `PreferencesConfig` whose `model` is a decoder's config.

    Raises:
        ConfigError: an option has no effect with the method.
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, _check, head=traits_of(config.model).generation_head)


def _check(config: Any, processes: int) -> None:
    read_options(config)
    check_reference_copy(config, reference_kind(config) == "copy")
    check_prefix_sharing(config)


def read_options(config: Any) -> MethodOptions:
    """Return the coefficients of a run's method.

    Raises:
        ConfigError: the method is unknown, or a coefficient is out of range or has no effect.
    """
    method = METHODS.get(config.method)
    if method is None:
        raise ConfigError(
            f"unknown method: method={config.method!r} (supported: "
            f"{', '.join(METHODS)}).{suggest(config.method, METHODS)}"
        )
    chosen_options = {
        "label_smoothing": config.label_smoothing or None,
        "nll_weight": config.nll_weight,
        "simpo_gamma": config.simpo_gamma,
        "desirable_weight": config.desirable_weight,
        "undesirable_weight": config.undesirable_weight,
    }
    chosen_options = {name: value for name, value in chosen_options.items() if value is not None}
    for name in chosen_options:
        if name not in method.options:
            raise ConfigError(f"{name} has no effect with method={config.method}. Leave it out.")
    beta = method.beta if config.beta is None else config.beta
    options = MethodOptions(**{"beta": beta, "nll_weight": method.nll_weight, **chosen_options})
    check_values(options)
    if config.nll_on_prompt and not options.nll_weight:
        raise ConfigError("nll_on_prompt has no effect with nll_weight=0. Leave it out.")
    return options


def reference_kind(config: Any) -> ReferenceKind | None:
    """Return the kind of the run's reference model; None for a method without a reference."""
    chosen: ReferenceKind | None = config.reference
    if not METHODS[config.method].needs_reference:
        if chosen is not None:
            raise ConfigError(f"reference has no effect with method={config.method}. Leave it out.")
        return None
    trains_more = bool(config.adapter.modules_to_save)
    if chosen is None:
        return "adapter" if config.adapter.kind is not None and not trains_more else "copy"
    if chosen == "adapter" and (config.adapter.kind is None or trains_more):
        raise ConfigError(
            "reference=adapter disables the adapter to compute the reference, which needs an "
            "adapter (--adapter lora) without adapter.modules_to_save. Use --reference copy."
        )
    return chosen


def open_template(config: Any) -> tuple[Any, ChatTemplate, Any]:
    """Return the tokenizer and chat template of a run, and a function that exports both."""
    tokenizer, folder = open_tokenizer(config), find_tokenizer(config)
    template = ChatTemplate(read_template(config, folder), tokenizer)

    def save(directory: Path) -> None:
        tokenizer.save_pretrained(directory)
        template.save(directory)

    return tokenizer, template, save


def encode_files(
    paths: Sequence[str],
    config: Any,
    tokenizer: Any,
    template: ChatTemplate,
    has_margins: bool = False,
) -> list[EncodedPair]:
    """Read preferences from files and encode them.

    Raises:
        DataError: a record has a margin or scores, but the loss has none (`has_margins`), and
            `data.ignore` does not name them; also for the reasons given in `encode_preference`.
    """
    examples: list[PreferenceExample] = [e for path in paths for e in read_preferences(path)]
    for example in () if has_margins else examples:
        idle = [name for name in example.margin_fields if name not in config.data.ignore]
        if idle:
            raise DataError(
                f"{example.location} has the fields {', '.join(idle)}, which have no effect on "
                "preference optimization; only reward models use margins. Ignore them with "
                f"--data.ignore {' '.join(idle)}."
            )
    return [encode_preference(e, template, tokenizer, config.data.ignore) for e in examples]


def _read_pairs(config: Any) -> tuple[Any, Any, Any]:
    """Read and encode the examples of a run.

    Returns:
        training examples, validation examples (or None), and a function that saves the tokenizer
    """
    data = config.data
    tokenizer, template, save = open_template(config)
    pairs = partial(PreferencePairs, shares_prefix=data.prefix_sharing)
    source: Any = MarkedAnswers if config.method == "kto" else pairs
    learned, held_out = (
        source(encode_files(paths, config, tokenizer, template), data.seq_len) if paths else None
        for paths in (data.paths, data.validation)
    )
    assert learned is not None  # data.check() raises an error for a run without paths
    for each in filter(None, (learned, held_out)):
        check_shared_width(config, each.width)
    return learned, held_out, save


def _open_data(config: Any, rows: World) -> TrainingData:
    data, options, kind = config.data, read_options(config), reference_kind(config)
    learned, held_out, save = _read_pairs(config)
    objective: Any = (
        UnpairedObjective(options)
        if config.method == "kto"
        else PairObjective(config.method, options, nll_on_prompt=config.nll_on_prompt)
    )

    def begin(model: Any) -> None:
        if kind == "adapter":
            objective.reference = adapter_off
        elif kind == "copy":
            objective.reference = open_reference_copy(config, rows)
        elif kind == "precomputed":
            sources = [each for each in (learned, held_out) if each is not None]
            keep_reference_(sources, config.run_dir, data.micro_batch_size, model)

    return dataclasses.replace(
        open_examples(learned, held_out, data, rows, save_tokenizer=save, objective=objective),
        row_tokens=learned.width if data.prefix_sharing else 2 * learned.width,
        begin=begin,
    )
