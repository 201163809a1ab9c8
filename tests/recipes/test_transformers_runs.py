"""A model without a native family trains from the command line, and its export opens."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from bmforge.cli import main
from bmforge.data import TokenStoreWriter
from bmforge.models import AutoModel
from bmforge.models.transformers import TransformersModel
from bmforge.models.transformers.small_copy import VOCABULARY, build_small_copy
from bmforge.train import read_metrics

transformers = pytest.importorskip("transformers")

LOOP = """
    --train.optim.lr 0.02 --train.steps 12 --train.save-every-steps None --data.seq-len 24
    --train.schedule.kind constant --data.global-batch-size 4 --data.micro-batch-size 2
"""


def test_pretraining_continues_from_a_directory(tmp_path: Path) -> None:
    start, run = tmp_path / "start", tmp_path / "run"
    build_small_copy(
        transformers.AutoConfig.for_model("ernie4_5"), "language_model"
    ).save_pretrained(start)
    with TokenStoreWriter(tmp_path / "tokens", vocab_size=VOCABULARY) as writer:
        for number in range(60):
            writer.add_item([5 + (number + 3 * place) % 100 for place in range(40)])
            writer.end_document()
    command = ["train", "pretrain", "--model", str(start), "--run-dir", str(run)]
    with redirect_stdout(io.StringIO()):
        status = main([*command, "--data.paths", str(tmp_path / "tokens"), *LOOP.split()])
        assert main(["info", str(run / "export")]) == 0
    assert status == 0
    losses = [row["loss"] for row in read_metrics(run / "metrics.jsonl")]
    assert np.mean(losses[-2:]) < 0.9 * np.mean(losses[:2]), losses
    assert isinstance(AutoModel.from_pretrained(run / "export"), TransformersModel)
