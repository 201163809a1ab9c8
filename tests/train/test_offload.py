"""Offloaded optimizers: the same bits as on the device, wherever states and gradients live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import (
    make_trainer,
    poison,
    run,
    run_interrupted,
    run_poisoned,
    whole,
    write_corpus,
)

from bmforge.errors import ConfigError
from bmforge.parallel import Layout, OffloadConfig, init_distributed
from bmforge.shards import is_streamed, whole_tensor
from bmforge.testing import assert_close, assert_equal_trees, run_distributed
from bmforge.train import (
    OptimConfig,
    Trainer,
    build_optimizers,
    load_checkpoint,
    save_checkpoint,
)
from bmforge.train.checkpoint.state import read_state
from bmforge.train.offload import states as offload_states
from bmforge.train.offload.states import StateOffload

LEAVING = OffloadConfig(1.0, gradients="leave")
DISK = OffloadConfig(1.0, target="disk", gradients="leave")
# Gradients clipped in every step, several micro-batches, a schedule: what a run has.
USUAL = {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "grad_clip": 0.05}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


def compare(prefix: str, world: int, offload: OffloadConfig, **changes: Any) -> None:
    """Rows of metrics, parameters and states are those of the run without offloading."""
    changes = {**USUAL, **changes}
    want = run_distributed(run, world, prefix, **changes)
    got = run_distributed(run, world, prefix, offload=offload, **changes)
    for (rows, state), (wanted_rows, wanted_state) in zip(got, want, strict=True):
        numbers = [{k: r[k] for k in ("loss", "grad_norm", "lr", "tokens")} for r in rows]
        wanted = [{k: r[k] for k in ("loss", "grad_norm", "lr", "tokens")} for r in wanted_rows]
        assert numbers == wanted
        assert any(row["grad_norm"] > USUAL["grad_clip"] for row in rows)
        assert_equal_trees(state, wanted_state)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "offload",
    [
        pytest.param(OffloadConfig(0.3), marks=pytest.mark.long),
        pytest.param(OffloadConfig(0.5, gradients="leave"), marks=pytest.mark.long),
        pytest.param(LEAVING, marks=pytest.mark.long),
        DISK,
        OffloadConfig(0.7, target="disk"),
        OffloadConfig("auto"),
    ],
    ids=["0.3", "0.5-leave", "all-leave", "all-disk", "0.7-disk", "auto"],
)
def test_one_process(prefix: str, optimizer: str, offload: OffloadConfig) -> None:
    compare(prefix, 1, offload, optimizer=optimizer)


@pytest.mark.parametrize(
    ("world", "layout", "offload"),
    [
        (2, Layout(zero=3), LEAVING),
        (2, Layout(zero=2), OffloadConfig(0.5, target="disk", gradients="leave")),
        (2, Layout(tp=2), LEAVING),
        (2, Layout(pp=2), LEAVING),
        pytest.param(4, Layout(zero=3), DISK, marks=pytest.mark.long),
        pytest.param(4, Layout(zero=2, tp=2), LEAVING, marks=pytest.mark.long),
        pytest.param(4, Layout(zero=3, pp=2), LEAVING, marks=pytest.mark.long),
        pytest.param(4, Layout(zero=0, cp=2), LEAVING, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_layouts(
    prefix: str, world: int, layout: Layout, offload: OffloadConfig, optimizer: str
) -> None:
    compare(prefix, world, offload, layout=layout, optimizer=optimizer)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("gradients", ["leave", "stay"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_fraction(
    prefix: str, world: int, zero: int, fraction: float, gradients: Any, optimizer: str
) -> None:
    offload = OffloadConfig(fraction, gradients=gradients) if fraction else OffloadConfig()
    compare(prefix, world, offload, layout=Layout(zero=zero), optimizer=optimizer)


def test_fp16_scaling(prefix: str) -> None:
    """The loss scale is divided out of gradients that have left."""
    compare(prefix, 1, LEAVING, precision="fp16")


@pytest.mark.parametrize(
    ("world", "fraction"), [(1, 1.0), (1, 0.6), pytest.param(2, 1.0, marks=pytest.mark.long)]
)
def test_masters_leave(prefix: str, world: int, fraction: float) -> None:
    """With bf16 the device keeps bf16 weights only, of whole units, and trains the same fp32 ones.

    On two processes gradients are rounded to bf16 once more, after their sum.
    """
    changes = {**USUAL, "precision": "bf16"}
    offload = OffloadConfig(fraction, gradients="leave")
    rows, state = run_distributed(run, world, prefix, **changes)[0]
    got_rows, got = run_distributed(run_masters, world, prefix, offload, **changes)[0]
    narrow = {name for name, kept in got["kept"].items() if kept == torch.bfloat16}
    last_block = {name for name in got["kept"] if name.startswith("layers.1.")}
    assert narrow == (set(got["kept"]) if fraction == 1.0 else last_block)
    for row, wanted in zip(got_rows, rows, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5 if world == 1 else 1e-3)
    for name, wide in got["wide"].items():
        wanted = state[f"param/{name}"]
        if world == 1:
            assert_close(wide, wanted, rtol=1e-5, atol=1e-6)
        elif not name.endswith("k_proj.bias"):  # its true gradient is 0; Adam steps its rounding
            assert (wide - wanted).abs().mean() < 1e-3, name


def run_masters(prefix: str, offload: OffloadConfig, **changes: Any) -> Any:
    """Train; return rows, the dtypes on the device, and weights after `close`."""
    rows: list[Any] = []
    trainer = make_trainer(
        prefix, offload=offload, callbacks=(lambda t, row: rows.append(dict(row)),), **changes
    )
    with trainer.loader:
        trainer.fit()
    kept = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert trainer.state_offload is not None
    trainer.state_offload.close()
    wide = {name: whole(p) for name, p in trainer.model.named_parameters()}
    return rows, {"kept": kept, "wide": wide}


def test_a_step_is_skipped(prefix: str) -> None:
    """A bad gradient is forgotten, wherever it went."""
    changes = {"grad_clip": 0.5}
    want = run_distributed(run_poisoned, 2, prefix, float("nan"), **changes)
    got = run_distributed(run_poisoned, 2, prefix, float("nan"), offload=LEAVING, **changes)
    for (rows, states, _), (wanted_rows, wanted_states, _) in zip(got, want, strict=True):
        assert [r.get("skipped") for r in rows] == [r.get("skipped") for r in wanted_rows]
        assert any("skipped" in row for row in rows)
        assert_equal_trees(states[-1], wanted_states[-1])


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, DISK), (DISK, None), (LEAVING, OffloadConfig(0.4)), (DISK, OffloadConfig("auto"))],
    ids=["onto disk", "from disk", "partly", "auto"],
)
def test_checkpoints_move(prefix: str, tmp_path: Path, before: Any, after: Any) -> None:
    """Saved with one offload, loaded with another: as if never stopped."""
    changes = {**USUAL, "steps": 6}
    _, want = run_distributed(run, 1, prefix, **changes)[0]
    run_distributed(run, 1, prefix, str(tmp_path), until_step=3, offload=before, **changes)
    _, got = run_distributed(run, 1, prefix, str(tmp_path), offload=after, **changes)[0]
    assert_equal_trees(got, want)


@pytest.mark.parametrize("states", ["bf16", "8bit"])
@pytest.mark.parametrize("target", [pytest.param("host", marks=pytest.mark.long), "disk"])
def test_narrow_states(prefix: str, tmp_path: Path, states: Any, target: Any) -> None:
    """They train about as well, and stopping and going on changes nothing."""
    offload = OffloadConfig(1.0, target=target, states=states)
    changes = {**USUAL, "steps": 12, "optimizer": "adamw"}
    exact, _ = run_distributed(run, 1, prefix, **changes)[0]
    rows, state = run_distributed(run, 1, prefix, offload=offload, **changes)[0]
    gaps = [abs(row["loss"] - other["loss"]) for row, other in zip(rows, exact, strict=True)]
    assert 0.0 < max(gaps) < 0.01
    resumed = run_distributed(
        run_interrupted, 1, prefix, str(tmp_path), 5, offload=offload, **changes
    )
    assert_equal_trees(resumed[0][1], state)


def run_streamed(prefix: str, run_dir: str | None, offload: OffloadConfig, **changes: Any) -> Any:
    """Train with the blocks' weights, states and gradients all outside the device."""
    rows: list[Any] = []
    note = (lambda t, row: rows.append(dict(row)),)
    until = changes.pop("until_step", None)
    trainer = make_trainer(
        prefix, run_dir, offload=offload, callbacks=note, streams=True, **changes
    )
    with trainer.loader:
        trainer.fit(until)
    weights = {}
    for name, parameter in trainer.model.named_parameters():
        assert is_streamed(parameter) == name.startswith("layers.")
        weights[name] = whole_tensor(parameter).clone()
    return rows, weights


@pytest.mark.parametrize("target", ["host", "disk"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_stream(prefix: str, tmp_path: Path, optimizer: str, target: Any) -> None:
    """Blocks whose weights are stepped elsewhere train the same, and checkpoints hold them."""
    changes = {**USUAL, "optimizer": optimizer}
    offload = OffloadConfig(1.0, target=target, weights=True)
    rows, state = run_distributed(run, 1, prefix, **changes)[0]
    args = (1, prefix, str(tmp_path), offload)
    run_distributed(run_streamed, *args, until_step=2, **changes)
    got_rows, weights = run_distributed(run_streamed, *args, **changes)[0]
    assert [r["loss"] for r in got_rows] == [r["loss"] for r in rows[2:]]
    assert_equal_trees(weights, {name: state[f"param/{name}"] for name in weights})


def run_auto(prefix: str, run_dir: str | None, room: int, **changes: Any) -> Any:
    """Train on a device that has `room` bytes left for states."""
    before = offload_states.memory_room_bytes
    offload_states.memory_room_bytes = lambda device: room
    try:
        rows, state = run(prefix, run_dir, **changes)
    finally:
        offload_states.memory_room_bytes = before
    return rows, state


@pytest.mark.parametrize(
    ("room", "precision"), [(0, "fp32"), (30_000, "fp32"), pytest.param(0, "bf16")]
)
def test_auto_takes_what_does_not_fit(
    prefix: str, tmp_path: Path, room: int, precision: str
) -> None:
    """Found at the first step, whose gradients are there already; so after resuming."""
    changes = {**USUAL, "steps": 4, "precision": precision}
    rows, state = run_distributed(run, 1, prefix, **changes)[0]
    args = (1, prefix, str(tmp_path), room)
    offload = OffloadConfig("auto", gradients="leave")
    first, _ = run_distributed(run_auto, *args, offload=offload, until_step=2, **changes)[0]
    second, got = run_distributed(run_auto, *args, offload=offload, **changes)[0]
    losses = [r["loss"] for r in [*first, *second]]
    if precision == "bf16":  # parameters are shown as the device has them
        assert losses == pytest.approx([r["loss"] for r in rows], rel=1e-5)
        return
    assert losses == [r["loss"] for r in rows]
    assert_equal_trees(got, state)


def skip_the_first(prefix: str) -> None:
    """The gradients of the step in which "auto" sends states away are let go if it is skipped."""
    kept: list[int] = []

    def note(trainer: Trainer, row: Any) -> None:
        away = trainer.state_offload._away.values()
        assert away
        kept.append(sum(one.early_gradient is not None for one in away))

    objective = poison(0, 0, float("nan"))
    offload = OffloadConfig("auto", gradients="leave")
    changes = {**USUAL, "precision": "bf16", "steps": 2, "micro_batch_size": 8}
    options = {"objective": objective, "callbacks": (note,), "offload": offload, **changes}
    rows, _ = run_auto(prefix, None, 0, **options)
    assert ["skipped" in row for row in rows] == [True, False]
    assert kept == [0, 0]


def test_auto_where_the_first_step_is_skipped(prefix: str) -> None:
    run_distributed(skip_the_first, 1, prefix)


def never_stepped(folder: str) -> None:
    """A parameter without a gradient has no state, before and after."""
    init_distributed()
    torch.manual_seed(0)
    config = OptimConfig(lr=1e-2)
    places = []
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizers = build_optimizers(model, config, offloaded=True)
        places.append((model, optimizers, StateOffload(model, optimizers, OffloadConfig(1.0))))
    model, optimizers, offload = places[0]
    model[0](torch.ones(2, 4)).sum().backward()
    optimizers[0].step()
    offload.wait()
    save_checkpoint(folder, model, optimizers, step=1)
    other, others, _ = places[1]
    load_checkpoint(folder, other, others)
    assert_equal_trees(other.state_dict(), model.state_dict())
    assert read_state(others[0], other[1].weight) == {}
    assert read_state(others[0], other[0].weight)["step"].read() == 1


def test_a_parameter_that_was_never_stepped(tmp_path: Path) -> None:
    run_distributed(never_stepped, 1, str(tmp_path))


def half_is_refused() -> None:
    init_distributed()
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizers = build_optimizers(model, OptimConfig(), offloaded=True)
    with pytest.raises(
        ConfigError, match="needs fp32 parameters, but 2 have another dtype, such as weight"
    ):
        StateOffload(model, optimizers, OffloadConfig(1.0))


def test_half_precision_parameters_are_refused() -> None:
    run_distributed(half_is_refused, 1)
