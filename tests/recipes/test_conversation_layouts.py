"""Tuning on conversations with two processes: the same losses, norms and adapter as with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_traits import TEMPLATES, write_bpe
from safetensors.torch import load_file
from small_runs import wait_for_all
from test_adapter_runs import write_chats, write_qwen3
from test_chat_after_tuning import build
from vision_models import make_image, write_vision_model

from bmforge.cli import main
from bmforge.testing import assert_close, run_distributed
from bmforge.train import read_metrics

ROWS = 4


def arguments(base: Path, chats: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        *("train", "conversations", "--model", str(base), "--data", str(chats)),
        *("--data.validation", str(chats), "--adapter", "lora", "--lr", "0.01", "--steps", "4"),
        *("--seq-len", "64", "--batch-size", str(ROWS), "--train.eval-every-steps", "2"),
        *("--train.load-best-model-at-end", "--run-dir", str(run_dir), *more),
    ]


def train_here(words: list[str]) -> list[tuple[float, ...]]:
    """Run the command on this process of the pool; return the figures of every step."""
    assert main(words) == 0
    wait_for_all()
    rows = read_metrics(Path(words[words.index("--run-dir") + 1]) / "metrics.jsonl")
    return [(row["loss"], row["grad_norm"], row.get("val_loss", 0.0)) for row in rows]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["--layout.zero", "3"]),
        (2, ["--layout.tp", "2"]),
        pytest.param(2, ["--layout.pp", "2"], marks=pytest.mark.long),
        pytest.param(2, ["--layout.zero", "3", "--base-dtype", "int8"], marks=pytest.mark.long),
        pytest.param(4, ["--layout.zero", "3", "--layout.tp", "2"], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_equals_one_process(world: int, layout: list[str], tmp_path: Path) -> None:
    check_layout(write_qwen3(tmp_path / "base"), world, layout, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layout", [["--layout.zero", "3"], ["--layout.tp", "2"]], ids=str)
@pytest.mark.parametrize("family", ["Llama", "MiniCPM", "T5"])
def test_families_equal_one_process(family: str, layout: list[str], tmp_path: Path) -> None:
    base = write_bpe(tmp_path / "base", TEMPLATES["plain ChatML"])
    build(family, vocab_size=400, init_std=0.05).save_pretrained(base)
    check_layout(base, 2, layout, tmp_path)


def check_layout(base: Path, world: int, layout: list[str], tmp_path: Path) -> None:
    """Compare the figures and the adapter of several processes with those of one."""
    chats = write_chats(tmp_path / "chats.jsonl")
    packed = layout[2:] if "--base-dtype" in layout else []
    alone = arguments(base, chats, tmp_path / "alone", "--micro-batch-size", str(ROWS), *packed)
    want = run_distributed(train_here, 1, alone)[0]
    assert len(want) == 4
    assert want[-1][2] < want[1][2]
    cut = arguments(base, chats, tmp_path / "cut", "--micro-batch-size", "1", *layout)
    for found in run_distributed(train_here, world, cut):
        for mine, theirs in zip(found, want, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
    got, expected = (
        load_file(tmp_path / name / "export" / "adapter_model.safetensors")
        for name in ("cut", "alone")
    )
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        # Adam divides by the gradient's size, so that rounding shows more in small gradients.
        assert_close(got[name], tensor, rtol=1e-3, atol=2e-4)


def write_mixed(folder: Path) -> Path:
    """Write conversations with and without images, so that half of the micro-batches have none."""
    make_image(40, 30, 1).save(folder / "a.png")
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    rows: list[Any] = []
    for number in range(4):
        texts = [{"type": "text", "text": f"What is {number}?"}]
        rows.append([*texts, image] if number % 2 else texts)
    file = folder / "mixed.jsonl"
    file.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": row},
                                     {"role": "assistant", "content": "Noise."}]}) + "\n"
            for row in rows
        )
    )  # fmt: skip
    return file


@pytest.mark.parametrize("adapter", [True, pytest.param(False, marks=pytest.mark.long)])
def test_some_micro_batches_have_no_images(adapter: bool, tmp_path: Path) -> None:
    """Both processes run the image encoder, also if only one of them has images."""
    pytest.importorskip("transformers")
    base = write_vision_model(tmp_path / "base", "qwen2_5_vl")
    data = write_mixed(tmp_path)
    words = [
        *("train", "conversations", "--model", str(base), "--data", str(data)),
        *("--data.validation", str(data), "--steps", "4", "--train.eval-every-steps", "2"),
        *("--seq-len", "128", "--batch-size", "2", "--lr", "0.001"),
        *(("--adapter", "lora") if adapter else ()),
    ]
    alone = [*words, "--micro-batch-size", "2", "--run-dir", str(tmp_path / "alone")]
    want = run_distributed(train_here, 1, alone)[0]
    cut = [*words, "--micro-batch-size", "1", "--layout.zero", "3"]
    for found in run_distributed(train_here, 2, [*cut, "--run-dir", str(tmp_path / "cut")]):
        for mine, theirs in zip(found, want, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
