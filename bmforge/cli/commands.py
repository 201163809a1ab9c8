"""The commands: options are the fields of config dataclasses, so `--help` tells the truth."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from bmforge.cli.dry_run import launched_processes, parse_world, show_dry_run
from bmforge.cli.train_help import describe_run, list_tasks
from bmforge.compat.cpm_pretrain.ds_config import apply_ds_config
from bmforge.config import dump_toml
from bmforge.data import PrepareConfig, prepare
from bmforge.errors import ConfigError
from bmforge.infer.openbmb.chat import ChatConfig
from bmforge.logging import get_logger
from bmforge.recipes import QuickstartConfig, find_recipe, quickstart
from bmforge.recipes.registry import Recipe, read_config
from bmforge.recipes.start import read_changes, record_given, settle_model
from bmforge.train import write_report

__all__ = ["COMMANDS"]

Inputs = Annotated[tuple[str, ...], tyro.conf.Positional]

# Traced by --profile.
_PROFILED_STEPS = 3


def _parse(
    kind: Any, arguments: Sequence[str], command: str, default: Any = None, about: str | None = None
) -> Any:
    """Turn arguments into a dataclass; a wrong one is explained and ends the program with 2."""
    return tyro.cli(
        kind,
        args=list(arguments),
        prog=f"bmforge {command}",
        description=about,
        default=default if default is not None else tyro.MISSING_NONPROP,
        config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
    )


def run_quickstart(arguments: Sequence[str]) -> None:
    """Real text in, a trained model out."""
    report = quickstart(_parse(QuickstartConfig, _bare_flags(arguments, "fresh"), "quickstart"))
    get_logger().info("done: open %s", report)


@dataclass(kw_only=True)
class PrepareCommand:
    """Prepare text for training.

    Args:
        input: files (.txt .md .jsonl, also .gz .zst) or directories; none takes Python's help
            texts.
        out: directory to write.
        overwrite: replace what an earlier preparation wrote there.
        config: how.
    """

    input: Inputs = ()
    out: Path
    overwrite: bool = False
    config: Annotated[PrepareConfig, tyro.conf.arg(name="")] = field(default_factory=PrepareConfig)


def run_prepare(arguments: Sequence[str]) -> None:
    """Text files to a token store and a tokenizer."""
    flags = _bare_flags(arguments, "overwrite", "skip-bad")
    command = _parse(PrepareCommand, flags, "prepare")
    report = prepare(
        list(command.input) or None, command.out, command.config, overwrite=command.overwrite
    )
    get_logger().info(
        "%s %s: %d documents, %d duplicates, %d bad entries skipped, %d + %d tokens, vocabulary %d",
        "already prepared:" if report.reused else "prepared",
        command.out,
        report.documents,
        report.duplicates,
        report.skipped,
        report.train.tokens,
        report.validation.tokens,
        report.vocab_size,
    )


def run_train(arguments: Sequence[str]) -> None:
    """Run a recipe, or go on with it."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(list_tasks())
        return
    flags = ("print-config", "dry-run", "profile", "new-head", "freeze-base")
    rest = _bare_flags(arguments[1:], *flags)
    file = _take_option(rest, "--config")
    model = _take_option(rest, "--model")
    recipe = find_recipe(arguments[0], model, _see_option(rest, "--init-from"), file)
    show = _take_option(rest, "--print-config")
    traces = _take_option(rest, "--profile")
    old_file = _take_option(rest, "--ds-config")
    plans = _take_option(rest, "--layout")
    tries, world = _take_option(rest, "--dry-run"), _take_option(rest, "--world")
    changes = _take_option(rest, "--changes")
    command = f"train {arguments[0]}" + ("" if model is None else f" --model {model}")
    default = read_config(recipe, file)
    # What follows from other fields (heads from widths) is left to follow from the changed ones.
    default.model = default.model.with_implied()
    config = _parse_run(recipe, rest, command, default)
    config = record_given(config, file, rest)
    if changes is not None:
        config.changes = read_changes(changes)
    if show == "True" or tries == "True" or plans is not None:
        config = settle_model(config)
    if traces == "True" and not config.train.profile_steps:
        config.train = dataclasses.replace(config.train, profile_steps=_PROFILED_STEPS)
    if old_file is not None:
        size = parse_world(world) if tries == "True" else launched_processes()
        config = apply_ds_config(config, old_file, size)
    if plans is not None:
        config = _choose_layout(config, plans, parse_world(world) if tries == "True" else None)
    if show == "True":
        print(dump_toml(config), end="")
        return
    if tries == "True":
        print(show_dry_run(config, parse_world(world)))
        return
    if world is not None:
        raise ConfigError("--world has no effect without --dry-run; torchrun starts processes.")
    recipe.run(config)


def _parse_run(recipe: Recipe, arguments: Sequence[str], command: str, default: Any) -> Any:
    """Set a run's fields; changes of models, which are no plain fields, stay what they were."""
    run, model = default.changes, default.model.changes
    default.changes, default.model.changes = (), ()
    config = _parse(recipe.config, arguments, command, default, describe_run(recipe))
    config.changes, config.model.changes = run, model
    return config


def _choose_layout(config: Any, word: str, world: int | None) -> Any:
    """Lay a run out as the planner says: on the launched processes, in a dry run on `world`."""
    from bmforge.cli.auto_layout import apply_auto_layout

    if word != "auto":
        raise ConfigError(
            f"--layout {word!r} must be auto; set its fields by name, such as --layout.zero 3."
        )
    return apply_auto_layout(config, world or launched_processes(), joins=world is None)


@dataclass(kw_only=True)
class GenerateCommand:
    """Continue a text, or fill the answers of documents.

    Args:
        model: directory or hub id of a model with its tokenizer.
        prompt: the text; none reads standard input.
        document: of a CPM-Bee: a file with one document a line, {"input": "...", "<ans>": ""}; they
            are printed with their answers.
        max_new_tokens: at most so many tokens, in documents per answer.
        num_beams: beam search with so many beams; 1 is greedy; none is 1, of CPM-Ant and CPM-Bee 3.
        do_sample: draw instead of taking the likeliest; none draws of CPM-1.
        temperature: of the drawing; none is 1, of CPM-1 and CPM-Ant 0.9.
        top_k: draw among the k likeliest.
        top_p: draw among the likeliest that make up this probability; none is 1, of CPM-Ant 0.9.
        repetition_penalty: above 1, what was written becomes less likely.
        seed: of the drawing.
    """

    model: Annotated[str, tyro.conf.Positional]
    prompt: str | None = None
    document: Path | None = None
    max_new_tokens: int = 100
    num_beams: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return what `write_text` and `fill_documents` are told, but what is left to them."""
        names = ("max_new_tokens", "num_beams", "do_sample", "temperature", "top_k", "top_p")
        given = {name: getattr(self, name) for name in (*names, "repetition_penalty")}
        return {name: value for name, value in given.items() if value is not None}


def run_generate(arguments: Sequence[str]) -> None:
    """Continue a text with a model."""
    from bmforge.infer.openbmb.texts import write_text
    from bmforge.models import AutoModel
    from bmforge.models.hub import find_model
    from bmforge.tokenizers import AutoTokenizer

    command = _parse(GenerateCommand, _bare_flags(arguments, "do-sample"), "generate")
    if command.document is not None:
        from bmforge.cli.documents import print_filled

        if command.prompt is not None:
            raise ConfigError("give --prompt or --document, not both.")
        torch.manual_seed(command.seed)
        print_filled(command.model, command.document, **command.options())
        return
    directory = find_model(command.model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory)
    prompt = command.prompt if command.prompt is not None else sys.stdin.read()
    torch.manual_seed(command.seed)
    print(write_text(model, tokenizer, prompt, **command.options()))


@dataclass(kw_only=True)
class ChatCommand:
    """Talk to an EVA: a line in, an answer out; `/clear` forgets what was said, `/exit` ends.

    Args:
        model: directory, hub id or short name of an EVA with its tokenizer.
        config: how it answers.
    """

    model: Annotated[str, tyro.conf.Positional]
    config: Annotated[ChatConfig, tyro.conf.arg(name="")] = field(default_factory=ChatConfig)


def run_chat(arguments: Sequence[str]) -> None:
    """Talk to a model in the terminal."""
    from bmforge.cli.chat import talk

    command = _parse(ChatCommand, arguments, "chat")
    talk(command.model, command.config)


@dataclass(kw_only=True)
class ConvertCommand:
    """Write a checkpoint in Hugging Face's form.

    Args:
        source: directory, hub id or short name: a Hugging Face model, or ModelCenter's
            pytorch_model.pt with its config.json, or Megatron's shards (CPM-1, CPM-2, EVA).
        target: directory to make.
        dtype: of the weights; none keeps the file's.
        max_file_gb: size (1e9 bytes) above which the weights are divided over several files.
        family: of a ModelCenter checkpoint, where its tensors do not tell.
        allow_unknown: config fields to accept unread.
        preset: which model Megatron's shards are, where their sizes do not tell.
        megatron_degree: write so many of Megatron's shards instead.
    """

    source: Annotated[str, tyro.conf.Positional]
    target: Annotated[Path, tyro.conf.Positional]
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    max_file_gb: float = 4.0
    family: str | None = None
    allow_unknown: tuple[str, ...] = ()
    preset: str | None = None
    megatron_degree: int | None = None


def run_convert(arguments: Sequence[str]) -> None:
    """Read any checkpoint, write Hugging Face's form."""
    from bmforge.device import parse_dtype
    from bmforge.models.formats.convert import convert_checkpoint

    command = _parse(ConvertCommand, arguments, "convert")
    if command.max_file_gb <= 0:
        raise ConfigError(f"max_file_gb={command.max_file_gb} must be positive.")
    convert_checkpoint(
        command.source,
        command.target,
        dtype=None if command.dtype is None else parse_dtype(command.dtype),
        max_file_bytes=int(command.max_file_gb * 1e9),
        family=command.family,
        allow_unknown=command.allow_unknown,
        preset=command.preset,
        megatron_degree=command.megatron_degree,
    )


@dataclass(kw_only=True)
class ReportCommand:
    """Draw a run's report.

    Args:
        run: the run's directory.
    """

    run: Annotated[Path, tyro.conf.Positional]


def run_report(arguments: Sequence[str]) -> None:
    """Draw a run: curves, config, samples on one page."""
    get_logger().info("%s", write_report(_parse(ReportCommand, arguments, "report").run))


@dataclass(kw_only=True)
class InfoCommand:
    """Describe a model.

    Args:
        name: a preset's name or a model's directory.
        seq_len: length of the rows for the FLOPs of attention; none takes the longest context.
    """

    name: Annotated[str, tyro.conf.Positional]
    seq_len: int | None = None


def run_info(arguments: Sequence[str]) -> None:
    """Parameters, FLOPs and cache size of a model."""
    from bmforge.cli.info import describe_model

    command = _parse(InfoCommand, arguments, "info")
    print(describe_model(command.name, command.seq_len))


def run_plan(arguments: Sequence[str]) -> None:
    """Which layouts of a model fit on which machines, how fast, and for how much."""
    from bmforge.cli.plan import PlanCommand, run_plan_command

    run_plan_command(_parse(PlanCommand, _bare_flags(arguments, "compile"), "plan"))


def _bare_flags(arguments: Sequence[str], *names: str) -> list[str]:
    """Let ``--flag`` stand for ``--flag True`` for the named switches."""
    known = {f"--{n}" for n in names} | {f"--{n.replace('-', '_')}" for n in names}
    out: list[str] = []
    for index, argument in enumerate(arguments):
        out.append(argument)
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument in known and following not in ("True", "False"):
            out.append("True")
    return out


def _see_option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option that stays among the arguments."""
    spelt = [a.replace("_", "-") if a.startswith("--init_from") else a for a in arguments]
    return _take_option(spelt, name)


def _take_option(arguments: list[str], name: str) -> str | None:
    """Remove ``name VALUE`` or ``name=VALUE`` from the arguments and return the value."""
    for index, argument in enumerate(arguments):
        if argument == name:
            if index + 1 == len(arguments):
                raise ConfigError(f"{name} needs a value.")
            value = arguments[index + 1]
            del arguments[index : index + 2]
            return value
        if argument.startswith(f"{name}="):
            del arguments[index]
            return argument.partition("=")[2]
    return None


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "quickstart": (run_quickstart, "train a small model on real text, from nothing, in minutes"),
    "prepare": (run_prepare, "text files to a token store and a tokenizer"),
    "train": (run_train, "train a model for a task, or go on with it"),
    "generate": (run_generate, "continue a text with a model"),
    "chat": (run_chat, "talk to an EVA in the terminal"),
    "convert": (run_convert, "write any checkpoint, ModelCenter's too, in Hugging Face's form"),
    "report": (run_report, "draw a run on one page"),
    "plan": (run_plan, "which layouts of a model fit on which machines, how fast, for how much"),
    "info": (run_info, "parameters, FLOPs and cache size of a preset or a model"),
}
