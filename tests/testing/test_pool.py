"""The worker pool: results by rank, errors with their rank, and life after a dead worker."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from bmforge.errors import DistributedError
from bmforge.testing import run_distributed


def sum_of_ranks(offset: int) -> tuple[int, float]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("this one")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def die_once(place: str) -> int:
    """Rank 0 is ended by a signal, the first time."""
    if dist.get_rank() == 0 and not os.path.exists(place):
        open(place, "w").close()
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()
    return dist.get_rank()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_by_rank(world):
    results = run_distributed(sum_of_ranks, world, 10)
    assert results == [(r, sum(range(10, 10 + world))) for r in range(world)]


def test_an_exception_names_its_rank_and_the_pool_lives_on():
    with pytest.raises(DistributedError, match=r"(?s)rank 1: .*this one"):
        run_distributed(fail_on, 2, 1)
    assert run_distributed(sum_of_ranks, 2, 0)[0] == (0, 1.0)


def test_an_interrupted_job_does_not_answer_the_next_one():
    def interrupt(*_: object) -> None:  # not an OSError, which `select` of Python may suppress
        raise RuntimeError("the caller's time is over")

    run_distributed(sum_of_ranks, 2, 0)  # starts the workers
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(RuntimeError, match="time is over"):
            run_distributed(time.sleep, 2, 3.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert run_distributed(sum_of_ranks, 2, 0) == [(0, 1.0), (1, 1.0)]


def test_a_dead_worker_is_named_and_replaced():
    said = r"(?s)rank 1: the process died with exit code -6.*Aborted.*test_pool.py.* in die_on"
    with (
        pytest.warns(UserWarning, match="die_on is run again"),
        pytest.raises(DistributedError, match=said),
    ):
        run_distributed(die_on, 2, 1)
    assert run_distributed(sum_of_ranks, 2, 0)[1] == (1, 1.0)


def test_a_crash_that_does_not_come_again_is_a_warning(tmp_path):
    with pytest.warns(
        UserWarning,
        match=r"(?s)die_once is run again, because a worker crashed: rank 0: .* code -6",
    ):
        assert run_distributed(die_once, 2, str(tmp_path / "died")) == [0, 1]
