"""Examples by number: every one once an epoch, the same on any world, gone on with exactly."""

from __future__ import annotations

import pytest
import torch

from bmforge.errors import ConfigError, DataError
from bmforge.recipes.inputs.examples import ExampleConfig, ExampleLoader, iter_held_out


class Numbers:
    """Example i holds its own number and a first number of its seed."""

    columns = {"input_ids": (3, 0), "labels": (3, -100)}  # noqa: RUF012

    def __init__(self, count: int) -> None:
        self.count, self.fingerprint = count, str(count)

    def __len__(self) -> int:
        return self.count

    def make(self, index, seed):
        return {"input_ids": [index + 1, hash(seed) % 997], "labels": [index + 1]}


CONFIG = ExampleConfig(paths=("x",), global_batch_size=4, micro_batch_size=2, seed=3)


def take(loader: ExampleLoader, steps: int) -> list[torch.Tensor]:
    return [torch.cat([b["input_ids"] for b in next(loader)]) for _ in range(steps)]


def test_every_example_comes_once_an_epoch() -> None:
    rows = torch.cat(take(ExampleLoader(Numbers(10), CONFIG), 10))[:, 0].tolist()
    epochs = [rows[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(1, 11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = ExampleConfig(**{**vars(CONFIG), "seed": 4})
    assert torch.cat(take(ExampleLoader(Numbers(10), other), 3))[:, 0].tolist() != rows[:12]


def test_the_rows_of_a_step_do_not_depend_on_the_world() -> None:
    alone = take(ExampleLoader(Numbers(7), CONFIG), 5)
    for world in (2, 4):
        loaders = [ExampleLoader(Numbers(7), CONFIG, rank, world) for rank in range(world)]
        for step in alone:
            batches = [next(loader) for loader in loaders]
            assert len({len(b) for b in batches}) == 1
            rows = torch.cat([b[k]["input_ids"] for k in range(len(batches[0])) for b in batches])
            labels = torch.cat([b[k]["labels"] for k in range(len(batches[0])) for b in batches])
            counted = (labels != -100).any(1)
            assert torch.equal(rows[counted], step)


def test_goes_on_exactly_and_refuses_other_data() -> None:
    loader = ExampleLoader(Numbers(7), CONFIG)
    take(loader, 3)
    state, rest = loader.state_dict(), take(loader, 4)
    again = ExampleLoader(Numbers(7), CONFIG)
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(take(again, 4), rest, strict=True))
    with pytest.raises(ConfigError, match="the training examples changed"):
        ExampleLoader(Numbers(8), CONFIG).load_state_dict(state)
    changed = Numbers(7)
    changed.content = 1
    with pytest.raises(ConfigError, match="the training examples changed"):
        ExampleLoader(changed, CONFIG).load_state_dict(state)
    earlier = {key: value for key, value in state.items() if key != "content"}
    ExampleLoader(changed, CONFIG).load_state_dict(earlier)
    wide = ExampleConfig(**{**vars(CONFIG), "global_batch_size": 5, "micro_batch_size": 1})
    continued = ExampleLoader(Numbers(7), wide)
    continued.load_state_dict(state)  # the order of samples does not depend on the batch size
    one_by_one = ExampleLoader(
        Numbers(7), ExampleConfig(**{**vars(CONFIG), "global_batch_size": 1, "micro_batch_size": 1})
    )
    one_by_one.load_state_dict(state)
    expected = torch.cat([take(one_by_one, 1)[0] for _ in range(5)])
    assert torch.equal(torch.cat(take(continued, 1)).flatten(), expected.flatten())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_held_out_examples_are_shared(world: int) -> None:
    shares = [list(iter_held_out(Numbers(7), CONFIG, rank, world)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    labels = torch.cat([b["labels"] for share in shares for b in share])[:, 0]
    assert sorted(labels[labels != -100].tolist()) == list(range(1, 8))


def test_bad_settings() -> None:
    for size, problem in ((0, "data.micro_batch_size=0"), (1, "data.paths is empty")):
        with pytest.raises(ConfigError, match=problem):
            ExampleLoader(Numbers(3), ExampleConfig(micro_batch_size=size))
    with pytest.raises(DataError, match="no training example"):
        ExampleLoader(Numbers(0), CONFIG)
