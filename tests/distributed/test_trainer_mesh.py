"""The Trainer on several processes finds its mesh, or refuses a model that is not laid out."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from bmforge.errors import BmforgeError, ConfigError, DistributedError
from bmforge.models import GPT2, GPT2Config
from bmforge.parallel import Layout, parallelize, run_on_first
from bmforge.testing import run_distributed
from bmforge.train import TrainConfig, Trainer

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


class LeavesAtTheSecondStep(OneRow):
    """A loader that takes rank 1 away in the middle of the run."""

    steps = 0

    def __next__(self):
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == 1:
            os._exit(3)
        return super().__next__()


def lose_a_rank() -> None:
    model = GPT2.from_config(GPT2Config(**SIZES))
    parallelize(model, Layout())
    Trainer(model, LeavesAtTheSecondStep(), TrainConfig(steps=3)).fit()


def test_a_dead_rank_is_named():
    said = r"step 2, counting labels: a collective failed on rank 0; ranks \[1\] are dead or hang"
    with pytest.raises(DistributedError, match=said):
        run_distributed(lose_a_rank, 2)


def fail_on_first() -> str:
    try:
        run_on_first(lambda: (_ for _ in ()).throw(ConfigError("no such thing")))
    except BmforgeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_what_rank_0_raises_is_raised_everywhere():
    assert run_distributed(fail_on_first, 3) == ["ConfigError: no such thing"] * 3
