"""Padded calibration batches give the masks, integers and choices of the unpadded texts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import hf_bert, llama, mixtral
from torch import Tensor, nn

from bmforge.compress.batches import prepare_batches
from bmforge.compress.moefy import MoEfyConfig, moefy
from bmforge.compress.prune import PruneConfig, prune
from bmforge.compress.prune.importance import measure_importance
from bmforge.compress.quantize import quantize
from bmforge.compress.sensitivity import measure_sensitivity
from bmforge.errors import ConfigError
from bmforge.models import T5, T5Config
from bmforge.nn.packing import QuantSpec
from bmforge.testing import assert_close

LENGTHS = (9, 16, 4, 16, 12, 9, 7, 14) * 3


def t5() -> T5:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    return T5.from_config(T5Config(**sizes, num_heads=4, head_dim=8)).eval()


def hf_t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=61,
        d_model=32,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        d_kv=8,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config).eval()


def texts(has_targets: bool, side: str) -> tuple[list[Any], list[Any]]:
    """One padded batch, and the same sequences one by one."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(6, 60, (n,), generator=generator) for n in LENGTHS]
    width, single = max(LENGTHS) + 2, []
    ids = torch.randint(6, 60, (len(rows), width), generator=generator)  # padding may be anything
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        start = 0 if side == "right" else width - len(row)
        ids[number, start : start + len(row)] = row
        mask[number, start : start + len(row)] = 1
        target = row.flip(0)[: 3 + number % 3]
        labels[number, : len(target)] = target
        one = {"input_ids": row[None], "attention_mask": torch.ones(1, len(row)).long()}
        single.append(one | ({"labels": target[None]} if has_targets else {}))
    padded = {"input_ids": ids, "attention_mask": mask}
    return [padded | ({"labels": labels} if has_targets else {})], single


def prune_by(method: str) -> Callable[[Any, list[Any]], list[Tensor]]:
    def run(model: Any, batches: list[Any]) -> list[Tensor]:
        prune(model, PruneConfig(method=method, pattern="2:4"), batches=batches).finish_(model)  # type: ignore[arg-type]
        return [parameter != 0 for parameter in model.parameters()]

    return run


def quantize_by(method: str) -> Callable[[Any, list[Any]], list[Tensor]]:
    def run(model: Any, batches: list[Any]) -> list[Tensor]:
        # Rounded activations would amplify the order of summation in the blocks behind.
        spec = QuantSpec(8, 32, activations="float")
        quantize(model, spec, method=method, batches=batches)
        return [p for name, p in model.named_parameters() if name.endswith("packed")]

    return run


def importance(model: Any, batches: list[Any]) -> list[Tensor]:
    return list(measure_importance(model, batches, "activation").values())


def influence(model: Any, batches: list[Any]) -> list[Tensor]:
    return list(measure_importance(model, batches, "influence").values())


def experts(model: Any, batches: list[Any]) -> list[Tensor]:
    report = moefy(model, MoEfyConfig(num_experts=8, share=0.25, max_tokens=500), batches)
    return [torch.tensor(report.captured)]


def sensitivity(model: Any, batches: list[Any]) -> list[Tensor]:
    return [torch.tensor([one.loss for one in measure_sensitivity(model, batches)])]


RUNS = {
    **{name: prune_by(name) for name in ("wanda", "sparsegpt")},
    **{name: quantize_by(name) for name in ("smooth", "awq", "gptq")},
    **{"importance": importance, "influence": influence, "moefy": experts},
    "sensitivity": sensitivity,
}
MODELS = {"llama": llama, "t5": t5, "mixtral": mixtral, "hf bert": hf_bert, "hf t5": hf_t5}
ONLY_OURS = ("importance", "influence", "moefy")
QUICK = {("llama", "wanda"), ("t5", "gptq"), ("mixtral", "sparsegpt"), ("hf bert", "awq")}
QUICK |= {("llama", "importance"), ("t5", "smooth"), ("hf t5", "wanda"), ("t5", "moefy")}
CASES = [
    pytest.param(
        *(model, run, side),
        id=f"{model}-{run}-{side}",
        marks=() if side == "right" and (model, run) in QUICK else pytest.mark.long,
    )
    for model, run, side in itertools.product(MODELS, RUNS, ("right", "left"))
    if not (run in ONLY_OURS and model.startswith("hf")) and (model, run) != ("mixtral", "moefy")
]


@pytest.mark.parametrize(("build", "run", "side"), CASES)
def test_padding_changes_nothing(build: str, run: str, side: str) -> None:
    plain: Any = MODELS[build]()
    padded, single = texts("t5" in build, side)
    got = RUNS[run](copy.deepcopy(plain), padded)
    want = RUNS[run](copy.deepcopy(plain), single)
    assert len(got) == len(want) > 0
    if got[0].is_floating_point():
        # Weighted by tokens in one case and by batches in the other, so only close.
        rtol = 0.05 if run == "moefy" else 1e-3
        assert all(
            torch.allclose(a, b, rtol=rtol, atol=1e-4) for a, b in zip(got, want, strict=True)
        )
        return
    # Sums in another order may decide a tie otherwise.
    differing = sum(int((a != b).sum()) for a, b in zip(got, want, strict=True))
    assert differing <= 1e-2 * sum(a.numel() for a in got)


def test_batches_are_cropped() -> None:
    """The sequences of the split batches are those of the padded one, and keep their order."""
    model = t5()
    padded, single = texts(True, "right")
    parts = prepare_batches(model, padded)
    assert sum(part["input_ids"].shape[0] for part in parts) == len(LENGTHS)
    found = {
        tuple(row.tolist()): label.tolist()
        for part in parts
        for row, label in zip(part["input_ids"], part["labels"], strict=True)
    }
    want = {tuple(one["input_ids"][0].tolist()): one["labels"][0].tolist() for one in single}
    assert found == want
    assert all(bool(part["attention_mask"].all()) for part in parts)


def test_whole_batches_are_the_same_objects() -> None:
    model, ids = llama(), torch.randint(6, 60, (2, 8))
    (part,) = prepare_batches(model, [{"input_ids": ids, "attention_mask": torch.ones(2, 8)}])
    assert_close(part["input_ids"], ids, rtol=0, atol=0)


def test_rows_of_padding_are_left_out() -> None:
    model, ids = llama(), torch.randint(6, 60, (3, 8))
    mask = torch.ones(3, 8).long()
    mask[1] = 0
    (part,) = prepare_batches(model, [{"input_ids": ids, "attention_mask": mask}])
    assert torch.equal(part["input_ids"], ids[[0, 2]])
    with pytest.raises(ConfigError, match="contain only padding"):
        prepare_batches(model, [{"input_ids": ids, "attention_mask": torch.zeros(3, 8)}])


def test_gaps_are_refused() -> None:
    mask = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(ConfigError, match="between the real tokens of sequence 0"):
        prepare_batches(llama(), [{"input_ids": torch.ones(1, 4).long(), "attention_mask": mask}])
