"""Table of all commands: the description, options and function of each.

Printing the help and checking the arguments import only the options. The function, and with it
torch, is imported when the command runs.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmforge.cli import (
    compress_options,
    data_options,
    options,
    parse,
    plan_options,
    prompt_options,
    serve_options,
    tree_options,
)
from bmforge.interrupts import before_output
from bmforge.logging import log_loading
from bmforge.model_names import check_model_path
from bmforge.settings import QuickstartConfig

__all__ = ["COMMANDS", "Command", "run_command"]


@dataclass(frozen=True)
class Command:
    """A command of `bmforge`.

    Args:
        about: description in the list of commands.
        run: ``module:function`` below `bmforge.cli`, called with the options.
        options: dataclass of the options; None passes the arguments to `run` unparsed.
    """

    about: str
    run: str
    options: type[Any] | None = None


# Command -> dict from vLLM's name of an option to the option of bmforge.
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "generate": {"--max-tokens": "--max-new-tokens"},
    "chat": {"--max-tokens": "--max-new-tokens"},
    "serve": {"--max-model-len": "--context"},
}

# Fields of the options that name a model; a path that does not exist is reported at once.
_MODEL_ARGUMENTS = ("model", "source", "adapter", "base")

COMMANDS: Mapping[str, Command] = {
    "quickstart": Command(
        "train a small model on real text in minutes",
        "runs:run_quickstart",
        QuickstartConfig,
    ),
    "prepare": Command(
        "convert text files to a token store and a tokenizer",
        "prepare:run_prepare",
        data_options.PrepareCommand,
    ),
    "data": Command(
        "collect web pages; show statistics, samples and dropped documents of a corpus",
        "data:run_data",
    ),
    "train": Command("train a model for a task, or resume a run", "train:run_train"),
    "evaluate": Command("evaluate a model on texts and tasks", "evaluate:run_evaluate"),
    "generate": Command(
        "continue a text with a model", "generate:run_generate", options.GenerateCommand
    ),
    "chat": Command("chat with a model in the terminal", "chat:run_chat", options.ChatCommand),
    "serve": Command(
        "serve a model over HTTP, with OpenAI's API and a chat page",
        "serve:run_serve",
        serve_options.ServeCommand,
    ),
    "convert": Command(
        "convert a checkpoint to the Hugging Face format or to GGUF",
        "convert:run_convert",
        options.ConvertCommand,
    ),
    "quantize": Command(
        "quantize a model to int8 or int4 weights",
        "quantize:run_quantize",
        options.QuantizeCommand,
    ),
    "merge": Command(
        "merge an adapter into its base model", "merge:run_merge", options.MergeCommand
    ),
    "compress": Command(
        "distill, prune and quantize a model by a recipe",
        "compress:run_compress_command",
        compress_options.CompressCommand,
    ),
    "doctor": Command(
        "show versions, device, memory and missing extras of this installation",
        "doctor:run_doctor",
        options.DoctorCommand,
    ),
    "completion": Command(
        "print a completion script for bash, zsh or fish",
        "completion:run_completion",
        options.CompletionCommand,
    ),
    "migrate": Command(
        "convert scripts and configs of CPM-Pretrain and OpenPrompt to a run config",
        "migrate:run_migrate",
        options.MigrateCommand,
    ),
    "report": Command("write the HTML report of a run", "runs:run_report", options.ReportCommand),
    "prompt": Command(
        "show the prompts that a template produces for examples",
        "prompt:run_prompt",
        prompt_options.PromptCommand,
    ),
    "plan": Command(
        "predict memory, time and cost of training a model on GPUs",
        "plan:run_plan_command",
        plan_options.PlanCommand,
    ),
    "info": Command(
        "show parameters, FLOPs and KV cache size of a preset or a model",
        "info:run_info",
        options.InfoCommand,
    ),
    "tree": Command(
        "show a model's modules as a tree, with shapes and adapters",
        "tree:run_tree",
        tree_options.TreeCommand,
    ),
}


# Commands that import torch for work that takes long. `train` and `evaluate` check their own
# arguments first.
_IMPORT_TORCH = (
    "quickstart",
    "generate",
    "chat",
    "serve",
    "convert",
    "quantize",
    "merge",
    "compress",
)


def run_command(name: str, arguments: Sequence[str]) -> None:
    """Run a command with its arguments."""
    command = COMMANDS[name]
    parsed: Any = arguments
    with before_output():
        if command.options is not None:
            spelled = _spell_aliases(_ALIASES.get(name, {}), _place_target(command, arguments))
            parsed = parse.parse_options(command.options, spelled, name)
        for field in _MODEL_ARGUMENTS:
            if isinstance(value := getattr(parsed, field, None), str):
                check_model_path(value)
        if name in _IMPORT_TORCH:
            log_loading()
        module, _, function = command.run.partition(":")
        run = getattr(importlib.import_module(f"bmforge.cli.{module}"), function)
    run(parsed)


def _spell_aliases(aliases: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Replace aliases of options with the options' names."""
    parts = [argument.partition("=") for argument in arguments]
    return [
        aliases.get(name.replace("_", "-"), name) + equals + value for name, equals, value in parts
    ]


def _place_target(command: Command, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``--out DIR`` converted to the positional target.

    `bmforge merge` writes to ``--out``, so commands with a positional target accept this option
    too.
    """
    remaining = list(arguments)
    names = [field.name for field in dataclasses.fields(command.options or Command)]
    target = parse.take_option(remaining, "--out") if "target" in names else None
    if target is not None:
        begins_with_source = remaining and not remaining[0].startswith("-")
        remaining.insert(1 if begins_with_source else len(remaining), target)
    return remaining
