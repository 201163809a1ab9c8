"""Runs of earlier commits resume: missing and renamed fields, and fields changed on purpose."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import write_counting, write_start

from bmforge.cli import main
from bmforge.config import config_from_dict, config_to_dict
from bmforge.errors import ConfigError
from bmforge.recipes.adapters import AdapterConfig, resolve_adapter
from bmforge.recipes.renamed_fields import RENAMED, rename_fields
from bmforge.recipes.run import RunConfig
from bmforge.recipes.run_dir import check_run_dir, open_run_dir, record_overrides, write_run_config
from bmforge.train import read_metrics


@dataclass
class Inner:
    lr: float = 0.1
    decay: float | None = 0.5
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass
class Config:
    run_dir: str = "run"
    steps: int = 7
    clip: float | None = None
    inner: Inner = field(default_factory=Inner)
    override: tuple[str, ...] = ()


FIELDS = ("steps", "clip", "inner.lr", "inner.decay", "inner.betas", "inner")


def remove(table: dict[str, Any], name: str) -> None:
    *path, last = name.split(".")
    for part in path:
        table = table.get(part, {})
    table.pop(last, None)


def differing(config: Config, removed: set[str]) -> set[str]:
    """Second implementation: the fields that are not in the file and not at their default."""
    out = set()
    pairs = [("", config, Config()), ("inner.", config.inner, Inner())]
    for prefix, value, default in pairs:
        for one in fields(value):
            name = prefix + one.name
            gone = name in removed or (prefix and "inner" in removed)
            if gone and getattr(value, one.name) != getattr(default, one.name):
                out.add(name)
    return out - {"inner"}


@settings(max_examples=60, deadline=None)
@given(
    removed=st.sets(st.sampled_from(FIELDS)),
    lr=st.sampled_from((0.1, 0.2)),
    decay=st.sampled_from((0.5, None, 0.1)),
    steps=st.sampled_from((7, 9)),
    clip=st.sampled_from((None, 1.0)),
)
def test_a_missing_field_has_its_default(
    tmp_path_factory: pytest.TempPathFactory,
    removed: set[str],
    lr: float,
    decay: float | None,
    steps: int,
    clip: float | None,
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    config = Config(steps=steps, clip=clip, inner=Inner(lr, decay))
    table = config_to_dict(config)
    for name in removed:
        remove(table, name)
    (run_dir / "run.toml").write_text(tomli_w.dumps(table))
    problem = check_run_dir(run_dir, config, frozenset())
    named = set() if problem is None else set(re.findall(r"(?:run \(|; )([\w.]+): ", problem))
    assert named == differing(config, removed)


@settings(max_examples=40, deadline=None)
@given(
    values=st.dictionaries(st.sampled_from("abcd"), st.integers(), min_size=1),
    renames=st.dictionaries(st.sampled_from("abcd"), st.sampled_from("wxyz"), max_size=3),
    deep=st.booleans(),
)
def test_renamed_fields_are_read(
    values: dict[str, int], renames: dict[str, str], deep: bool
) -> None:
    prefix = "t." if deep else ""
    table: dict[str, Any] = {"t": dict(values)} if deep else dict(values)
    got = rename_fields(table, {prefix + o: f"new.{prefix}{n}{o}" for o, n in renames.items()})
    moved = {f"{renames[k]}{k}": v for k, v in values.items() if k in renames}
    rest = {k: v for k, v in values.items() if k not in renames}
    assert (got["t"] if deep else {k: v for k, v in got.items() if k != "new"}) == rest
    inside = got.get("new", {})
    assert (inside.get("t", {}) if deep else inside) == moved


def test_every_renamed_field_exists_today() -> None:
    for old, new in RENAMED.items():
        assert old != new
        assert new.partition(".")[0] in {one.name for one in fields(RunConfig)} | {"data", "model"}


# The `delta` table of a run.toml of commit 9994bb2, whose other fields have their names still.
_FORMER_DELTA: dict[str, Any] = {
    **{"targets": [], "exclude": [], "train_also": [], "root_scale": False, "magnitude": False},
    "merge": False,
}


@dataclass
class _Adapters:
    run_dir: str = "run"
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    override: tuple[str, ...] = ()


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from((None, "lora", "ia3", "bitfit")),
    targets=st.lists(st.sampled_from(("attn.q", "mlp.up")), unique=True),
    also=st.lists(st.sampled_from(("embed", "norm")), unique=True),
    flags=st.tuples(st.booleans(), st.booleans()),
    rank=st.sampled_from((None, 4)),
)
def test_a_former_delta_table_is_an_adapter(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str | None,
    targets: list[str],
    also: list[str],
    flags: tuple[bool, bool],
    rank: int | None,
) -> None:
    """A run of the earlier commit goes on with the same options under their present names."""
    if kind is None:
        targets, also, flags, rank = [], [], (False, False), None
    if kind != "lora":
        flags, rank = (False, False), None
    run_dir = tmp_path_factory.mktemp("run")
    delta = {
        **_FORMER_DELTA,
        **{"targets": targets, "train_also": also, "root_scale": flags[0], "magnitude": flags[1]},
        **({} if kind is None else {"kind": kind}),
        **({} if rank is None else {"rank": rank}),
    }
    (run_dir / "run.toml").write_text(tomli_w.dumps({"run_dir": "run", "delta": delta}))
    # A LoRA without targets had attn.q and attn.v; now it has all linear layers.
    present = tuple(targets) or (("attn.q", "attn.v") if kind == "lora" else ())
    adapter = AdapterConfig(
        kind=kind,
        target_modules=present,
        modules_to_save=tuple(also),
        use_rslora=flags[0],
        use_dora=flags[1],
        rank=rank,
    )
    assert check_run_dir(run_dir, resolve_adapter(_Adapters(adapter=adapter)), frozenset()) is None
    if kind == "lora":
        other = replace(adapter, rank=9)
        problem = check_run_dir(run_dir, _Adapters(adapter=other), frozenset())
        assert problem is not None
        assert "adapter.rank" in problem


def test_an_override_is_named_and_recorded(tmp_path: Path) -> None:
    write_run_config(tmp_path, Config())
    faster = Config(inner=Inner(lr=0.3), steps=8)
    with pytest.raises(
        ConfigError, match=r"lr: 0.1 in that run, now 0.3; steps: 7 in that run, now 8"
    ):
        open_run_dir(tmp_path, faster, frozenset())
    one = replace(faster, override=("inner.lr",))
    with pytest.raises(ConfigError, match=r"another run \(steps: 7 in that run, now 8"):
        open_run_dir(tmp_path, one, frozenset())
    both = replace(faster, override=("inner", "steps"))
    open_run_dir(tmp_path, both, frozenset())
    write_run_config(tmp_path, record_overrides(tmp_path, both))
    saved = tomllib.loads((tmp_path / "run.toml").read_text())
    assert saved["override"] == ["inner.lr=0.1->0.3", "steps=7->8"]
    # The same config goes on without an override; the old one is another run now.
    open_run_dir(tmp_path, faster, frozenset())
    with pytest.raises(ConfigError, match=r"0\.3 in that run, now 0\.1"):
        open_run_dir(tmp_path, Config(steps=8), frozenset())
    again = config_from_dict(Config, saved)
    open_run_dir(tmp_path, again, frozenset())
    write_run_config(tmp_path, record_overrides(tmp_path, again))
    assert tomllib.loads((tmp_path / "run.toml").read_text())["override"] == saved["override"]


def command(start: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        *("train", "pretrain", "--model", str(start / "model"), "--run-dir", str(run_dir)),
        *("--data.paths", str(start / "tokens"), "--data.seq-len", "16", "--no-export"),
        *("--train.schedule.kind", "constant", "--data.micro-batch-size", "2", *more),
    ]


def test_a_run_goes_on_with_another_rate_batch_and_corpus(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    start, run_dir = write_start(tmp_path / "start", {**sizes, "max_seq_len": 32}), tmp_path / "run"
    first = ("--data.global-batch-size", "4", "--train.optim.lr", "0.01", "--train.steps", "2")
    assert main(command(start, run_dir, *first)) == 0
    toml = tomllib.loads((run_dir / "run.toml").read_text())
    toml.pop("timeout_s")
    toml["train"].pop("master_weights")
    toml["train"]["optim"].pop("eps")
    (run_dir / "run.toml").write_text(tomli_w.dumps(toml))  # as an earlier version wrote it
    for file in start.glob("tokens.*"):
        file.unlink()
    write_counting(start / "tokens", 20, 10, 40)
    second = ("--data.global-batch-size", "6", "--train.optim.lr", "0.002", "--train.steps", "4")
    names = ("train.optim.lr", "data.global_batch_size", "data")
    for count in range(len(names)):
        few = (*second, "--override", *names[:count]) if count else second
        assert main(command(start, run_dir, *few)) == 2
    assert main(command(start, run_dir, *second, "--override", *names)) == 0
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [(row["step"], row["lr"], row["tokens"]) for row in rows] == [
        (1, 0.01, 64), (2, 0.01, 64), (3, 0.002, 96), (4, 0.002, 96)
    ]  # fmt: skip
    saved = tomllib.loads((run_dir / "run.toml").read_text())["override"]
    assert saved[:2] == ["data.global_batch_size=4->6", "train.optim.lr=0.01->0.002"]
    assert "eps=" in (run_dir / "log.txt").read_text()
