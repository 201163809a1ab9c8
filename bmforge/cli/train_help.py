"""Help texts of `bmforge train` and its tasks. Nothing heavy is imported here."""

from __future__ import annotations

from bmforge.task_names import ALSO, OLD_NAMES, TASK_NAMES

__all__ = ["SHORT_NAMES", "SWITCHES", "describe_fields", "describe_task", "list_tasks"]

SHORT_NAMES = {
    "--adapter": "--adapter.kind",
    "--data": "--data.paths",
    "--steps": "--train.steps",
    "--lr": "--train.optim.lr",
    "--batch-size": "--data.global-batch-size",
    "--micro-batch-size": "--data.micro-batch-size",
    "--num-generations": "--rollout.num-generations",
    "--max-completion-length": "--rollout.max-new-tokens",
    "--temperature": "--rollout.temperature",
    "--seq-len": "--data.seq-len",
    "--precision": "--train.precision",
}
_CHAT_TASKS = ("conversations", "preferences", "reward", "rl", "distill")
_ROLLOUT_TASKS = ("rl", "distill")
# Group -> its options; the option -> description.
_GROUPS = {
    "model and data": {
        "--model NAME_OR_DIR": "directory or hub id, or a preset or family for random weights",
        "--data PATH ...": "training data: files or directories",
        "--seq-len N": "maximum sequence length in tokens",
        "--template FILE_OR_NAME": "chat template (default: the tokenizer's)",
        "--data.validation PATH ...": "validation data, evaluated at the end",
        "--data.validation-fraction X": "fraction to hold out, instead of --data.validation",
    },
    "training": {
        "--epochs N": "number of epochs (instead of --steps)",
        "--steps N": "total number of optimizer steps",
        "--lr X": "peak learning rate",
        "--train.schedule.kind NAME": "learning-rate schedule: constant, linear, cosine, wsd, ...",
        "--train.schedule.warmup-steps N": "number of steps of linear warm-up",
        "--batch-size N": "global batch size: sequences per optimizer step, over all processes",
        "--micro-batch-size N": "sequences per forward and backward pass of one process",
        "--data.grad-accum-steps N": "gradient accumulation steps (instead of --batch-size)",
    },
    "rollouts": {
        "--num-generations N": "answers per prompt",
        "--max-completion-length N": "maximum length of an answer in tokens",
        "--temperature X": "sampling temperature",
    },
    "adapter (default: the whole model is trained)": {
        "--adapter KIND": "train an adapter, such as lora",
        "--adapter.rank N": "rank of LoRA (default: 8)",
        "--adapter.alpha X": "numerator of LoRA's scale, alpha / rank",
        "--adapter.target-modules NAME ...": "adapted layers (default for lora: all-linear)",
        "--base-dtype TYPE": "dtype of the frozen base model: int4 (QLoRA), int8, bf16",
        "--adapter.merge": "export the merged model instead of the adapter",
    },
    "outputs": {
        "--run-dir DIR": "directory of the run; run the same command again to resume",
        "--train.eval-every-steps N": "also evaluate every N steps during training",
        "--train.save-every-steps N": "save a checkpoint every N steps",
        "--wandb-project NAME": "Weights & Biases project to log metrics to",
        "--push-to-hub ID": "upload the export to this hub repository (private if it is new)",
    },
    "memory and several GPUs (started with torchrun)": {
        "--precision TYPE": "dtype of the computation: fp32, bf16 or fp16",
        "--recompute": "recompute activations in the backward pass: less memory, more time",
        "--layout auto": "let the planner choose the parallel layout",
        "--layout.zero N": "ZeRO: 0 (off), 2 (shard gradients and states), 3 (also parameters)",
        "--layout.tp N": "tensor parallelism over N processes",
        "--layout.pp N": "pipeline parallelism over N processes",
        "--ds-config FILE": "also read settings from a DeepSpeed configuration file",
    },
    "config, checks and profiles": {
        "--config FILE": "TOML file with config fields; options override them",
        "--changes JSON": "changes to the model (pruning, low rank, ...): JSON text or a JSON file",
        "--print-config": "print the whole config as TOML and exit",
        "--dry-run --world N": "make all checks of a run on N processes, print memory, and exit",
        "--profile": "profile steps 4 to 6 and write the traces to RUN_DIR/profile",
    },
}
# Options that only some tasks have.
_ONLY = {
    "--template": _CHAT_TASKS,
    "--data.validation-fraction": ("conversations",),
    **dict.fromkeys(
        ("--num-generations", "--max-completion-length", "--temperature"), _ROLLOUT_TASKS
    ),
}
# Options that some tasks lack; options that are not config fields.
_LACKS = {
    **dict.fromkeys(("--data.validation", "--train.eval-every-steps"), _ROLLOUT_TASKS),
    "--seq-len": ("images",),
}
_NO_FIELDS = (
    *("--model", "--config", "--changes", "--layout", "--ds-config"),
    *("--print-config", "--dry-run", "--world", "--profile"),
)
_SWITCHES = {
    option: about
    for group in _GROUPS.values()
    for option, about in group.items()
    if option.split()[0] in _NO_FIELDS
}
SWITCHES = [*_NO_FIELDS, "--help-all"]


def list_tasks() -> str:
    """Return the output of `bmforge train --help`."""
    tasks = "\n".join(f"  {name:<18}{about}" for name, about in TASK_NAMES.items())
    recipes = "\n".join(f"  {name:<18}{about}" for name, about in OLD_NAMES.items())
    return (
        "usage: bmforge train TASK --model NAME_OR_DIR [--config FILE] [--ds-config FILE] "
        "[--changes JSON] [--layout auto] [--print-config] [--dry-run --world N] [--profile] "
        "[--field.path VALUE ...]\n\n"
        f"{tasks}\n\nold names of tasks with a fixed model:\n{recipes}\n\n"
        "`bmforge train TASK --help` lists the common options, and\n"
        "`bmforge train TASK --model NAME_OR_DIR --help-all` every option with its default."
    )


def describe_task(name: str) -> str:
    """Return the output of `bmforge train TASK --help`, with the most common options."""
    task = ALSO.get(name, name)
    about = TASK_NAMES.get(task) or OLD_NAMES.get(name) or f"fine-tune on {name}"
    groups = [(title, _options_of(task, group)) for title, group in _GROUPS.items()]
    text = "\n\n".join(f"{title}:\n{_rows(options)}" for title, options in groups if options)
    return (
        f"usage: bmforge train {name} --model NAME_OR_DIR --data PATH ... [OPTIONS]\n\n"
        f"{about}\n\n{text}\n\n"
        "Enable a switch with --NAME and disable it with --no-NAME. Every field of the run's\n"
        "config and of the model's config is an option: --help-all lists all fields with their\n"
        "defaults, and --print-config prints their values in this run."
    )


def _options_of(task: str, group: dict[str, str]) -> dict[str, str]:
    """Return the options of a group that a task has."""
    names = {option: option.split()[0] for option in group}
    return {
        option: group[option]
        for option, name in names.items()
        if task in _ONLY.get(name, (task,)) and task not in _LACKS.get(name, ())
    }


def describe_fields(about: str) -> str:
    """Return the introduction to the list of all options of a task."""
    return f"{about}\n\noptions in addition to the fields below:\n{_rows(_SWITCHES)}\n"


def _rows(table: dict[str, str]) -> str:
    width = max(35, *(len(name) + 2 for name in table))
    return "\n".join(f"  {name:<{width}}{about}" for name, about in table.items())
