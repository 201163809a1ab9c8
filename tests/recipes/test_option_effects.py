"""Every option of the post-training commands changes the run, is refused by name, or is listed.

A new option fails `test_every_option_is_listed` until it has a value in `VALUES`, with which a tiny
run must differ from the run without it or be refused with the option's name, or a reason in
`WITHOUT_EFFECT` why one tiny run on one process cannot show its effect. The dry run refuses the
same options with the same sentence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_rl_runs import REWARD, write_model

from bmforge.errors import BmforgeError
from bmforge.models.changes import Change
from bmforge.recipes.registry import find_recipe
from bmforge.recipes.run import check_recipe
from bmforge.train import read_metrics

TASKS = ("rl", "distill", "preferences", "reward")
# Option -> value that a run without the option does not have.
VALUES: dict[str, Any] = {
    "new_head": True,
    "changes": (Change("low_rank", "**.q_proj", {"rank": 2}),),
    "adapter.kind": "lora",
    "adapter.target_modules": ("**.q_proj",),
    "adapter.exclude_modules": ("**.q_proj",),
    "adapter.modules_to_save": ("embed",),
    "adapter.rank": 2,
    "adapter.alpha": 2.0,
    "adapter.dropout": 0.1,
    "adapter.use_rslora": True,
    "adapter.use_dora": True,
    "adapter.width": 4,
    "adapter.reduction": 2,
    "adapter.division": 2,
    "adapter.activation": "relu",
    "adapter.scale": 2.0,
    "adapter.length": 2,
    "adapter.inner": 4,
    "adapter.std": 0.1,
    "adapter.lr_ratio": 2.0,
    "adapter.merge": True,
    "base_dtype": "bf16",
    "epochs": 2.0,
    "freeze_base": True,
    "train.steps": 2,
    "train.num_epochs": 2,
    "train.precision": "bf16",
    "train.master_weights": False,
    "train.disable_dropout": False,
    "train.grad_clip": 1e-3,
    "train.eval_every_steps": 1,
    "train.load_best_model_at_end": True,
    "train.early_stopping_patience": 1,
    "train.early_stopping_threshold": 0.1,
    "train.profile_steps": 1,
    "train.optim.name": "sgd",
    "train.optim.lr": 2e-2,
    "train.optim.weight_decay": 0.5,
    "train.optim.eps": 1e-2,
    "train.optim.momentum": 0.5,
    "train.optim.muon_lr": 0.1,
    "train.optim.ns_steps": 3,
    "train.schedule.decay_steps": 1,
    "train.schedule.decay_kind": "linear",
    "layout.tp": 2,
    "layout.pp": 2,
    "layout.cp": 2,
    "layout.ep": 2,
    "layout.dp_replicate": 2,
    "layout.sequence_parallel": True,
    "layout.cp_method": "ring",
    "layout.pp_schedule": "gpipe",
    "layout.pp_stages_per_rank": 2,
    "layout.pp_cut": (1,),
    "layout.pp_balance": "layers",
    "offload.target": "disk",
    "offload.states": "int8",
    "offload.directory": Path("elsewhere"),
    "loss_scale.fixed": 8.0,
    "loss_scale.init_scale": 8.0,
    "loss_scale.growth_interval_steps": 5,
    "loss_scale.min_scale": 2.0,
    "loss_scale.hysteresis": 2,
    "export": False,
    "export_dtype": "bf16",
    "license": "MIT",
    "data.validation": ("HELD_OUT",),
    "data.tokenizer": "no-such-tokenizer",
    "data.seq_len": 3,
    "data.global_batch_size": 4,
    "data.grad_accum_steps": 4,
    "data.split": (9.0, 1.0),
    "data.validation_batches": 1,
    "data.seed": 1,
    "data.prefix_sharing": True,
    "rl.advantage": "mean",
    "rl.ratio": "sequence_sum",
    "rl.normalize": "token",
    "rl.beta": 0.1,
    "rl.kl": "k1",
    "rl.kl_in": "reward",
    "rl.kl_importance": False,
    "rl.correction": "truncate",
    "rl.correction_cap": 3.0,
    "rl.entropy_bonus": 0.1,
    "rl.gamma": 0.9,
    "rl.lam": 0.9,
    "value.init_from": "gpt2",
    "value.lr": 1e-3,
    "value.cliprange": 0.1,
    "rollout.num_generations": 2,
    "rollout.max_new_tokens": 3,
    "rollout.temperature": 0.5,
    "rollout.steps_per_generation": 2,
    "rollout.mask_truncated_completions": True,
    "rollout.overlong_tokens": 2,
    "rollout.tools": ("no_such:function",),
    "rollout.max_turns": 3,
    "rollout.tool_timeout_s": 3.0,
    "rollout.exact_logprobs": True,
    "rollout.log_completions": 0,
    "reward": ("length:1",),
    "step_aggregation": "mean",
    "reward_timeout_s": 0.0,
    "template": Path("chatml"),
    "teacher": None,
    "jsd_beta": 0.5,
    "distill_temperature": 2.0,
    "distill_top_k": 2,
    "beta": 0.5,
    "label_smoothing": 0.1,
    "simpo_gamma": 1.0,
    "nll_weight": 0.5,
    "nll_on_prompt": True,
    "desirable_weight": 2.0,
    "undesirable_weight": 2.0,
    "reference": "adapter",
    "reference_dtype": "int8",
    "reference_offload": True,
    "supervision": "process",
    "step_separator": "\n",
    "center_rewards_coefficient": 0.1,
    # Fields of `model`, which are not listed below.
    "model.head": "token_classification",
    "model.num_labels": 5,
    "model.attn_dropout": 0.2,
}
# Options that would change config.json alone.
REFUSED = {"model.head", "model.num_labels", "model.attn_dropout"}
METHODS = {"rl": "dr_grpo", "preferences": "ipo"}
# Words of the refusal of an option, other than its name.
MESSAGES = {
    **dict.fromkeys((name for name in VALUES if name.startswith("loss_scale.")), "loss_scale has"),
    "supervision": "has no steps with labels",
}
ONE_PROCESS = "changes how several processes divide the work"
FIRST_RATE = "the first step has the same rate; tests/train/test_schedule.py"
FIRST_UPDATE = "the ratio is 1 in the first update; tests/align/test_policy.py"
RESOURCES = "changes memory, time or recorded files, not results"
WITHOUT_EFFECT: dict[str, str] = {
    "run_dir": "the directory of every run below",
    "init_from": "the model of every run below",
    "model_changes": "recorded by the command line",
    "family": "recorded by the command line",
    "data.paths": "the data of every run below",
    "data.ignore": "the records have no field to ignore; tests/data/test_preferences.py",
    "data.micro_batch_size": "results do not depend on micro-batches",
    "method": "see METHODS",
    "seed": "all weights are loaded; initializes new heads and adapters",
    "train.seed": "seed of dropout, which is off",
    "train.optim.betas": "one step has no running averages; tests/train/optim",
    "train.optim.groups": "a list of tables; tests/train/optim",
    **dict.fromkeys(("train.schedule.kind", "train.schedule.warmup_steps"), FIRST_RATE),
    **dict.fromkeys(("train.schedule.min_lr_ratio", "train.schedule.total_steps"), FIRST_RATE),
    "rollout.num_iterations": "needs a second step; tests/align/test_rollouts.py",
    **dict.fromkeys(("rl.clip", "rl.clip_low", "rl.clip_high", "rl.clip_dual"), FIRST_UPDATE),
    "train.spike_sigmas": "needs a history of losses; tests/train",
    "layout.zero": ONE_PROCESS,
    "prefetch": ONE_PROCESS,
    **dict.fromkeys(("offload.fraction", "offload.weights", "offload.activations"), RESOURCES),
    **dict.fromkeys(("offload.gradients", "recompute", "compile", "timeout_s"), RESOURCES),
    **dict.fromkeys(("train.save_every_steps", "train.keep_last"), RESOURCES),
    **dict.fromkeys(("train.keep_every_steps", "train.log_every_steps"), RESOURCES),
    "rollout.max_num_seqs": RESOURCES,
    "push_to_hub": "needs the network",
    "wandb_project": "needs an account",
    "override": "only for a resumed run; tests/recipes/test_refused_reruns.py",
}


DRY_RUN = partial(check_recipe, processes=1)


def find_options(config: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.name != "model":
            yield from find_options(value, f"{prefix}{field.name}.")
        elif field.name != "model":
            yield prefix + field.name


def set_option(config: Any, name: str, value: Any) -> Any:
    first, _, rest = name.partition(".")
    if rest and first == "model":
        return dataclasses.replace(config, model=config.model.replace(**{rest: value}))
    if rest:
        value = set_option(getattr(config, first), rest, value)
    return dataclasses.replace(config, **{first: value})


OPTIONS = {task: [*find_options(find_recipe(task, "llama", None, None).config())] for task in TASKS}


def test_every_option_is_listed() -> None:
    every = {name for names in OPTIONS.values() for name in names}
    model = {name for name in VALUES if name.startswith("model.")}
    assert every == (VALUES.keys() - model) | WITHOUT_EFFECT.keys()
    assert not VALUES.keys() & WITHOUT_EFFECT.keys()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    write_model(folder / "model", intermediate_size=64, attn_dropout=0.3)
    write_model(folder / "teacher", seed=3, hidden_size=16)
    (folder / "mine.py").write_text(REWARD)
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    pairs = [
        {**row, "chosen": row["answer"], "rejected": "abcd"[: 1 + n % 4]}
        for n, row in enumerate(prompts)
    ]
    for row in pairs:
        del row["answer"]
    for name, rows in (("rl", prompts), ("distill", prompts), ("held", pairs[:4])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("preferences", "reward"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


def make_config(place: Path, task: str, run: str) -> Any:
    config = find_recipe(task, str(place / "model"), None, None).config()
    given = {
        "run_dir": place / task / run,
        "train.steps": 1,
        "train.optim.lr": 1e-2,
        "data.paths": (str(place / f"{task}.jsonl"),),
        "data.seq_len": 9,
        "data.global_batch_size": 8,
        "data.micro_batch_size": 4,
    }
    if task in ("rl", "distill"):
        given |= {"rollout.num_generations": 4, "rollout.max_new_tokens": 5}
    if task == "rl":
        given["reward"] = (f"{place / 'mine.py'}:digits",)
    if task == "distill":
        given["teacher"] = str(place / "teacher")
    for name, value in given.items():
        config = set_option(config, name, value)
    return config


def digest_run(place: Path, task: str, config: Any) -> str:
    """Hash of a run's metrics without times, of its answers, and of its export."""
    find_recipe(task, str(place / "model"), None, None).run(config)
    digest = hashlib.sha256()
    for row in read_metrics(config.run_dir / "metrics.jsonl"):
        timeless = {k: v for k, v in row.items() if not any(w in k for w in ("time", "_s", "mem"))}
        digest.update(json.dumps(timeless, sort_keys=True).encode())
    answers = config.run_dir / "completions.jsonl"
    digest.update(answers.read_bytes() if answers.exists() else b"")
    for file in sorted((config.run_dir / "export").glob("*")):
        digest.update(file.name.encode())
        is_kept = file.suffix in (".safetensors", ".json", ".jinja")  # README.md names the run
        digest.update(file.read_bytes() if is_kept else b"")
    digest.update(str(sorted(p.name for p in config.run_dir.iterdir())).encode())
    return digest.hexdigest()


def dry_run(place: Path, task: str, config: Any) -> str:
    """The error of a dry run, which writes nothing; "" without an error."""
    message = ""
    try:
        find_recipe(task, str(place / "model"), None, None).run(config, DRY_RUN)
    except BmforgeError as error:
        message = str(error)
    assert not config.run_dir.exists()
    return message


@pytest.fixture(scope="module")
def plain(place: Path) -> dict[str, str]:
    return {task: digest_run(place, task, make_config(place, task, "plain")) for task in TASKS}


@pytest.mark.parametrize("task", TASKS)
def test_equal_runs_have_equal_digests(task: str, place: Path, plain: dict[str, str]) -> None:
    assert digest_run(place, task, make_config(place, task, "again")) == plain[task]


# `new_head` is on; a classifier has the number of labels that the task sets.
DEFAULTS = {("reward", "new_head")}
CASES = [
    (task, name, value)
    for task in TASKS
    for name, value in {**VALUES, "method": METHODS.get(task)}.items()
    if (name in OPTIONS[task] or name.startswith("model.")) and (task, name) not in DEFAULTS
]


@pytest.mark.parametrize(("task", "name", "value"), CASES, ids=[f"{t}-{n}" for t, n, _ in CASES])
def test_an_option_changes_the_run_or_is_refused_by_name(
    task: str, name: str, value: Any, place: Path, plain: dict[str, str]
) -> None:
    if value == ("HELD_OUT",):
        value = (str(place / "held.jsonl"),)
    refused, foreseen = "", None
    try:
        config = set_option(make_config(place, task, name), name, value)
        foreseen = dry_run(place, task, config)
        found = digest_run(place, task, config)
    except BmforgeError as error:
        refused, found = str(error), ""
    assert found != plain[task]
    assert foreseen in (refused, None)  # None: refused before the recipe is called
    assert refused or name not in REFUSED
    assert not refused or MESSAGES.get(name, name.rpartition(".")[2]) in refused
