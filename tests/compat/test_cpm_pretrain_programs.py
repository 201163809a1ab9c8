"""Programs of CPM-Pretrain's shape train as a plain loop over the same model does."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import cpm_pretrain_programs as programs
import pytest
import torch
from torch import Tensor, nn

from bmforge.compat.cpm_pretrain import (
    LayerSpec,
    PipelineModule,
    TiedLayerSpec,
    get_args,
    get_ltor_masks_and_position_ids,
    get_timers,
    get_tokenizer,
    initialize_megatron,
    mpu,
    pretrain,
)
from bmforge.compat.cpm_pretrain.training import Rows, _partition_stride
from bmforge.errors import ConfigError, DataError, ShapeError
from bmforge.parallel import shutdown_distributed
from bmforge.testing import run_distributed

STEPS, ROWS = 3, 8
LINE = """
    --num-layers 2 --hidden-size 8 --num-attention-heads 2 --max-position-embeddings 12
    --seq-length 12 --lr 0.02 --lr-decay-style cosine --min-lr 0.002 --warmup 0.34
    --clip-grad 0.5 --weight-decay 0.1 --eval-iters 1 --eval-interval 2 --seed 7 --log-interval 1
    --reset-position-ids --reset-attention-mask --eod-mask --local_rank 0
"""


def command_line(folder: Path | str, options: str, rows: int, steps: int = STEPS) -> list[str]:
    words = f"pretrain.py --batch-size {rows} --train-iters {steps} {LINE} {options}".split()
    return [*words, "--save", str(folder)]


def start(folder: str, options: str, rows: int, steps: int = STEPS) -> list[Any]:
    """Run the program with a command line; return what it has written of losses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command_line(folder, options, rows, steps))
        trainer = programs.main()
    assert trainer.step == steps
    torch.distributed.barrier()
    return read(Path(folder))


def read(folder: Path) -> list[Any]:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    names = ("loss", "grad_norm", "val_loss")
    return [[row[name] for name in names if name in row] for row in map(json.loads, rows)]


def mean_loss(model: nn.Module, texts: Any, first: int, count: int) -> Tensor:
    """The mean over one batch, without the engine."""
    batch = {"text": torch.stack([texts[n]["text"] for n in range(first, first + count)])}
    if isinstance(model, PipelineModule):
        inputs, labels = programs.to_inputs(batch)
        return programs.masked_mean(model(inputs), labels)
    return programs.forward_step(iter([batch]), model)[0]


def plain_loop(folder: Path, micro: int) -> list[Any]:
    """The same in plain torch, on one process: AdamW, clipping, and a cosine by its formula.

    Args:
        folder: is named, and not written to.
        micro: rows of a mean; a step's loss is the mean of those.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command_line(folder, "", micro))
        initialize_megatron(programs.extra)
    model, texts = programs.model_provider(), programs.Texts(STEPS * ROWS)
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)

    def loss_of(step: int) -> Tensor:
        firsts = range(step * ROWS, (step + 1) * ROWS, micro)
        return torch.stack([mean_loss(model, texts, n, micro) for n in firsts]).mean()

    found = []
    for step in range(STEPS):
        # One step of warm-up, then down to a tenth over the other two.
        rate = 1.0 if step == 0 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 1) / 2)) / 2
        for group in adam.param_groups:
            group["lr"] = 0.02 * rate
        loss = loss_of(step)
        adam.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        found.append([loss.item(), norm.item()])
        if step > 0:  # every second step, and after the last; each time the next rows
            with torch.no_grad():
                found[-1].append(loss_of(step - 1).item())
    return found


# Options, processes, micro-batches of a step over all of them.
LAYOUTS = {
    "one": ("", 1, 1),
    "accumulated": ("--gas 2", 1, 2),
    "cut by hand": ("--model-parallel-size 2", 2, 1),
    "replicated": ("--zero-stage 0", 2, 2),
    "cut and sharded": ("--model-parallel-size 2 --zero-stage 2", 4, 2),
    "pipeline": ("--pipe-parallel-size 2 --gas 2", 2, 2),
    "pipeline and sharded": ("--pipe-parallel-size 2 --gas 2", 4, 4),
    "pipeline, recomputed": ("--pipe-parallel-size 2 --gas 2 --checkpoint-activations", 2, 2),
}
LONG = ("cut and sharded", "pipeline and sharded", "pipeline, recomputed")
MARKED = [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in LAYOUTS]


@pytest.mark.parametrize("name", MARKED)
def test_a_program_trains_as_a_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, world, micro_batches = LAYOUTS[name]
    # The plain loop has one process, and so its own way to the same model.
    monkeypatch.setattr(programs, "is_pipeline", "pipe" in options)
    wanted = plain_loop(tmp_path / "none", ROWS // micro_batches)
    shutdown_distributed()
    rows = ROWS // micro_batches
    for found in run_distributed(start, world, str(tmp_path / "run"), options, rows):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-5)


def test_masks_and_positions_of_documents() -> None:
    ids = torch.tensor([[3, 0, 5, 6, 0, 7], [1, 2, 3, 4, 5, 6]])
    for resets in (False, True):
        hidden, counts, places = get_ltor_masks_and_position_ids(ids, 0, resets, resets, True)
        assert counts.tolist() == [[1, 0, 1, 1, 0, 1], [1] * 6]
        wanted = [[0, 1, 0, 1, 2, 0] if resets else [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
        assert places.tolist() == wanted
        document = [[0, 0, 1, 1, 1, 2], [0] * 6]
        for row in range(hidden.shape[0]):
            for here in range(6):
                for there in range(6):
                    apart = resets and document[row][here] != document[row][there]
                    assert bool(hidden[row, 0, here, there]) == (there > here or apart)


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """A longer command line in the same directory; the checkpoint holds whole parameters."""
    short = "--lr-decay-iters 4 --save-interval 2 --model-parallel-size 2"
    run_distributed(start, 2, str(tmp_path / "two"), short, 4, 2)
    (found, _) = run_distributed(start, 2, str(tmp_path / "two"), short, 4, 4)
    (wanted, _) = run_distributed(start, 2, str(tmp_path / "one"), short, 4, 4)
    assert [row[:2] for row in found] == [row[:2] for row in wanted]
    # What two processes have cut by hand, one goes on with.
    alone = short.replace("size 2", "size 1")
    (longer,) = run_distributed(start, 1, str(tmp_path / "two"), f"{alone}", 4, 6)
    assert len(longer) == 6


def test_interleaved_weights_go_on_as_they_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three matrices in one, every number of processes has another order."""
    monkeypatch.setattr(sys, "argv", command_line("none", "", 4))
    initialize_megatron(programs.extra)
    assert _partition_stride(mpu.ColumnParallelLinear(4, 8)) is None
    assert _partition_stride(mpu.ColumnParallelLinear(4, 12, stride=3)) == 1
    rows = Rows(programs.Texts(4), 1, 1, 0, 1)
    rows.strides = 1
    rows.load_state_dict({"step": 2, "strides": 1})
    assert rows.step == 2
    with pytest.raises(ConfigError, match="model-parallel-size 2, but this run has 1"):
        rows.load_state_dict({"step": 2, "strides": 2})
    shutdown_distributed()


def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[Exception], match: str, options: str = "", **changed: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command_line(tmp_path / "run", options, 4))
            for name, value in changed.items():
                patch.setattr(programs, name, value)
            with pytest.raises(kind, match=match):
                programs.main()
        assert not (tmp_path / "run" / "metrics.jsonl").exists()

    refused(DataError, "need 12", datasets=lambda counts: (programs.Texts(11), None, None))
    refused(DataError, "no dataset", datasets=lambda counts: (None, None, None))
    refused(ConfigError, "unsupported arguments: --load", "--load elsewhere")
    refused(
        ConfigError, "_megatron_batch_fn", model_provider=lambda: PipelineModule([nn.Linear(2, 2)])
    )
    shutdown_distributed()


def cut_in_a_pipeline(folder: str) -> None:
    options = "--model-parallel-size 2 --pipe-parallel-size 2 --gas 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command_line(folder, options, 4))
        with pytest.raises(ConfigError, match="has mpu layers"):
            pretrain(programs.datasets, programs.Model, programs.forward_step, programs.extra)


@pytest.mark.long
def test_what_is_cut_by_hand_has_no_pipeline(tmp_path: Path) -> None:
    run_distributed(cut_in_a_pipeline, 4, str(tmp_path))


def test_layers_of_a_pipeline() -> None:
    """Made when the pipeline is, called one after the other; what is tied is one."""
    calls: list[str] = []

    class Scale(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            calls.append("made")
            self.weight = nn.Parameter(torch.tensor(by))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    spec = TiedLayerSpec("a", Scale, 2.0)
    again = TiedLayerSpec("a", Scale, 2.0, forward_fn=lambda layer, x: x - layer.weight)
    specs = [spec, lambda x: x + 1, LayerSpec(Scale, by=5.0), Scale(3.0), again]
    assert calls == ["made"]
    model = PipelineModule(specs)
    assert calls == ["made"] * 3
    assert model(torch.tensor(1.0)).item() == ((1 * 2 + 1) * 5 * 3) - 2
    assert [p.item() for p in model.parameters()] == [2.0, 5.0, 3.0]
    assert model.layout_rules().zero_units == ("layers.2", "layers.3")
    assert repr(spec) == "TiedLayerSpec(Scale)"
    with pytest.raises(ConfigError, match="must be a subclass"):
        LayerSpec(Scale(1.0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layer 1 is 7"):
        PipelineModule([Scale(1.0), 7])  # type: ignore[list-item]
    model.layers.span = (0, 2, 5)  # type: ignore[assignment]
    assert model(torch.tensor(1.0)).stage_outputs == (torch.tensor(3.0),)
    model.layers["1"] = PipelineModule([lambda x: (x, None)])
    with pytest.raises(ShapeError, match="NoneType"):
        model(torch.tensor(1.0))


def test_timers_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", command_line("none", "--unknown 3", 4))
    initialize_megatron(programs.extra, {"tokenizer_type": "x", "lr": 5}, ignore_unknown_args=True)
    args = get_args()
    assert (args.tokenizer_type, args.lr, args.kv_hidden_size) == ("x", 0.02, 4)
    assert (args.ff_hidden_size, args.enc_seq_length, args.pipe_parallel_size) == (32, 12, 0)
    assert (args.rank, args.world_size, args.params_dtype) == (0, 1, torch.float32)
    with pytest.raises(ConfigError, match="--vocab-file"):
        get_tokenizer()
    timer = get_timers()("some")
    assert get_timers()("some") is timer
    with pytest.raises(ConfigError, match="not started"):
        timer.stop()
    timer.start()
    timer.stop()
    assert timer.elapsed() >= 0 == timer.elapsed()
    shutdown_distributed()
