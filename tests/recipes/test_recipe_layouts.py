"""GPT-2 and T5 in tensor x pipeline x data parallel: the recipes' losses are one process's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from small_runs import CHARACTERS, SIZES, settings, wait_for_all, write_counting

from bmforge.data import TokenStore, TokenStoreWriter
from bmforge.models.gpt2 import GPT2Config
from bmforge.models.t5 import T5Config
from bmforge.parallel import Layout
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.inputs.examples import ExampleConfig
from bmforge.recipes.pretrain import GPT2PretrainConfig
from bmforge.recipes.registry import RECIPES
from bmforge.recipes.spans import T5SpansConfig
from bmforge.testing import run_distributed
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, Trainer, read_metrics


def write_t5_vocabulary(folder: Path, sentinels: int = 8) -> Path:
    """A tokenizer of characters, with sentinels that count down from the vocabulary's end."""
    blanks = (f"<extra_id_{i}>" for i in reversed(range(sentinels)))
    names = ["<pad>", "</s>", "<unk>", *CHARACTERS, *blanks]
    vocabulary = {name: id for id, name in enumerate(names)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


def small(family: str, folder: Path) -> Any:
    """A run of three steps of 8 rows."""
    sizes = {**SIZES, "num_layers": 2}
    store = str(write_counting(folder / "tokens", 3, end=1))
    common = {"paths": (store,), "seq_len": 12, "global_batch_size": 8, "micro_batch_size": 1}
    train = settings(3)
    if family == "gpt2":
        data = CorpusConfig(**common, validation=store, eos_id=1)
        model = GPT2Config(vocab_size=48, max_seq_len=16, **sizes)
        return GPT2PretrainConfig(model=model, data=data, train=train)
    vocabulary = str(write_t5_vocabulary(folder / "vocabulary"))
    spans = ExampleConfig(**common, validation=(store,), tokenizer=vocabulary)
    model = T5Config(vocab_size=48, intermediate_size=48, head_dim=16, **sizes)
    return T5SpansConfig(model=model, data=spans, train=train, shortest=4)


def run(recipe: str, config: Any) -> list[tuple[float, float]]:
    """Run a recipe on this process; return loss and gradient norm of every step."""
    RECIPES[recipe].run(config)
    wait_for_all()
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    return [(row["loss"], row["grad_norm"], row.get("val_loss", 0.0)) for row in rows]


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.long), "t5"])
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(4, Layout(tp=2, pp=2), id="tp2xpp2"),
        pytest.param(8, Layout(tp=2, pp=2, zero=2), id="2x2x2", marks=pytest.mark.long),
        pytest.param(
            8, Layout(tp=2, pp=2, sequence_parallel=True), id="2x2x2-sp", marks=pytest.mark.long
        ),
    ],
)
def test_equals_one_process(family: str, world: int, layout: Layout, tmp_path: Path) -> None:
    """Loss, gradient norm and validation loss; the export is that of the whole model."""
    recipe, config = f"{family}-pretrain", small(family, tmp_path)
    alone = dataclasses.replace(config, run_dir=tmp_path / "alone", export=False)
    want = run_distributed(run, 1, recipe, alone)[0]
    assert want[-1][0] < want[0][0]
    rows = world // 4
    data = dataclasses.replace(config.data, grad_accum_steps=8 // rows, global_batch_size=32)
    cut = dataclasses.replace(config, run_dir=tmp_path / "cut", layout=layout, data=data)
    for found in run_distributed(run, world, recipe, cut):
        for mine, theirs in zip(found, want, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
    assert (tmp_path / "cut" / "export" / "model.safetensors.index.json").is_file()


def run_one_step(config: Any) -> tuple[float, float, int]:
    """Begin a run, and leave it after one step; return loss, learning rate and rows."""
    fit = Trainer.fit
    seen: list[Trainer] = []

    def fit_once(trainer: Trainer, **options: Any) -> Trainer:
        seen.append(trainer)
        return fit(trainer, until_step=1, **options)

    Trainer.fit = fit_once  # type: ignore[method-assign]
    try:
        result = RECIPES["t5-pretrain"].run(config)
    finally:
        Trainer.fit = fit  # type: ignore[method-assign]
    assert result.step == 1
    wait_for_all()
    (row,) = read_metrics(config.run_dir / "metrics.jsonl")
    return row["loss"], row["lr"], seen[0].loader.state_dict()["samples"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_run_t5_as_published(tmp_path: Path) -> None:
    """run_t5.sh's settings with 12 layers, on 4 processes; one of its 320000 steps."""
    layout = Layout(tp=2, pp=2)
    store = write_counting(tmp_path / "tokens", 3, end=1, count=900)
    long = tmp_path / "long"
    tokens = TokenStore(store).tokens
    with TokenStoreWriter(long, vocab_size=512) as writer:
        for first in range(0, len(tokens) - 1024, 1024):
            writer.add_item([*tokens[first : first + 1023].tolist(), 1])
            writer.end_document()
    vocabulary = write_t5_vocabulary(tmp_path / "vocabulary", sentinels=100)
    config = T5SpansConfig(
        run_dir=tmp_path / "run",
        export=False,
        layout=layout,
        target_len=384,
        model=T5Config(
            vocab_size=512,
            hidden_size=128,
            head_dim=16,
            intermediate_size=256,
            num_layers=12,
            num_heads=8,
            max_seq_len=1024,
            dropout=0.1,
        ),
        data=ExampleConfig(
            paths=(str(long),),
            tokenizer=str(vocabulary),
            split=(949, 50, 1),
            seq_len=1024,
            micro_batch_size=1,
            grad_accum_steps=16,
            validation_batches=10,
        ),
        train=TrainConfig(
            steps=320000,
            grad_clip=1.0,
            optim=OptimConfig(lr=1.5e-4, weight_decay=0.01, betas=(0.9, 0.999)),
            schedule=ScheduleConfig(kind="cosine", warmup_steps=3200, min_lr_ratio=1e-5 / 1.5e-4),
        ),
    )
    found = run_distributed(run_one_step, 4, config, timeout_s=850.0)
    for loss, lr, sequences in found:
        assert 3 < loss < 12
        assert lr == pytest.approx(1.5e-4 / 3200)
        assert sequences == 16
