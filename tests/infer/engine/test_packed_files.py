"""Temporary packed weights are removed, also after a process was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bmforge.infer import Engine, EngineConfig
from bmforge.infer.engine.packed_directory import make_packed_place
from bmforge.models import Llama, LlamaConfig

KEEPER = """
import sys, time
from pathlib import Path
from bmforge.infer import Engine, EngineConfig
config = EngineConfig(spill_directory=Path(sys.argv[2]), max_tokens=32)
engine = Engine(sys.argv[1], quantize="int8", config=config)
print("open", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plain") / "model"
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2
    )
    Llama.from_config(config, seed=1).save_pretrained(place)
    return place


def test_what_a_killed_process_left_goes_when_the_next_opens(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEPER, str(model), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        (left,) = tmp_path.iterdir()
        config = EngineConfig(spill_directory=tmp_path, max_tokens=32)
        with Engine(model, quantize="int8", config=config):
            assert left.exists()  # its process lives
            assert len(list(tmp_path.iterdir())) == 2
        process.kill()
    assert list(tmp_path.iterdir()) == [left]
    with Engine(model, quantize="int8", config=config):
        (own,) = tmp_path.iterdir()
        assert own != left
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_place_of_ours_stays(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "kept").touch()
    (tmp_path / "bmforge-packed-link").symlink_to(other)
    (tmp_path / "bmforge-packed-file").touch()
    (tmp_path / "mine").mkdir()
    place, give_back = make_packed_place(tmp_path)
    again, give_back_again = make_packed_place(tmp_path)  # of the same process
    assert place.exists()
    assert again.exists()
    give_back()
    give_back_again()
    assert {one.name for one in tmp_path.iterdir()} == {
        "elsewhere", "bmforge-packed-link", "bmforge-packed-file", "mine",
    }  # fmt: skip
    assert (other / "kept").exists()
