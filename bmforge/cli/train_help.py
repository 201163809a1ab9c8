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
_COMMON = {
    "--data PATH ...": "training data: files or directories",
    "--run-dir DIR": "directory of the run; run the same command again to resume",
    "--adapter KIND": "train an adapter, such as lora, instead of the whole model",
    "--base-dtype TYPE": "dtype of the frozen base model: int4 (QLoRA), int8, bf16",
    "--epochs N": "number of epochs (instead of --steps)",
    "--push-to-hub ID": "upload the export to this hub repository (private if it is new)",
    "--steps N": "total number of optimizer steps",
    "--lr X": "peak learning rate",
    "--batch-size N": "global batch size: sequences per optimizer step, over all processes",
    "--micro-batch-size N": "sequences per forward and backward pass of one process",
    "--seq-len N": "maximum sequence length in tokens",
    "--precision TYPE": "dtype of the computation: fp32, bf16 or fp16",
    "--recompute": "recompute activations in the backward pass: less memory, more time",
    "--layout.zero N": "ZeRO: 0 (off), 2 (shard gradients and states), 3 (also parameters)",
    "--layout.tp N": "tensor parallelism over N processes",
    "--layout.pp N": "pipeline parallelism over N processes",
}
_SWITCHES = {
    "--model NAME_OR_DIR": "directory or hub id; or preset or family for random initialization",
    "--config FILE": "TOML file with config fields; options override them",
    "--changes JSON": "changes to the model (adapters, pruning, ...), as JSON text or a JSON file",
    "--layout auto": "let the planner choose the parallel layout",
    "--ds-config FILE": "also read settings from a DeepSpeed configuration file",
    "--print-config": "print the whole config as TOML and exit",
    "--dry-run --world N": "print the layout and memory for N processes, check the data, and exit",
    "--profile": "profile steps 4 to 6 and write the traces to RUN_DIR/profile",
}
_ROLLOUT_TASKS = ("rl", "distill")
# Options of a task that are not config fields.
SWITCHES = [
    word for row in (*_SWITCHES, "--help-all") for word in row.split() if word.startswith("--")
]


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
    short_names = {
        short: f"short for {full}"
        for short, full in SHORT_NAMES.items()
        if task in _ROLLOUT_TASKS or not full.startswith("--rollout.")
    }
    about = TASK_NAMES.get(task) or OLD_NAMES.get(name) or f"fine-tune on {name}"
    return (
        f"usage: bmforge train {name} --model NAME_OR_DIR [OPTIONS]\n\n{about}\n\n"
        f"{_rows(_COMMON)}\n\n{_rows(_SWITCHES)}\n\n"
        f"short names of config fields:\n{_rows(short_names)}\n\n"
        "Enable a switch with --NAME and disable it with --no-NAME. Every field of the run's\n"
        "config and of the model's config is an option: --help-all lists all fields with their\n"
        "defaults, and --print-config prints their values in this run."
    )


def describe_fields(about: str) -> str:
    """Return the introduction to the list of all options of a task."""
    return f"{about}\n\noptions in addition to the fields below:\n{_rows(_SWITCHES)}\n"


def _rows(table: dict[str, str]) -> str:
    width = max(22, *(len(name) + 2 for name in table))
    return "\n".join(f"  {name:<{width}}{about}" for name, about in table.items())
