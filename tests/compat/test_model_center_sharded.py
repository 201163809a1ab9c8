"""Old models shared out over processes: ties, saving, and one step as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.model import (
    CPM1,
    GPT2,
    T5,
    Bert,
    BertConfig,
    CPM1Config,
    GPT2Config,
    T5Config,
)
from bmforge.models import AutoModel
from bmforge.parallel import shutdown_distributed
from bmforge.testing.pool import run_distributed

SIZES = {"vocab_size": 40, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 128}
ROWS = torch.arange(48).view(4, 12) * 7 % 40


def build(kind: str) -> Any:
    """Return a model; each half of its processes must have the same."""
    torch.manual_seed(5)
    if kind == "GPT2":
        return GPT2(GPT2Config(**SIZES, num_layers=2, position_size=16, dropout_p=0.0))
    if kind == "T5":
        layers = {"num_encoder_layers": 1, "num_decoder_layers": 2}
        return T5(T5Config(**SIZES, **layers, dropout_p=0.0))
    if kind == "CPM1":
        return CPM1(CPM1Config(**SIZES, num_layers=2))
    return Bert(BertConfig(**SIZES, num_layers=2, position_size=16, dropout_p=0.0))


def train(kind: str, folder: str) -> dict[str, Any]:
    """Two steps on this process's rows; then save in every way there is."""
    bmt.init_distributed(seed=0)
    model = build(kind)
    ids = ROWS[bmt.rank() :: bmt.world_size()]
    inputs = {"decoder_input_ids": ids.flip(1)} if kind == "T5" else {}
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    losses = []
    for _ in range(2):
        asked = {"output_logits": True} if kind == "Bert" else {}  # else made when read
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **asked)
        logits = out.logits
        loss = bmt.loss.FusedCrossEntropy()(logits.flatten(0, 1), ids.flatten())
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
        losses.append(bmt.sum_loss(loss).item())
    place = Path(folder) / f"{kind}-{bmt.world_size()}"
    if kind != "CPM1":  # which is ModelCenter's alone
        model.save_pretrained(place / "hf")
    place.mkdir(parents=True, exist_ok=True)
    bmt.save(model, str(place / "model.pt"))
    again = build(kind)
    bmt.load(again, str(place / "model.pt"))
    with torch.no_grad():
        both = [
            m.eval()(input_ids=ROWS, attention_mask=torch.ones_like(ROWS)).logits
            for m in (model, again)
            if not inputs
        ]
    same = all(torch.equal(logits, both[0]) for logits in both)
    return {"losses": losses, "same": same}


@pytest.mark.parametrize("kind", ["GPT2", "Bert", "T5", "CPM1"])
def test_two_processes_do_as_one(kind: str, tmp_path: Path) -> None:
    try:
        alone = train(kind, str(tmp_path))
    finally:
        shutdown_distributed()
    for found in run_distributed(train, 2, kind, str(tmp_path)):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["same"]
    if kind != "CPM1":
        compare_exports(kind, tmp_path)
    saved = [
        torch.load(tmp_path / f"{kind}-{world}" / "model.pt", weights_only=True) for world in (1, 2)
    ]
    assert {n: v.shape for n, v in saved[0].items()} == {n: v.shape for n, v in saved[1].items()}


def compare_exports(kind: str, tmp_path: Path) -> None:
    one, two = (
        AutoModel.from_pretrained(tmp_path / f"{kind}-{world}" / "hf").state_dict()
        for world in (1, 2)
    )
    assert set(one) == set(two)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=2e-5)


def test_a_tied_head_stays_tied() -> None:
    """One parameter under both names, before and after it is shared out, and in the zoo's form."""
    try:
        bmt.init_distributed(seed=0)
        model = build("GPT2")
        assert model.head.weight is model.model.embed.weight
        zoo = model.to_zoo()
        assert zoo.lm_head.weight is zoo.embed.weight
    finally:
        shutdown_distributed()
