"""Checks of `transformers_table.py`: small random models against plain transformers."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from bmforge.errors import ConfigError, DistributedError
from bmforge.infer import generate
from bmforge.models import AutoModel
from bmforge.models.pack import quantize_
from bmforge.models.transformers.small_copy import build_small_copy
from bmforge.nn.packed_store import PackedStore
from bmforge.parallel import Layout
from bmforge.testing.foreign_inputs import Example, NoExampleError, find_example
from bmforge.testing.foreign_layouts import compare_layout, compare_stages, default_config
from bmforge.tune.delta import Lora

__all__ = ["CAUSAL_CHECKS", "HEAD_CHECKS", "checks_of", "measure_type"]

_NEW = 6  # generated tokens
_LEAST_PACKED = 0.95
_SECONDS = 120  # per check


class Sample:
    """A small model of one type, plain and opened by bmforge.

    Args:
        kind: `model_type`.
        head: key of `library.AUTO_CLASSES`.
        directory: empty directory for the model's files.
    """

    def __init__(self, kind: str, head: str, directory: Path) -> None:
        self.directory = directory
        config = default_config(kind)
        if head == "language_model":
            self.plain, ids = build_small_copy(config, head), tokens(2, 12, seed=5)
            self.example = Example({"input_ids": ids, "labels": ids}, "text")
        else:
            _set_ids_(config)  # classifiers read the padding token's id
            self.plain = build_small_copy(config, head)
            _set_ids_(self.plain.config)
            self.example = find_example(self.plain, head)
        self.plain.save_pretrained(directory / "plain")

    def open(self) -> Any:
        """Open the model by the backend."""
        return AutoModel.from_pretrained(self.directory / "plain", backend="transformers")


def _set_ids_(config: Any) -> None:
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        part.pad_token_id, part.eos_token_id = 0, 2
    if getattr(config, "decoder_start_token_id", None) is None and config.is_encoder_decoder:
        config.decoder_start_token_id = 0


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    """Return random token ids."""
    return torch.randint(5, 150, (rows, count), generator=torch.Generator().manual_seed(seed))


def check_weights(sample: Sample) -> str:
    """Logits and saved files are bit for bit those of transformers."""
    ours, ids = sample.open(), tokens(2, 20)
    with torch.no_grad():
        if not torch.equal(ours(ids).logits, sample.plain(input_ids=ids).logits):
            return "no: logits differ"
    ours.save_pretrained(sample.directory / "ours")
    before = load_file(sample.directory / "plain" / "model.safetensors")
    after = load_file(sample.directory / "ours" / "model.safetensors")
    same = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    return "yes" if same else "no: saved tensors differ"


def check_loss(sample: Sample) -> str:
    """Loss with a given number of items and all gradients are those of plain cross-entropy."""
    ours, ids = sample.open(), tokens(2, 17, seed=1)
    labels = ids.clone()
    labels[0, :6] = -100
    sample.plain.zero_grad()
    logits = sample.plain(input_ids=ids).logits[:, :-1].flatten(0, 1)
    wanted = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / 50
    wanted.backward()
    loss = ours(ids, labels=labels, num_items_in_batch=50.0).loss
    loss.backward()
    if not torch.allclose(loss, wanted, rtol=1e-5):
        return f"no: loss {float(loss):.5f}, not {float(wanted):.5f}"
    return _compare_gradients(ours, sample.plain)


def _compare_gradients(ours: Any, plain: Any) -> str:
    """Return "yes" if all gradients are equal; transformers' fixed tables have none."""
    wanted = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        zero = torch.zeros_like(parameter)
        got = zero if parameter.grad is None else parameter.grad
        need = zero if wanted[name].grad is None else wanted[name].grad
        if not torch.allclose(got, need, rtol=1e-3, atol=2e-5 * max(1e-2, float(need.abs().max()))):
            return f"no: gradient of {name}"
    return "yes"


def check_head_loss(sample: Sample) -> str:
    """Loss and all gradients are those of transformers."""
    ours, inputs = sample.open().eval(), sample.example.inputs
    sample.plain.zero_grad()
    wanted = sample.plain(**inputs).loss
    wanted.backward()
    loss = ours(**inputs).loss
    loss.backward()
    if not torch.allclose(loss, wanted, rtol=1e-5):
        return f"no: loss {float(loss):.5f}, not {float(wanted):.5f}"
    return _compare_gradients(ours, sample.plain)


def check_packing(sample: Sample) -> str:
    """A packed row has the logits of its documents alone, or is refused."""
    ours = sample.open()
    first, second = tokens(1, 9, seed=2), tokens(1, 13, seed=3)
    with torch.no_grad():
        alone = torch.cat([sample.plain(input_ids=ids).logits for ids in (first, second)], 1)
        documents = torch.tensor([[0] * 9 + [1] * 13])
        packed = ours(torch.cat((first, second), 1), document_ids=documents).logits
    return "yes" if torch.allclose(packed, alone, atol=1e-3) else "no: documents see each other"


def check_generation(sample: Sample) -> str:
    """Rows of two lengths in a batch continue as each alone, computed without a cache."""
    ours, ids = sample.open(), tokens(2, 8, seed=4)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    plain = {"eos_token_id": (), "forced_eos_token_id": None}
    got = generate(ours, ids, mask, max_new_tokens=_NEW, **plain)
    for row, own, left in zip(ids, got, (mask == 0).sum(1).tolist(), strict=True):
        alone = row[None, left:]
        with torch.no_grad():
            for _ in range(_NEW):
                chosen = sample.plain(input_ids=alone).logits[:, -1].argmax(-1, keepdim=True)
                alone = torch.cat((alone, chosen), 1)
        if not torch.equal(own[left:], alone[0]):
            return "no: tokens differ"
    return "yes"


def check_lora(targets: list[str]) -> Callable[[Sample], str]:
    """Return the check that adapters get gradients if the weights of their layers get some."""

    def check(sample: Sample) -> str:
        whole, ours = sample.open(), sample.open()
        whole(**sample.example.inputs).loss.backward()
        reached = {n.rpartition(".")[0] for n, p in whole.named_parameters() if p.grad is not None}
        Lora(ours, targets=targets, rank=2)
        ours(**sample.example.inputs).loss.backward()
        trained = [(n, p) for n, p in ours.named_parameters() if p.requires_grad]
        idle = [n for n, p in trained if p.grad is None and _base_of(n) in reached]
        return (
            "yes"
            if trained and not idle
            else f"no: {len(idle)} adapter parameters have no gradient"
        )

    return check


def _base_of(parameter: str) -> str:
    """Return the name of the layer that an adapter's parameter is attached to."""
    return parameter.rpartition(".")[0].rpartition(".")[0]


def check_int8(sample: Sample) -> str:
    """Packed layers hold nearly all weights of the blocks, and the model still runs."""
    ours = sample.open()
    blocks = tuple(f"{stack}." for stack in ours.structure.stacks)
    whole = sum(
        p.numel() for n, p in ours.named_parameters() if n.startswith(blocks) and p.dim() > 1
    )
    quantize_(ours, "int8")
    stores = {n for n, module in ours.named_modules() if isinstance(module, PackedStore)}
    left = sum(
        p.numel()
        for n, p in ours.named_parameters()
        if n.startswith(blocks) and p.dim() > 1 and n.rpartition(".")[0] not in stores
    )
    with torch.no_grad():
        if not bool(ours(**sample.example.inputs).loss.isfinite()):
            return "no: not finite"
    share = 1 - left / whole
    return "yes" if share >= _LEAST_PACKED else f"part: {share:.0%} of the block weights"


def check_layout(layout: Layout, *, own_batch: bool = False) -> Callable[[Sample], str]:
    """Return the check that a layout of two processes has the gradients of one.

    Args:
        layout: layout of two processes.
        own_batch: True for the sample's inputs, False for four rows of token ids.
    """

    def check(sample: Sample) -> str:
        batch = sample.example.inputs if own_batch else None
        refusal = compare_layout(sample.directory / "plain", layout, batch=batch)
        return f"refused: {' '.join(refusal.split())[:200]}" if refusal else "yes"

    return check


def check_stages(sample: Sample) -> str:
    """Two halves of the blocks, run one after the other, have the gradients of the model."""
    refusal = compare_stages(sample.directory / "plain")
    return f"refused: {refusal}" if refusal else "yes"


Checks = dict[str, Callable[[Sample], str]]
CAUSAL_CHECKS: Checks = {
    "weights": check_weights,
    "loss": check_loss,
    "packed rows": check_packing,
    "generation": check_generation,
    "LoRA q, v": check_lora(["attn.q", "attn.v"]),
    "LoRA all-linear": check_lora(["all-linear"]),
    "int8": check_int8,
    "TP 2": check_layout(Layout(tp=2)),
    "PP 2": check_stages,
    "EP 2": check_layout(Layout(zero=3, ep=2)),
}
HEAD_CHECKS: Checks = {
    "loss": check_head_loss,
    "LoRA": check_lora(["all-linear"]),
    "int8": check_int8,
    "ZeRO-3": check_layout(Layout(zero=3), own_batch=True),
}


def measure_type(kind: str, head: str, names: Iterable[str]) -> dict[str, str]:
    """Return the results of the named checks of one type with one head."""
    checks = checks_of(head)
    signal.signal(signal.SIGALRM, _stop)
    with tempfile.TemporaryDirectory() as folder:
        try:
            signal.alarm(_SECONDS)
            sample = Sample(kind, head, Path(folder))
        except NoExampleError as error:
            return {"built": "yes", "inputs": "none", **dict.fromkeys(names, f"no: {error}")}
        except Exception as error:  # any code of transformers may fail at small sizes
            return {"built": f"no: {_one_line(error)}"}
        row = {"built": "yes", "inputs": sample.example.modality}
        for name in names:
            signal.alarm(_SECONDS)
            try:
                row[name] = checks[name](sample)
            except ConfigError as error:
                row[name] = f"refused: {_one_line(error)}"
            except Exception as error:
                row[name] = f"error: {_one_line(error)}"
            signal.alarm(0)
        return row


def _stop(*_: Any) -> None:
    raise TimeoutError(f"longer than {_SECONDS} s")


def checks_of(head: str) -> Checks:
    """Return the checks of a head."""
    return CAUSAL_CHECKS if head == "language_model" else HEAD_CHECKS


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, DistributedError):  # the last line of a worker's traceback
        text = text.strip().splitlines()[-1]
    return f"{type(error).__name__}: {' '.join(text.split())[:160]}"
