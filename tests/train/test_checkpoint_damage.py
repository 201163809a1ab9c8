"""What is not a sound checkpoint of this model is refused before any state is touched."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from bmforge.errors import CheckpointError
from bmforge.train.checkpoint.checkpointer import (
    Checkpointer,
    DamagedCheckpointError,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from bmforge.train.checkpoint.format import hash_line


def make(seed: int, width: int = 4) -> tuple[nn.Module, AdamW]:
    """A small model with one optimizer step behind it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def fingerprint(model: nn.Module, optimizer: AdamW) -> list[torch.Tensor]:
    """Copies of everything that loading may change."""
    tensors = list(model.state_dict().values())
    tensors += [t for values in optimizer.state.values() for t in values.values()]
    return [tensor.clone() for tensor in tensors] + [torch.get_rng_state()]


def assert_untouched(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("bmforge")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with sound checkpoints of steps 1 and 2."""
    save_checkpoint(tmp_path, *make(1), step=1, state={"n": 1})
    save_checkpoint(tmp_path, *make(2), step=2, state={"n": 2})
    return tmp_path


def test_any_flipped_byte_is_refused(two: Path) -> None:
    newest = two / "step-00000002"
    files = sorted(path for path in newest.iterdir() if path.is_file())
    assert len(files) == 3
    sizes = [path.stat().st_size for path in files]
    draw = random.Random(0)
    expected = make(1)
    for number in range(200):
        # Every file gets its share: a third of the places each, drawn over the whole file.
        path, size = files[number % 3], sizes[number % 3]
        original = path.read_bytes()
        place, flip = draw.randrange(size), draw.randrange(1, 256)
        damaged = bytearray(original)
        damaged[place] ^= flip
        path.write_bytes(damaged)

        model, optimizer = make(3)
        before = fingerprint(model, optimizer)
        with pytest.raises(DamagedCheckpointError, match="is damaged"):
            load_checkpoint(newest, model, optimizer)
        assert_untouched(before, fingerprint(model, optimizer))
        assert load_checkpoint(two, model, optimizer) == {"n": 1}
        assert torch.equal(model[0].weight, expected[0][0].weight)
        path.write_bytes(original)
    verify_checkpoint(newest)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", "shard-00000-of-00001"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "grown"])
def test_missing_or_cut_file(
    name: str, damage: str, two: Path, warnings: pytest.LogCaptureFixture
) -> None:
    path = next((two / "step-00000002").glob(f"{name}*"))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        cut = {"empty": b"", "truncated": content[:-7], "grown": content + b"\0"}
        path.write_bytes(cut[damage])
    with pytest.raises(DamagedCheckpointError):
        verify_checkpoint(two / "step-00000002")
    with Checkpointer(two) as checkpointer:
        model, optimizer = make(3)
        assert checkpointer.load_newest(model, optimizer) == (1, {"n": 1})
    assert path.name in warnings.text
    assert "The next older checkpoint is tried" in warnings.text


def test_directory_without_anything_in_it(two: Path) -> None:
    (two / "step-00000003").mkdir()
    assert load_checkpoint(two, *make(3)) == {"n": 2}


def test_all_damaged_is_an_error_and_not_a_new_start(two: Path) -> None:
    for path in find_checkpoints(two):
        (path / "manifest.sha256").unlink()
    with (
        Checkpointer(two) as checkpointer,
        pytest.raises(CheckpointError, match="all 2 checkpoints"),
    ):
        checkpointer.load_newest(*make(3))


def test_extra_file_is_left_alone(two: Path) -> None:
    (two / "step-00000002" / "notes.txt").write_text("mine")
    assert load_checkpoint(two, *make(3)) == {"n": 2}


def test_copied_elsewhere_under_another_name(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "step-00000001", tmp_path / "best")
    assert load_checkpoint(tmp_path / "best", *make(3)) == {"n": 1}


def test_newer_format_is_an_error_and_no_reason_to_fall_back(two: Path) -> None:
    newest = two / "step-00000002"
    manifest = json.loads((newest / "manifest.json").read_bytes())
    manifest["version"] = 99
    content = json.dumps(manifest).encode()
    (newest / "manifest.json").write_bytes(content)
    (newest / "manifest.sha256").write_bytes(hash_line(content))
    model, optimizer = make(3)
    before = fingerprint(model, optimizer)
    with pytest.raises(CheckpointError, match=r"format version=99.*Upgrade"):
        load_checkpoint(two, model, optimizer)
    assert_untouched(before, fingerprint(model, optimizer))


def test_other_width_lists_every_shape(two: Path) -> None:
    model, optimizer = make(3, width=5)
    before = fingerprint(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(two, model, optimizer)
    assert not isinstance(caught.value, DamagedCheckpointError)
    for text in [
        "0.weight: shape (4, 3) in the checkpoint, (5, 3) in the model",
        "0.bias: shape (4,) in the checkpoint, (5,) in the model",
        "2.weight: shape (2, 4) in the checkpoint, (2, 5) in the model",
    ]:
        assert text in str(caught.value)
    assert_untouched(before, fingerprint(model, optimizer))


def test_other_names_are_listed_both_ways(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), step=1)
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path, other)
    for text in [
        "not in the checkpoint: c.weight",
        "not in the checkpoint: c.bias",
        "only in the checkpoint: b.weight",
        "only in the checkpoint: b.bias",
        "4 differences",
    ]:
        assert text in str(caught.value)
    assert_untouched(before, [p.detach() for p in other.parameters()])
    load_checkpoint(tmp_path, other, strict=False)
    assert not torch.equal(before[0], other["a"].weight)
    assert torch.equal(before[2], other["c"].weight)


def test_a_long_list_is_cut_at_twenty(tmp_path: Path) -> None:
    def wide(width: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(15)))

    save_checkpoint(tmp_path, wide(2), step=1)
    with pytest.raises(CheckpointError, match="30 differences") as caught:
        load_checkpoint(tmp_path, wide(3))
    assert str(caught.value).count(" in the checkpoint, ") == 20
    assert "and 10 more" in str(caught.value)


def test_dtype_is_part_of_the_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_checkpoint(tmp_path, model, step=1)
    half = nn.Linear(3, 2, dtype=torch.bfloat16)
    with pytest.raises(
        CheckpointError, match="dtype float32 in the checkpoint, bfloat16 in the model"
    ):
        load_checkpoint(tmp_path, half)
    load_checkpoint(tmp_path, half, strict=False)
    assert torch.equal(half.weight, model.weight.bfloat16())


def test_optimizer_must_be_the_same_kind(two: Path, tmp_path: Path) -> None:
    model, _ = make(3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"0\.weight was trained by AdamW, but is now .* SGD"):
        load_checkpoint(two, model, sgd)
    part = AdamW([model[0].weight], lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"only in the checkpoint: optimizer state of 2\.bias"
    ):
        load_checkpoint(two, model, part)
    save_checkpoint(tmp_path / "bare", model, step=1)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        load_checkpoint(tmp_path / "bare", model, sgd)


def test_model_without_memory_is_refused(two: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(CheckpointError, match=r"meta device \(call to_empty"):
        load_checkpoint(two, model)
