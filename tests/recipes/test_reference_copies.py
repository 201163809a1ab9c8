"""Runs with shared prompts, and with references that are quantized or offloaded."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_preferences_run import SIZES, make_config, run, start  # noqa: F401

from bmforge.cli import main
from bmforge.errors import ConfigError
from bmforge.models import MistralConfig
from bmforge.models.llama import LlamaConfig
from bmforge.parallel import Layout, shutdown_distributed
from bmforge.parallel.planner.workload import Resident
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.preferences import PairData, PreferencesConfig, train_preferences
from bmforge.recipes.prefix_sharing import check_prefix_sharing
from bmforge.recipes.reference_model import describe_reference
from bmforge.recipes.resident_models import list_resident_models, reference_copy
from bmforge.recipes.reward import RewardConfig, train_reward
from bmforge.recipes.run import check_recipe
from bmforge.recipes.start import family_of
from bmforge.surgery import persistent_tensors
from bmforge.testing import run_distributed

NAMES = ("loss", "grad_norm", "rewards/margins", "logps/chosen")


def shared(config: Any) -> Any:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, prefix_sharing=True))


def figures(config: Any) -> list[list[float]]:
    return [[row[name] for name in NAMES] for row in run(config)]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "dpo"},
        {"method": "orpo", "nll_on_prompt": True},
        {"method": "ipo", "reference": "precomputed"},
        {"method": "dpo", "adapter": AdapterConfig(kind="lora", rank=2)},
    ],
)
def test_runs_with_shared_prompts_equal_separate_rows(
    start: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    want = figures(make_config(start, "apart", 4, **changes))
    found = figures(shared(make_config(start, "shared", 4, **changes)))
    for row, other in zip(found, want, strict=True):
        assert row == pytest.approx(other, rel=2e-4, abs=2e-5)


@dataclasses.dataclass(kw_only=True)
class WindowPreferences(PreferencesConfig):
    """Preferences of a small Mistral with a window of 100 tokens."""

    model: MistralConfig = dataclasses.field(
        default_factory=lambda: MistralConfig(**SIZES, window=100)
    )


@pytest.mark.parametrize(("seq_len", "is_refused"), [(50, False), (51, True)])
def test_windows_must_hold_both_answers(seq_len: int, is_refused: bool) -> None:
    data = PairData(paths=("x",), seq_len=seq_len, prefix_sharing=True)
    config = WindowPreferences(data=data)
    if not is_refused:
        return check_prefix_sharing(config)
    with pytest.raises(ConfigError, match="sliding window of Mistral, 100 tokens"):
        check_prefix_sharing(config)
    return None


def check(config: Any) -> None:
    """Check the options of a run with the processes of its layout, as at the start of the run."""
    train = train_reward if isinstance(config, RewardConfig) else train_preferences
    processes = config.layout.tp * config.layout.cp
    train(config, partial(check_recipe, processes=processes))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"method": "kto"}, "no effect with method=kto"),
        ({"is_reward": True}, "no effect in reward models"),
        ({"layout": Layout(cp=2)}, "cp=2.*shards the tokens"),
    ],
)
def test_prefix_sharing_is_refused(
    start: Path,  # noqa: F811
    changes: dict[str, Any],
    what: str,
) -> None:
    config = shared(make_config(start, "run", 1, **changes))
    with pytest.raises(ConfigError, match=what):
        check(config)
    assert not (start / "run").exists()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_references_are_near_the_copy(start: Path, dtype: Any) -> None:  # noqa: F811
    """Their log-probabilities are those of the policy up to the rounding of the weights."""
    plain = run(make_config(start, "plain", 3))
    rows = run(make_config(start, dtype, 3, reference_dtype=dtype))
    assert plain[0]["rewards/margins"] == 0.0
    assert 0 < abs(rows[0]["rewards/margins"]) < (0.01 if dtype == "int8" else 0.1)
    for row, other in zip(rows, plain, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=0.01 if dtype == "int8" else 0.1)
        assert row["logps/chosen"] == pytest.approx(other["logps/chosen"], rel=0.02)


@pytest.mark.parametrize("layout", [Layout(zero=3), Layout(pp=2)])
def test_quantized_references_on_layouts(start: Path, layout: Layout) -> None:  # noqa: F811
    config = make_config(start, "one", 2, reference_dtype="int8")
    want = run_distributed(figures, 1, config)[0]
    config = make_config(start, "two", 2, reference_dtype="int8", layout=layout)
    for found in run_distributed(figures, 2, config):
        assert torch.tensor(found).allclose(torch.tensor(want), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"reference_dtype": "int8", "reference": "precomputed"}, "reference_dtype=int8 has no"),
        ({"reference_dtype": "int4", "method": "orpo"}, "reference_dtype=int4 has no effect"),
        ({"reference_offload": True, "method": "simpo"}, "reference_offload=True has no effect"),
        ({"reference_dtype": "int4", "layout": Layout(tp=2)}, r"layout\.tp"),
        ({"reference_dtype": "int4", "init_from": None}, "quantizes pretrained weights"),
    ],
)
def test_options_of_the_copy_are_refused(
    start: Path,  # noqa: F811
    changes: dict[str, Any],
    what: str,
) -> None:
    config = dataclasses.replace(make_config(start, "run", 1), **changes)
    with pytest.raises(ConfigError, match=what):
        check(config)
    assert not (start / "run").exists()


def test_offload_needs_an_accelerator(start: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="no effect on a CPU"):
        run(make_config(start, "run", 1, reference_offload=True))


@pytest.mark.parametrize(("dtype", "bits"), [(None, 32), ("int8", 8), ("int4", 4)])
def test_the_plan_counts_the_bytes_of_the_copy(
    start: Path,  # noqa: F811
    dtype: Any,
    bits: int,
) -> None:
    """A quantized copy: its tensors in a run; in theory `bits` a weight of the linear layers."""
    config = make_config(start, "run", 1, reference_dtype=dtype)
    sizes = dataclasses.replace(config, model=LlamaConfig.from_pretrained(start / "base"))
    policy = family_of(sizes.model).from_config(sizes.model, device="meta")
    (resident,) = list_resident_models(sizes, policy, 1)
    linear = sum(p.numel() for n, p in policy.named_parameters() if "_proj" in n)
    others = sum(p.numel() for p in policy.parameters()) - linear
    low, high = linear * bits / 8 + 4 * others, linear * (bits + 4) / 8 + 4 * others
    assert low <= resident.nbytes <= high
    if dtype is None:
        return
    tensors = persistent_tensors(describe_reference(sizes)).values()
    assert resident == reference_copy(describe_reference(sizes), is_stored=True)
    assert resident.nbytes == sum(t.numel() * t.element_size() for t in tensors)


def plan(capsys: Any, *options: str) -> dict[str, float]:
    """Memory of one row of a plan without recompute, in bytes by category."""
    shutdown_distributed()
    sizes = ["hidden_size=64", "num_heads=4", "num_layers=4", "vocab_size=512"]
    arguments = ["plan", "gpt2-small", "--task", "preferences", "--seq", "64", "--set", *sizes]
    arguments += ["--precision", "fp32", "--no-offload", "--json"]
    assert main([*arguments, *options]) == 0
    table = json.loads(capsys.readouterr().out)
    (row,) = [r for r in table["rows"] if r["micro_batch_rows"] == 1 and not r["recompute"]]
    parts: dict[str, float] = row["memory_parts_bytes"]
    return parts


def test_offloaded_copies_only_raise_the_peak_above_a_step(capsys: Any) -> None:
    resident = Resident("reference", 1000, is_sharded=True, is_offloaded=True)
    assert resident.bytes_per_process(4) == 250
    whole, small, away = (
        plan(capsys, *options)
        for options in ((), ("--reference-dtype", "int4"), ("--reference-offload",))
    )
    assert small["reference"] < whole["reference"]
    free = away["gradients"] + away["activations"]
    assert away["reference"] == max(0.0, whole["reference"] - free)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--reference", "precomputed", "--reference-dtype", "int4"), "--reference-dtype has no"),
        (("--adapter", "lora", "--reference-offload"), "--reference-offload has no effect"),
        (
            ("--adapter", "lora", "--reference", "copy", "--reference-dtype", "int8"),
            "only for full fine-tuning",
        ),
    ],
)
def test_plans_refuse_options_without_effect(
    options: tuple[str, ...], what: str, capsys: Any
) -> None:
    assert main(["plan", "gpt2-small", "--task", "preferences", *options]) != 0
    assert what in capsys.readouterr().err
