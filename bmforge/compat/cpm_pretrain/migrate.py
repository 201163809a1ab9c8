"""Converts CPM-Pretrain's start scripts and command lines to configs of `bmforge train`.

Start at `migrate_text`. `arguments.py` documents the mapping, this file computes it. Arguments
without an equivalent are listed, never dropped silently.
Source: ``megatron/arguments.py`` of TsinghuaAI/CPM-1-Pretrain for the defaults.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bmforge.compat.cpm_pretrain.arguments import (
    ARGUMENTS,
    DEFAULTS,
    SWITCHES,
    Migrated,
    split_words,
)
from bmforge.compat.cpm_pretrain.finetune import PROGRAMS, UNSUPPORTED, place_finetune
from bmforge.compat.cpm_pretrain.shell import Script, read_script
from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.recipes.registry import RECIPES

__all__ = ["migrate_text", "place_arguments"]

_PROGRAMS = {"pretrain_gpt2.py": "gpt2-pretrain", "pretrain_t5.py": "t5-pretrain"}
_TABLE = {name: entry for group in ARGUMENTS.values() for name, entry in group.items()}
_LAUNCHERS = ("--num_gpus", "--nproc_per_node", "--nproc-per-node")


def migrate_text(text: str) -> Migrated:
    """Convert a start script or a command line to a config of `bmforge train`.

    Args:
        text: a start script of CPM-1-Pretrain, CPM-1-Finetune or CPM-2-Pretrain, or a command
            with one of their programs. Nothing in it is executed.

    Raises:
        ConfigError: the text starts none of these programs, or a value has the wrong type.
    """
    script = read_script(text)
    lines = [*script.variables.values(), *script.commands]
    programs = {**_PROGRAMS, **PROGRAMS}
    starts = [line for line in lines if any(program in line for program in programs)]
    for program in UNSUPPORTED:
        if not starts and any(program in line for line in lines):
            raise ConfigError(
                f"{program} cannot be converted, because bmforge has no recipe for it. Use "
                f"{UNSUPPORTED[program]}."
            )
    if not starts:
        raise ConfigError(
            f"the script does not start a supported program ({', '.join(programs)}). Use a "
            "start script of CPM-Pretrain or CPM-Finetune, or one of its command lines."
        )
    words = shlex.split(starts[-1].replace("\x00", " "))
    at = next(n for n, word in enumerate(words) if Path(word).name in programs)
    program = Path(words[at]).name
    task = programs[program]
    if program in PROGRAMS:
        out = place_finetune(program, words[at + 1 :])
        tp = out.values.get("layout", {}).get("tp", 1)
        out.command = _command(words[:at], script, task, str(tp))
        config_from_dict(RECIPES[task].config, out.values)
        return out
    out = Migrated(task)
    out.unplaced += [(f"line {n}", f"{part!r} was not understood") for n, part in script.unread]
    places = _Places(task, out, split_words(words[at + 1 :], _TABLE, SWITCHES, out))
    places.fill()
    count = places.number("--model-parallel-size") * places.stages
    out.command = _command(words[:at], script, task, str(count))
    ds_config = places.arguments.get("--deepspeed_config")
    if ds_config and places.stages > 1:  # CPM-Pretrain read the file for pipelines only
        out.command += f" --ds-config {shlex.quote(ds_config)}"
    config_from_dict(RECIPES[task].config, out.values)  # check that the converted fields exist
    return out


def place_arguments(task: str, arguments: Mapping[str, Any]) -> Migrated:
    """Convert arguments to a config of `bmforge train`.

    Args:
        task: name of the recipe.
        arguments: dict from argument name to value; True for arguments without a value.
    """
    out = Migrated(task)
    _Places(task, out, dict(arguments)).fill()
    return out


def _command(launcher: Sequence[str], script: Script, task: str, least: str) -> str:
    """Return the `torchrun` command, with `least` processes if the script sets no number."""
    variables = script.variables
    count = variables.get("GPUS_PER_NODE", "")
    for number, word in enumerate(launcher):
        name, _, value = word.partition("=")
        if name in _LAUNCHERS:
            count = value or launcher[number + 1]
    parts = ["torchrun", "--nproc-per-node", count or least]
    if variables.get("NNODES", "1") != "1":
        parts += ["--nnodes", variables["NNODES"], "--node-rank", variables.get("NODE_RANK", "0")]
        parts += ["--master-addr", variables.get("MASTER_ADDR", "localhost")]
        parts += ["--master-port", variables.get("MASTER_PORT", "29500")]
    parts += ["-m", "bmforge", "train", task, "--config", "{config}"]
    return shlex.join(parts).replace("'{config}'", "{config}")


class _Places:
    """Converts CPM-Pretrain's arguments to config fields.

    Args:
        task: name of the recipe.
        out: result that receives the config fields and the arguments without an equivalent.
        arguments: dict from argument name to value.
    """

    def __init__(self, task: str, out: Migrated, arguments: dict[str, Any]) -> None:
        self.is_t5, self.out, self.arguments = task == "t5-pretrain", out, arguments
        self.stages = max(1, self.number("--pipe-parallel-size"))

    def number(self, name: str) -> Any:
        """Return an argument's value, or CPM-Pretrain's default; None if there is neither.

        Raises:
            ConfigError: the value has the wrong type.
        """
        value = self.arguments.get(name, DEFAULTS.get(name))
        return None if value is None else _TABLE[name].read(name, value)

    def fill(self) -> None:
        """Convert all arguments, and list those without an equivalent."""
        for name, entry in _TABLE.items():
            value = self.number(name) if entry.converts == "alone" else None
            if name in self.arguments and entry.value is not None:
                value = entry.value
            if value is not None and self._is_supported(name):
                self.out.put(entry.fields[0], value)
        self.out.put("layout.pp", self.stages)
        self._place_model()
        self._place_schedule()
        self._place_precision()
        self._place_data()
        self._place_saving()
        for name in self.arguments:
            entry = _TABLE[name]
            is_placed = entry.converts or entry.value is not None
            if is_placed or (name == "--deepspeed_config" and self.stages > 1):
                continue
            self.out.dropped.append((name, entry.note or f"see {', '.join(entry.fields)}"))

    def _is_supported(self, name: str) -> bool:
        """Return True if the recipe supports the argument.

        Otherwise an argument that the script sets is added to the list of unsupported arguments.
        """
        only = _TABLE[name].only
        if not only or (only == "t5") is self.is_t5:
            return True
        if name in self.arguments:
            self.say(name, f"only {only}-pretrain supports this argument")
        return False

    def say(self, name: str, why: str) -> None:
        """Add an argument that has no equivalent to `Migrated.unplaced`, with the reason."""
        value = self.arguments.get(name, True)
        self.out.unplaced.append((name if value is True else f"{name} {value}", why))

    def _place_model(self) -> None:
        width = self.number("--kv-hidden-size")
        heads, hidden = (self.number(n) for n in ("--num-attention-heads", "--hidden-size"))
        if width is not None and (self.is_t5 or width * (heads or 0) != hidden):
            self.out.put("model.head_dim", width)
        if self.is_t5:
            if self.number("--attention-dropout") != self.number("--hidden-dropout"):
                self.say("--attention-dropout", "T5 has a single dropout, model.dropout")
            if "--hidden-bias" in self.arguments:
                self.say("--hidden-bias", "a T5 has no biases")
        else:
            self.out.put("model.attn_dropout", self.number("--attention-dropout"))
            self.out.put("model.bias", "--hidden-bias" in self.arguments)
            if "--openai-gelu" in self.arguments:
                self.out.put("model.activation", "gelu_new")
        for name in ("--num-unique-layers", "--apply-residual-connection-post-layernorm"):
            if name in self.arguments:
                self.say(name, _TABLE[name].note)
        if self.number("--zero-stage") is not None:
            self.out.put("layout.zero", {1: 2}.get(stage := self.number("--zero-stage"), stage))
        names = {"--partition-activations", "--distribute-checkpointed-activations"}
        if names & self.arguments.keys() and self.number("--model-parallel-size") > 1:
            self.out.put("layout.sequence_parallel", True)

    def _place_schedule(self) -> None:
        steps = self.number("--train-iters")
        total = self.number("--lr-decay-iters") or steps
        kind, lr = self.number("--lr-decay-style"), self.number("--lr")
        ratio = self.number("--min-lr") / lr if lr else 0.0
        self.out.put("train.schedule.kind", kind)
        if total:
            self.out.put("train.schedule.warmup_steps", int(self.number("--warmup") * total))
        if kind == "constant":
            return
        if kind == "exponential" and not ratio:
            self.say("--lr-decay-style", "bmforge decays to min_lr_ratio, which must be above 0")
        self.out.put("train.schedule.min_lr_ratio", round(ratio, 7))
        if total and total != steps:
            self.out.put("train.schedule.total_steps", total)

    def _place_precision(self) -> None:
        clip = self.number("--clip-grad")
        if clip == 0:
            self.say("--clip-grad", "leave train.grad_clip out of the command and set it to None")
        elif clip is not None:
            self.out.put("train.grad_clip", clip)
        self.out.put("train.optim.betas", [self.number(f"--adam-beta{n}") for n in (1, 2)])
        seed = self.number("--seed")
        for path in ("seed", "data.seed", "train.seed"):
            self.out.put(path, seed)
        if "--fp16" not in self.arguments:
            self.out.values.pop("loss_scale", None)
            return
        self.out.put("train.precision", "fp16")
        if self.out.values.get("loss_scale", {}).get("fixed"):
            self.out.values["loss_scale"] = {"fixed": self.number("--loss-scale")}
        else:
            self.out.values.get("loss_scale", {}).pop("fixed", None)
            window = int(self.number("--loss-scale-window"))
            self.out.put("loss_scale.growth_interval_steps", window)
            # Initial value of the original, which is halved at the first overflow.
            self.out.put("loss_scale.init_scale", 2.0**32)

    def _place_data(self) -> None:
        if path := self.arguments.get("--data-path"):
            self.out.put("data.paths", [path])
        self.out.put("data.split", [float(n) for n in self.number("--split").split(",")])
        if "--num-workers" in self.arguments:
            self.out.dropped.append(("--num-workers", "one thread reads ahead"))
        vocabulary = self.arguments.get("--vocab-file")
        if vocabulary:
            path = Path(vocabulary)
            self.out.put("data.tokenizer", str(path.parent if path.suffix else path))
        count = _count_tokens(vocabulary)
        if count is None:
            self.say("--vocab-file", "its vocabulary size is unknown: set model.vocab_size")
            return
        step = self.number("--make-vocab-size-divisible-by")
        step *= self.number("--model-parallel-size")
        self.out.put("model.vocab_size", -(-count // step) * step)

    def _place_saving(self) -> None:
        load = self.arguments.get("--load")
        if load and load == self.arguments.get("--save"):
            self.out.dropped.append((f"--load {load}", "runs resume automatically"))
        elif load:
            why = "bmforge convert reads Megatron shards of CPM-1, CPM-2 and EVA, and init_from its"
            self.say("--load", f"checkpoints of DeepSpeed cannot be read: {why} results")
        for name in ("--finetune", "--no-load-optim", "--no-load-rng", "--no-save-optim"):
            if name in self.arguments:
                self.out.dropped.append((name, _TABLE[name].note or "see init_from"))
        if "--profile-backward" in self.arguments:
            self.out.dropped.append(("--profile-backward", "see train.profile_steps"))


def _count_tokens(path: str | None) -> int | None:
    """Count the tokens in a vocabulary file; None if there is no such file."""
    if not path:
        return None
    source = Path(path)
    names = ("vocab.json", "vocab.txt")
    for file in [source] if source.is_file() else [source / name for name in names]:
        if file.is_file() and file.suffix == ".json":
            try:
                return len(json.loads(file.read_text(encoding="utf-8")))
            except ValueError:
                return None
        if file.is_file() and file.suffix == ".txt":
            return sum(bool(line.strip()) for line in file.open(encoding="utf-8"))
    return None
