"""Pretrain a language model from prepared text, on one process or many.

The whole run in one function: join the others, lay the model out, draw or load its weights, train,
evaluate, export. Run again in the same directory, it goes on where it stopped.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.config import config_to_dict
from bmforge.device import device_name
from bmforge.errors import ConfigError
from bmforge.logging import get_logger, log_to_file
from bmforge.models import Model, init_weights_, load_weights_
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.llama import Llama, LlamaConfig
from bmforge.parallel import (
    Layout,
    World,
    build_mesh,
    init_distributed,
    parallelize,
    run_on_first,
)
from bmforge.recipes.corpus import Corpus, CorpusConfig, open_corpus
from bmforge.recipes.run_dir import add_results, claim_run_dir, open_run_dir
from bmforge.train import EvalResult, TrainConfig, Trainer, WandbSink, write_report
from bmforge.train.trainer import Callback

__all__ = [
    "GPT2PretrainConfig",
    "LlamaPretrainConfig",
    "PretrainConfig",
    "PretrainResult",
    "pretrain",
]

# What may change when a run goes on: none of it changes what the model has learned so far.
_FREE = frozenset(
    [
        "run_dir",
        "layout",
        "recompute",
        "compile",
        "prefetch",
        "wandb_project",
        "export",
        "train.steps",
        "train.eval_every_steps",
        "train.save_every_steps",
        "train.keep_last",
        "train.keep_every_steps",
        "train.log_every_steps",
        "data.micro_batch_size",
        "data.prefetch_steps",
        "data.validation_batches",
    ]
)


@dataclass(kw_only=True)
class PretrainConfig:
    """Everything about a pretraining run.

    Args:
        run_dir: where it lives.
        init_from: a Hugging Face directory to start from; None draws the weights.
        seed: of the drawn weights.
        data: what it reads.
        train: the loop.
        layout: how it is divided over processes.
        recompute: recompute blocks in backward.
        compile: compile the blocks.
        prefetch: sharded units gathered ahead.
        export: write a Hugging Face directory ``run_dir/export`` at the end.
        wandb_project: also log to this Weights & Biases project.
    """

    run_dir: Path = Path("runs/pretrain")
    init_from: str | None = None
    seed: int = 0
    data: CorpusConfig = field(default_factory=CorpusConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    layout: Layout = field(default_factory=Layout)
    recompute: bool = False
    compile: bool = False
    prefetch: int = 1
    export: bool = True
    wandb_project: str | None = None


@dataclass(kw_only=True)
class GPT2PretrainConfig(PretrainConfig):
    """Pretrain a GPT-2; `model` is its size."""

    run_dir: Path = Path("runs/gpt2-pretrain")
    model: GPT2Config = field(default_factory=lambda: GPT2Config.preset("gpt2-small"))


@dataclass(kw_only=True)
class LlamaPretrainConfig(PretrainConfig):
    """Pretrain a Llama; `model` is its size."""

    run_dir: Path = Path("runs/llama-pretrain")
    model: LlamaConfig = field(default_factory=lambda: LlamaConfig.preset("llama-3.2-1b"))


@dataclass(frozen=True)
class PretrainResult:
    """What a run made: the model as it lies on this process, the step it is at, its evaluation."""

    model: Model
    step: int
    evaluation: EvalResult | None
    corpus: Corpus
    world: World


def pretrain(config: Any) -> PretrainResult:
    """Run, or go on with, a pretraining run.

    Args:
        config: a `GPT2PretrainConfig` or `LlamaPretrainConfig`.

    Raises:
        BmforgeError: a setting, the data, a checkpoint or the layout does not fit; said before
            training starts.
    """
    world = init_distributed()
    config.layout.check(world.size)
    _check_lengths(config)
    open_run_dir(config.run_dir, config, _FREE)
    log = log_to_file(config.run_dir / "log.txt") if world.rank == 0 else None
    try:
        return _run(config, world)
    finally:
        if log is not None:
            get_logger().removeHandler(log)
            log.close()


def _check_lengths(config: Any) -> None:
    if config.data.seq_len > config.model.max_seq_len:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is longer than model.max_seq_len="
            f"{config.model.max_seq_len}; shorten the one or lengthen the other."
        )


def _run(config: Any, world: World) -> PretrainResult:
    corpus = open_corpus(config.data, config.model.vocab_size, world)
    mesh = build_mesh(config.layout, world.device)
    model = _build_model(config, world, mesh)
    evaluator = corpus.make_evaluator(world, mesh)
    trainer = Trainer(
        model,
        corpus.loader,
        config.train,
        mesh=mesh,
        run_dir=config.run_dir,
        evaluator=evaluator,
        callbacks=_callbacks(config),
        flops_per_token=config.model.flops_per_token(config.data.seq_len),
    )
    get_logger().info(
        "%s, %d parameters, on %d x %s; run directory %s",
        type(config.model).__name__.removesuffix("Config"),
        sum(p.numel() for p in model.parameters()),
        world.size,
        device_name(world.device),
        config.run_dir,
    )
    claim_run_dir(config.run_dir, config)
    with corpus.loader:
        trainer.fit()
    finished = trainer.step >= config.train.steps
    evaluation = evaluator(model) if finished and evaluator is not None else None
    if finished and config.export:
        _export(model, config.run_dir / "export", corpus, world)
    if world.rank == 0:
        if evaluation is not None:
            _add_evaluation(config.run_dir, corpus, evaluation)
        get_logger().info("report: %s", write_report(config.run_dir))
    return PretrainResult(model, trainer.step, evaluation, corpus, world)


def _build_model(config: Any, world: World, mesh: Any) -> Model:
    family: type[Model] = GPT2 if isinstance(config.model, GPT2Config) else Llama
    model = family.from_config(config.model, device="meta")
    parallelize(
        model,
        config.layout,
        mesh=mesh,
        precision=config.train.precision,
        recompute=config.recompute,
        compile=config.compile,
        prefetch=config.prefetch,
    )
    if config.init_from is not None:
        return load_weights_(model, config.init_from, device=world.device)
    return init_weights_(model, config.seed, device=world.device)


def _callbacks(config: PretrainConfig) -> list[Callback]:
    project = config.wandb_project
    if project is None:
        return []
    sink = run_on_first(lambda: WandbSink(project, config.run_dir, config_to_dict(config)))
    return [] if sink is None else [lambda trainer, row: sink(trainer.step, row)]


def _export(model: Model, directory: Path, corpus: Corpus, world: World) -> None:
    if corpus.eos_id is not None:
        ends = {"bos_token_id": corpus.eos_id, "eos_token_id": corpus.eos_id}
        model.config = model.config.replace(raw={**model.config.raw, **ends})
    model.save_pretrained(directory, overwrite=True)
    if corpus.tokenizer_dir is not None and world.rank == 0:
        for file in corpus.tokenizer_dir.iterdir():
            shutil.copy2(file, directory / file.name)
    get_logger().info("exported to %s", directory)


def _add_evaluation(run_dir: Path, corpus: Corpus, evaluation: EvalResult) -> None:
    results = {"validation loss": {"model": evaluation.loss}}
    config = corpus.config
    # With resets the first token of a document is not predicted, so its bytes have no code length.
    whole = config.validation_batches is None and not config.reset_at_documents
    if corpus.validation_text_bytes and whole:
        bits = evaluation.bits_per_byte(corpus.validation_text_bytes)
        results["bits per byte"] = {"model": bits}
    add_results(run_dir, results)
