"""Every recorded type of OpenDelta: logits, loss and gradients of its own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import CheckpointError
from bmforge.models import AutoModel
from bmforge.testing.golden import Golden
from bmforge.testing.tolerance import assert_close
from bmforge.tune.delta import Lora, load_delta
from bmforge.tune.delta.opendelta_format import to_our_names

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration", "gpt2": "GPT2LMHeadModel"}
TYPES = {
    "bert": (
        "lora lora_common adapter low_rank_adapter compacter compacter_not_factorized "
        "parallel_adapter bitfit prefix prefix_reparam soft_prompt"
    ),
    "t5": "lora adapter compacter parallel_adapter soft_prompt",
    "gpt2": "adapter parallel_adapter bitfit prefix soft_prompt",
}
CASES = [(model, kind) for model, kinds in TYPES.items() for kind in kinds.split()]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    found = {}
    for model, cls in FILES.items():
        golden = Golden(GOLDEN / f"delta_{model}.npz", atol=2e-5)
        del golden.config["class"]
        golden.write(tmp_path_factory.getbasetemp() / model, architectures=[cls], model_type=model)
        found[model] = golden
    return found


def arrays_of(model: str, kind: str) -> dict[str, Any]:
    with np.load(GOLDEN / f"delta_{model}.npz", allow_pickle=False) as arrays:
        start = f"{kind}/"
        return {n.removeprefix(start): arrays[n] for n in arrays.files if n.startswith(start)}


def tensors_of(arrays: dict[str, Any], kind: str) -> dict[str, Tensor]:
    start = f"{kind}:"
    return {n[len(start) :]: torch.from_numpy(a) for n, a in arrays.items() if n.startswith(start)}


def write_delta(directory: Path, arrays: dict[str, Any]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(str(arrays["config"]))
    torch.save(tensors_of(arrays, "weight"), directory / "pytorch_model.bin")


def loss_of_text(logits: Tensor, labels: Tensor, shifted: bool) -> Tensor:
    logits = logits[:, -labels.shape[1] :]
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_as_the_original(
    bases: dict[str, Golden], tmp_path_factory: Any, tmp_path: Path, model: str, kind: str
) -> None:
    golden, arrays = bases[model], arrays_of(model, kind)
    ours = AutoModel.from_pretrained(tmp_path_factory.getbasetemp() / model)
    assert json.loads(str(arrays["config"]))["backbone_class"] == FILES[model]
    write_delta(tmp_path / "delta", arrays)
    delta = load_delta(ours, tmp_path / "delta")
    given = {n: t.long() for n, t in golden.inputs.items()}
    labels = given["labels"]
    read = {n: t for n, t in given.items() if n != "labels"}
    if model == "t5":
        read["decoder_input_ids"] = F.pad(labels[:, :-1], (1, 0)).clamp(min=0)
    real = given["attention_mask"].bool() if model != "t5" else labels != -100
    want = tensors_of(arrays, "output")
    out, logits = ours(**given), ours(**read).logits
    start = logits.shape[1] - labels.shape[1]
    assert_close(logits[:, start:][real], want["logits"][:, start:][real], rtol=0, atol=2e-5)
    loss = loss_of_text(logits, labels, model == "gpt2")
    assert_close(loss, want["loss"], rtol=0, atol=2e-5)
    assert_close(out.loss, want["loss"], rtol=0, atol=2e-5)
    out.loss.backward()
    if kind == "prefix_reparam":
        return
    grads = to_our_names(ours, delta, tensors_of(arrays, "grad"), minus_base=False)
    got = dict(delta.named_parameters())
    assert set(got) == set(grads)
    for name, grad in grads.items():
        bound = 1e-5 * grad.abs().max().item() + 1e-7
        assert got[name].grad is not None
        assert_close({name: got[name].grad}, {name: grad}, rtol=0, atol=bound)


def test_a_damaged_file_changes_nothing(
    bases: dict[str, Golden], tmp_path_factory: Any, tmp_path: Path
) -> None:
    ours = AutoModel.from_pretrained(tmp_path_factory.getbasetemp() / "bert")
    arrays = arrays_of("bert", "lora")
    gone = next(n for n in arrays if n.startswith("weight:"))
    write_delta(tmp_path / "delta", {n: a for n, a in arrays.items() if n != gone})
    before = list(ours.state_dict())
    with pytest.raises(CheckpointError, match=r"missing: layers\.0"):
        load_delta(ours, tmp_path / "delta")
    assert list(ours.state_dict()) == before
    assert Lora(ours).count_parameters() == 2 * 2 * 8 * 64
