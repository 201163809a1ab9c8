"""Every kind of bad input of the main job: a clear refusal, and nothing lost or written."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_calls import assert_refused, bmforge, files_below
from real_runs import losses, write_config

from bmforge.data import TokenStoreWriter
from bmforge.train.checkpoint.checkpointer import find_checkpoints


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("bad"), 6)


@pytest.fixture(scope="module")
def finished(config: Path) -> Path:
    """A run of six steps with checkpoints of steps 3 and 6."""
    run_dir = config.parent / "finished"
    assert train(config, run_dir)[0].status == 0
    assert len(find_checkpoints(run_dir / "checkpoints")) == 2
    return run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path, config: Path) -> Path:
    """A copy of the finished run."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    return copy


def train(config: Path, run_dir: Path, *options: str, world: int = 1, **kwargs):
    arguments = ("train", "gpt2-pretrain", "--config", config, "--run-dir", run_dir, *options)
    return bmforge(*arguments, world=world, **kwargs)


BAD_FILES = {
    "missing.txt": (None, ["missing.txt", "does not exist"]),
    "empty.txt": (b"", ["empty.txt", "empty"]),
    "binary.txt": (b"abc\x00\x01\x02" * 50, ["binary.txt", "binary"]),
    "undecodable.txt": (b"caf\x81\x8d\x8f au lait", ["undecodable.txt", "UTF-8"]),
    "broken.jsonl": (b'{"text": "a"}\n{"text": "b"}\n{"text": \n', ["broken.jsonl", "3"]),
    "field.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', ["field.jsonl", "2", "text"]),
    "notes.png": (b"\x89PNG", ["notes.png", "suffix", ".jsonl"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_input_files(tmp_path: Path, name: str) -> None:
    content, words = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = files_below(tmp_path)
    assert_refused(bmforge("prepare", tmp_path / name, "--out", tmp_path / "out"), *words)
    assert files_below(tmp_path) == before


def test_skip_bad_counts_and_goes_on(tmp_path: Path) -> None:
    good = "\n".join(json.dumps({"text": f"sentence number {n} of some"}) for n in range(40))
    (tmp_path / "mixed.jsonl").write_text(f"{good}\nnot json\n{{}}\n")
    arguments = ("prepare", tmp_path / "mixed.jsonl", "--out", tmp_path / "out")
    options = ("--vocab-size", "300")
    assert_refused(bmforge(*arguments, *options), "mixed.jsonl", "41")
    (said,) = bmforge(*arguments, *options, "--skip-bad")
    assert said.status == 0, said
    assert "2 bad entries skipped" in said.err
    assert "40 documents" in said.err


def test_prepare_leaves_other_peoples_files_alone(tmp_path: Path, config: Path) -> None:
    out = tmp_path / "out"
    (out / "train").mkdir(parents=True)
    (out / "train" / "tokens.bin").write_bytes(b"mine")
    before = files_below(tmp_path)
    said = bmforge("prepare", config.parent / "text.jsonl", "--out", out)
    assert_refused(said, "contains train but no prepared.toml", "--overwrite")
    said = bmforge("prepare", config.parent / "text.jsonl", "--out", config.parent / "data")
    assert_refused(said, "vocab_size=300 in that corpus", "--overwrite")
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("world", [1, 2])
def test_corpus_shorter_than_one_sequence(config: Path, tmp_path: Path, world: int) -> None:
    with TokenStoreWriter(tmp_path / "short", vocab_size=300) as writer:
        writer.add_item(np.arange(10).tolist())
        writer.end_document()
    options = ("--data.paths", str(tmp_path / "short"))
    said = train(config, tmp_path / "run", *options, world=world)
    assert_refused(said, "10 tokens", "seq_len=32")


@pytest.mark.parametrize("world", [1, 2])
def test_vocabulary_larger_than_the_models(config: Path, tmp_path: Path, world: int) -> None:
    said = train(config, tmp_path / "run", "--model.vocab-size", "100", world=world)
    assert_refused(said, "vocab_size=100", "at least")


def test_unknown_names_and_wrong_types(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert_refused(bmforge("train", "gpt2-pretran"), "gpt2-pretran", "Did you mean 'gpt2-pretrain'")
    assert_refused(bmforge("trian"), "trian", "Did you mean 'train'")
    assert_refused(train(config, run, "--train.stpes", "3"), "--train.stpes", "--train.steps")
    assert_refused(train(config, run, "--train.steps", "many"), "--train.steps", "many")
    assert_refused(train(config, run, "--train.steps", "0"), "train.steps=0", "at least 1")
    for line, words in {
        "stpes = 3": ["train.stpes", "Did you mean 'steps'"],
        'steps = "many"': ["train.steps='many'", "must be int"],
        "steps = = 3": ["run.toml", "not valid TOML"],
    }.items():
        broken = tmp_path / "run.toml"
        text = config.read_text()
        broken.write_text(text.replace("steps = 6\n", line + "\n", 1))
        assert_refused(train(broken, run), *words)
    assert_refused(train(tmp_path / "no.toml", run), "no.toml", "does not exist")
    assert_refused(train(config, run, "--data.seq-len", "64"), "seq_len=64", "max_seq_len=32")
    assert not run.exists()


@pytest.mark.parametrize(("world", "layout"), [(1, "dp-replicate"), (3, "dp-replicate"), (3, "tp")])
def test_world_size_that_does_not_fit(config: Path, tmp_path: Path, world, layout) -> None:
    said = train(config, tmp_path / "run", f"--layout.{layout}", "2", world=world)
    assert_refused(said, f"with {world} processes", layout.replace("-", "_") + "=2")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("world", [1, 2])
def test_directory_of_another_run_or_of_none(config: Path, run_dir: Path, world: int) -> None:
    before = files_below(run_dir)
    said = train(config, run_dir, "--seed", "1", "--train.optim.lr", "0.5", world=world)
    assert_refused(
        said, str(run_dir), "another run", "seed: 0 in that run, now 1", "train.optim.lr"
    )
    quick = ("quickstart", "--run-dir", run_dir)
    assert_refused(bmforge(*quick, world=world), "contains another run", "empty or new directory")
    assert files_below(run_dir) == before
    (run_dir / "run.toml").unlink()
    before = files_below(run_dir)
    assert_refused(bmforge(*quick, world=world), "no run.toml", "empty or new directory")
    assert_refused(train(config, run_dir, world=world), "no run.toml", "empty or new directory")
    assert_refused(bmforge("quickstart", "--fresh", "--run-dir", run_dir), "is not removed")
    assert files_below(run_dir) == before


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoint_of_another_model(config: Path, run_dir: Path, tmp_path: Path, world) -> None:
    wider = tmp_path / "wider.toml"
    wider.write_text(config.read_text().replace("hidden_size = 32", "hidden_size = 48"))
    other = tmp_path / "other"
    assert train(wider, other, "--train.steps", "1")[0].status == 0
    shutil.rmtree(other / "checkpoints")
    shutil.copytree(run_dir / "checkpoints", other / "checkpoints")
    before = files_below(other / "checkpoints")
    said = train(wider, other, world=world)
    assert_refused(said, "embed.weight", "(300, 32)", "(300, 48)")
    assert files_below(other / "checkpoints") == before


def truncate(path: Path) -> None:
    shard = next(path.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.parametrize("world", [1, 2])
def test_truncated_checkpoints(config: Path, run_dir: Path, world: int) -> None:
    wanted = losses(run_dir)
    newest, older = find_checkpoints(run_dir / "checkpoints")
    truncate(newest)
    said = train(config, run_dir)
    assert said[0].status == 0, said
    assert newest.name in said[0].err
    assert "damaged" in said[0].err
    assert "resumed at step 3" in said[0].err
    assert losses(run_dir) == wanted
    for path in find_checkpoints(run_dir / "checkpoints"):
        truncate(path)
    assert older.exists()
    before = files_below(run_dir / "checkpoints")
    assert_refused(train(config, run_dir, world=world), "2 checkpoints", "damaged")
    assert files_below(run_dir / "checkpoints") == before
    assert losses(run_dir) == wanted


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoint_of_a_newer_format(config: Path, run_dir: Path, world: int) -> None:
    file = find_checkpoints(run_dir / "checkpoints")[0] / "manifest.json"
    content = json.dumps({**json.loads(file.read_bytes()), "version": 99}).encode()
    file.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    (file.parent / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
    before = files_below(run_dir / "checkpoints")
    assert_refused(train(config, run_dir, world=world), "version=99", "newer")
    assert files_below(run_dir / "checkpoints") == before


@pytest.mark.parametrize("limit_bytes", [20_000, 2_000])
def test_full_disk_while_saving(config: Path, run_dir: Path, tmp_path: Path, limit_bytes) -> None:
    """20 kB hold the metrics and no shard, 2 kB not even those; the run goes on, its status tells.

    All but the checkpoint is there at the end.
    """
    on = tmp_path / "longer.toml"
    on.write_text(config.read_text().replace("steps = 6\n", "steps = 12\n", 1))
    text = (run_dir / "run.toml").read_text()
    (run_dir / "run.toml").write_text(text.replace("total_steps = 6\n", ""))
    (said,) = train(on, run_dir, limit_bytes=limit_bytes)
    assert "step 12/12" in said.err
    assert "could not be saved" in said.err
    assert "The run continues" in said.err
    assert [p.name for p in find_checkpoints(run_dir / "checkpoints")][:1] == ["step-00000006"]
    assert said.status == 2
    if limit_bytes == 20_000:  # 2 kB hold no report either
        assert "could not be saved" in said.err.splitlines()[-1]
        assert "report: " in said.err
    (said,) = train(on, run_dir)
    assert said.status == 0, said
    assert "resumed at step 6" in said.err
    assert [row[0] for row in losses(run_dir)][-6:] == [7, 8, 9, 10, 11, 12]


def test_commands_on_what_is_not_there(tmp_path: Path) -> None:
    assert_refused(bmforge("report", tmp_path / "no-run"), "no-run")
    assert_refused(bmforge("info", "gpt2-smal"), "gpt2-smal", "gpt2-small")
    assert_refused(bmforge("generate", tmp_path, "--prompt", "a"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
