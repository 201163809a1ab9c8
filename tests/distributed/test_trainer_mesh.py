"""The Trainer on several processes finds its mesh, or refuses a model that is not laid out."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bmforge.errors import (
    ConfigError,
    DistributedError,
    MissingDependencyError,
    install_command,
)
from bmforge.models import GPT2, GPT2Config, init_weights_
from bmforge.parallel import (
    FailureDetector,
    Layout,
    build_mesh,
    failure_detector,
    init_distributed,
    parallelize,
    run_everywhere,
    run_on_first,
)
from bmforge.testing import run_distributed
from bmforge.train import TrainConfig, Trainer
from bmforge.train.checkpoint import checkpointer as checkpoint
from bmforge.train.data_consistency import check_same_rows

SIZES = {"vocab_size": 17, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "max_seq_len": 8}


class OneRow:
    """A loader whose row depends on the rank."""

    def __next__(self):
        generator = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, 17, (1, 8), generator=generator)
        return [{"input_ids": ids, "labels": ids}]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class SameRows(OneRow):
    """A loader of the same four micro-batches everywhere."""

    def __next__(self):
        ids = torch.arange(8)[None]
        return [{"input_ids": ids, "labels": ids}] * 4


def one_loss(lay_out: bool) -> float:
    model = GPT2.from_config(GPT2Config(**SIZES))
    if lay_out:
        parallelize(model, Layout())
    return Trainer(model, OneRow(), TrainConfig(steps=1)).train_step()[0]["loss"]


def test_the_mesh_is_the_models():
    losses = run_distributed(one_loss, 2, True)
    assert losses[0] == losses[1]


def test_a_model_that_is_not_laid_out_is_refused():
    with pytest.raises(DistributedError, match=r"(?s)rank 0.*ConfigError.*rank 1.*ConfigError"):
        run_distributed(one_loss, 2, False)


def loss_on(layout: Layout) -> float:
    model = GPT2.from_config(GPT2Config(**SIZES))
    parallelize(model, layout)
    return Trainer(model, OneRow(), TrainConfig(steps=1)).train_step()[0]["loss"]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(tp=2, zero=2)], ids=str)
def test_other_rows_where_they_should_be_shared_are_refused(layout: Layout) -> None:
    """The rows depend on the process's own rank; all processes say the same."""
    world = 4 if layout.zero == 2 else 2
    said = "".join(
        f"rank {rank}.*ConfigError: the processes of a tensor.*" for rank in range(world)
    )
    with pytest.raises(DistributedError, match=f"(?s){said}"):
        run_distributed(loss_on, world, layout)


def compare_odd_rows(differs: str) -> None:
    mesh = build_mesh(Layout(tp=2), init_distributed().device)
    strided = torch.arange(8, dtype=torch.int32)[::2][:1]
    rows = {"a": strided, "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.tensor(True)}
    if differs and dist.get_rank() == 1:
        rows[differs] = torch.zeros_like(rows[differs]) + (differs == "a")
    check_same_rows([rows], mesh)


@pytest.mark.parametrize("differs", ["a", "b", "c"])
def test_rows_of_any_form_are_compared(differs: str) -> None:
    """One element with a stride, half precision, a scalar: equal ones pass, another is refused."""
    run_distributed(compare_odd_rows, 2, "")
    with pytest.raises(
        DistributedError, match=r"(?s)rank 0.*the same samples.*rank 1.*the same samples"
    ):
        run_distributed(compare_odd_rows, 2, differs)


def speak() -> tuple[list[str], list[str]]:
    """A model's name after it was laid out, and what torch warns of in a step."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = GPT2.from_config(GPT2Config(**SIZES), device="meta")
        parallelize(model, Layout(pp=2, tp=2))
        init_weights_(model, seed=0)
        Trainer(model, SameRows(), TrainConfig(steps=1)).train_step()
    names = {type(module).__name__ for module in model.modules()}
    words = [str(one.message) for one in told if issubclass(one.category, FutureWarning)]
    return sorted(name for name in names if "FSDP" in name), words


def test_models_keep_their_names_and_nothing_is_deprecated() -> None:
    assert run_distributed(speak, 4) == [([], [])] * 4


class MoreOnTheFirst(OneRow):
    """A loader that gives rank 0 one micro-batch more from the second step on."""

    steps = 0

    def __next__(self):
        self.steps += 1
        return super().__next__() * (1 + (self.steps == 2 and dist.get_rank() == 0))


def give_more() -> None:
    model = GPT2.from_config(GPT2Config(**SIZES))
    parallelize(model, Layout())
    Trainer(model, MoreOnTheFirst(), TrainConfig(steps=3)).fit()


def test_unequal_numbers_of_micro_batches_are_said():
    said = r"different numbers of micro-batches in step 2: \[2, 1, 1\]"
    with pytest.raises(
        DistributedError, match=f"(?s)rank 0.*{said}.*rank 1.*{said}.*rank 2.*{said}"
    ):
        run_distributed(give_more, 3)


class LeavesAtTheSecondStep(SameRows):
    """A loader that takes the last rank away in the middle of the run."""

    steps = 0

    def __next__(self):
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(3)
        return super().__next__()


def lose_a_rank(layout: Layout) -> None:
    model = GPT2.from_config(GPT2Config(**SIZES), device="meta")
    parallelize(model, layout)
    init_weights_(model, seed=0)
    with mock.patch.object(failure_detector, "_SCAN_S", 1.5):
        Trainer(model, LeavesAtTheSecondStep(), TrainConfig(steps=3)).fit()


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout()], ids=str)
def test_a_dead_rank_is_named_by_all(layout: Layout):
    """Also by those who wait for one that lives."""
    world = max(2, layout.tp * layout.pp)
    said = "".join(
        rf"rank {rank}: .*step 2.*failed on rank {rank}; ranks \[{world - 1}\] are dead.*"
        for rank in range(world - 1)
    )
    with pytest.raises(DistributedError, match=f"(?s){said}"):
        run_distributed(lose_a_rank, world, layout)


def wait_in_a_row() -> str:
    """Rank 2 waits for rank 0, which has seen that rank 1 is gone but does not end."""
    rank, numbers, detector = dist.get_rank(), torch.zeros(2), FailureDetector()
    if rank == 1:
        os._exit(3)
    shorter = mock.patch.multiple(failure_detector, _SCAN_S=1.0, _BEAT_S=0.2, _LEAVE_S=0.1)
    with shorter, detector.watching():
        try:
            with detector.naming_failures("a step"):
                dist.recv(numbers, 1 - rank if rank == 0 else 0)
        except DistributedError as error:
            with suppress(RuntimeError):
                dist.recv(numbers, 2)  # until that has ended
            return str(error)
    return "nothing was lost"


def test_who_waits_for_a_living_one_ends_as_well():
    with pytest.raises(DistributedError) as caught:
        run_distributed(wait_in_a_row, 3, timeout_s=20.0)
    assert str(caught.value).splitlines() == [
        "rank 1: the process died with exit code 3",
        "rank 2: the process died with exit code 1",
    ]


class MadeOnceError(Exception):
    """Its arguments are not what it is called with."""

    def __init__(self) -> None:
        super().__init__("of its own kind")


class LockedError(Exception):
    """It holds what no pickle holds."""

    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


RAISED = {
    "config": (ConfigError("no such thing"), "ConfigError: no such thing"),
    "missing": (
        MissingDependencyError("wandb", "report", "logging"),
        "MissingDependencyError: logging needs the package 'wandb', which is not installed. "
        f"Install it with: {install_command('report')}",
    ),
    "made": (MadeOnceError(), "DistributedError: rank {} failed: MadeOnceError: of its "
    "own kind"),
    "sent": (LockedError(), "DistributedError: rank {} failed: LockedError: with a lock"),
}  # fmt: skip


def fail_on(rank: int, call: Callable[..., None], kind: str) -> str:
    def fail() -> None:
        if dist.get_rank() == rank:
            raise RAISED[kind][0]

    try:
        call(fail)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize(("rank", "call"), [(0, run_on_first), (1, run_everywhere)])
def test_what_one_rank_raises_is_raised_everywhere(
    rank: int, call: Callable[..., None], kind: str
) -> None:
    error, elsewhere = RAISED[kind]
    found = run_distributed(fail_on, 3, rank, call, kind)
    assert found.pop(rank) == f"{type(error).__name__}: {error}"
    assert found == [elsewhere.format(rank)] * 2


def go_on(run_dir: str, steps: int, broken: str | None) -> None:
    """Train to `steps`; `broken` names what fails on rank 0 in a run that goes on."""
    model = GPT2.from_config(GPT2Config(**SIZES))
    parallelize(model, Layout())
    trainer = Trainer(model, OneRow(), TrainConfig(steps=steps), run_dir=run_dir)
    with ExitStack() as stack:
        if broken is not None and dist.get_rank() == 0:
            failure = OSError("the disk is gone")
            stack.enter_context(mock.patch.object(checkpoint, broken, side_effect=failure))
        trainer.fit()


@pytest.mark.parametrize("broken", ["clean_leftovers", "find_checkpoints", "read_manifest"])
def test_a_disk_that_fails_on_rank_0_is_told_to_all(broken: str, tmp_path: Path):
    run_distributed(go_on, 2, str(tmp_path), 1, None)
    said = r"(?s)rank 0.*OSError: the disk is gone.*rank 1.*OSError: the disk is gone"
    with pytest.raises(DistributedError, match=said):
        run_distributed(go_on, 2, str(tmp_path), 2, broken, timeout_s=30.0)


def test_damaged_metrics_are_told_to_all(tmp_path: Path):
    run_distributed(go_on, 2, str(tmp_path), 1, None)
    file = tmp_path / "metrics.jsonl"
    file.write_text("rubbish\n" + file.read_text())
    said = r"(?s)rank 0.*DataError.*line 1.*rank 1.*DataError.*line 1"
    with pytest.raises(DistributedError, match=said):
        run_distributed(go_on, 2, str(tmp_path), 2, None, timeout_s=30.0)


def tell(laid_out: str | None, told: str) -> str:
    model = GPT2.from_config(GPT2Config(**SIZES))
    if laid_out is not None:
        parallelize(model, Layout(), precision=laid_out)
    try:
        Trainer(model, OneRow(), TrainConfig(steps=1, precision=told))
    except ConfigError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("laid_out", "told", "words"),
    [
        (None, "fp32", "taken"),
        (None, "bf16", "'bf16', but the model is not parallelized. .*precision='bf16'.*='fp32'"),
        ("bf16", "bf16", "taken"),
        (
            "bf16",
            "fp32",
            "'fp32', but the model was parallelized with precision='bf16'. .*='fp32'.*='bf16'",
        ),
        (
            "fp32",
            "fp16",
            "'fp16', but the model was parallelized with precision='fp32'. .*='fp16'.*='fp32'",
        ),
    ],
)
def test_the_loop_and_the_model_have_one_precision(laid_out: str | None, told: str, words: str):
    (said,) = run_distributed(tell, 1, laid_out, told)
    assert re.search(words, said), said
