"""Quickstart: trains a small language model from raw text in minutes, with one command.

The steps are: prepare the text, pretrain a small GPT-2, compare it with n-gram models, generate
samples, export the model, and write a report.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from bmforge.data import PrepareReport, load_tokenizer, open_store, prepare
from bmforge.data.prepare.record import RECORD_NAME
from bmforge.errors import ConfigError, DataError
from bmforge.files import check_place
from bmforge.infer import generate
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.models.gpt2 import GPT2Config
from bmforge.parallel import init_distributed, run_on_first
from bmforge.parallel.distributed import restarts_failed
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.ngram import bigram_bits, unigram_bits
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.recipes.registry import read_config_values
from bmforge.recipes.run import RunResult
from bmforge.recipes.run_dir import add_results, check_free
from bmforge.settings import QuickstartConfig
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, write_report
from bmforge.train.run_lock import RunLock

__all__ = ["QuickstartConfig", "quickstart"]


def quickstart(config: QuickstartConfig) -> Path:
    """Run or resume the quickstart; return the path of its report.

    Raises:
        BmforgeError: the input is invalid, or `run_dir` was not created by the quickstart.
        KeyboardInterrupt: a signal stopped the training after its checkpoint was saved.
    """
    world = init_distributed()
    log = get_logger()
    data_dir = config.run_dir / "data"
    if config.fresh:
        run_on_first(lambda: _remove(config.run_dir))
    inputs = list(config.input) or None
    run_on_first(lambda: _check_run_dir(config.run_dir))
    first = run_on_first(lambda: prepare(inputs, data_dir, config.prepare))
    corpus = first or prepare(inputs, data_dir, config.prepare)
    log.info(
        "%s %s: %d documents (%d duplicates dropped), %d training tokens, %d held out (%.1f %% of "
        "the bytes)",
        "found prepared text in" if corpus.reused else "prepared text in",
        data_dir,
        corpus.documents,
        corpus.duplicates,
        corpus.train.tokens,
        corpus.validation.tokens,
        100 * corpus.held_out_ratio,
    )
    if corpus.validation_prefix is None:
        raise DataError(
            "there is no validation data, with which the model is evaluated: validation_fraction="
            f"{config.prepare.validation_fraction}. Raise validation_fraction, or use more text."
        )
    result = pretrain(_training(config, corpus, data_dir))
    if result.step < config.steps:
        log.info(
            "the run is at step %d of %d; run the same command to continue",
            result.step,
            config.steps,
        )
        if result.stopped and not restarts_failed():
            raise KeyboardInterrupt  # so that a shell script that runs this command stops too
        return config.run_dir / "report.html"
    if world.rank == 0:
        _compare(config, corpus, result)
        _sample(config, corpus)
        write_report(config.run_dir)
    return config.run_dir / "report.html"


class _TrainingConfig(GPT2PretrainConfig):
    """Config of the training run, whose intervals follow from the number of steps."""

    derived_fields = frozenset(f"train.{name}_every_steps" for name in ("eval", "save", "log"))


def _training(config: QuickstartConfig, corpus: PrepareReport, data_dir: Path) -> _TrainingConfig:
    """Return the config of the training run: two million weights, a few epochs."""
    # A resumed run keeps its warm-up, also with another number of steps.
    earlier = read_config_values(str(config.run_dir / "run.toml")).get("train", {})
    warmup = earlier.get("schedule", {}).get("warmup_steps", min(20, config.steps // 2))
    return _TrainingConfig(
        run_dir=config.run_dir,
        model=GPT2Config(
            vocab_size=corpus.vocab_size,
            hidden_size=192,
            num_layers=4,
            num_heads=6,
            max_seq_len=128,
        ),
        data=CorpusConfig(
            paths=(str(data_dir),), seq_len=128, global_batch_size=8, micro_batch_size=8
        ),
        train=TrainConfig(
            steps=config.steps,
            eval_every_steps=max(1, config.steps // 6),
            save_every_steps=max(1, config.steps // 6),
            log_every_steps=max(1, config.steps // 12),
            optim=OptimConfig(name="muon", lr=5e-3, weight_decay=0.1),
            schedule=ScheduleConfig(kind="cosine", warmup_steps=warmup, min_lr_ratio=0.1),
        ),
    )


def _compare(config: QuickstartConfig, corpus: PrepareReport, result: RunResult) -> None:
    """Add the n-gram baselines to results.json and log the comparison."""
    assert corpus.validation_prefix is not None
    assert result.evaluation is not None
    train, held_out = open_store(corpus.train_prefix), open_store(corpus.validation_prefix)
    num_bytes = corpus.validation.text_bytes
    bits = {
        "model": result.evaluation.bits_per_byte(num_bytes),
        "bigram": bigram_bits(train, held_out, corpus.vocab_size) / num_bytes,
        "unigram": unigram_bits(train, held_out, corpus.vocab_size) / num_bytes,
    }
    add_results(config.run_dir, {"bits per byte": bits})
    get_logger().info(
        "bits per byte on %d held-out bytes: model %.3f, bigram %.3f, unigram %.3f",
        num_bytes,
        bits["model"],
        bits["bigram"],
        bits["unigram"],
    )


def _sample(config: QuickstartConfig, corpus: PrepareReport) -> None:
    """Generate samples with the exported model, which also tests the export."""
    assert corpus.validation_prefix is not None
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    model = AutoModel.from_pretrained(config.run_dir / "export")
    held_out = open_store(corpus.validation_prefix)
    with (config.run_dir / "samples.jsonl").open("w", encoding="utf-8") as file:
        for number in range(config.samples):
            start = held_out.get(number % len(held_out))[:12].tolist()
            ids = tokenizer.encode(config.prompt) if config.prompt else start
            torch.manual_seed(number)
            out = generate(
                model,
                torch.tensor([ids]),
                max_new_tokens=100,
                do_sample=True,
                temperature=0.8,
                top_k=50,
                eos_token_id=corpus.eos_id,
            )
            new = [id for id in out[0, len(ids) :].tolist() if id != corpus.eos_id]
            prompt, text = tokenizer.decode(ids), tokenizer.decode_written(new)
            row = {"step": config.steps, "prompt": prompt, "text": text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            get_logger().info("sample %d: %s|%s", number + 1, prompt, text)


def _check_run_dir(run_dir: Path) -> None:
    """Raise `ConfigError`, before any work, if the run directory belongs to another program."""
    check_place(run_dir, "run_dir")
    if not (run_dir / "data" / RECORD_NAME).exists():
        problem = check_free(run_dir)
        if problem is not None:
            raise ConfigError(problem)


def _remove(run_dir: Path) -> None:
    """Remove an earlier quickstart; raise `ConfigError` for any other directory."""
    if not run_dir.exists():
        return
    if not (run_dir / "data" / RECORD_NAME).exists():
        raise ConfigError(
            f"{str(run_dir)!r} contains no data/{RECORD_NAME}, so it is not the directory of a "
            "quickstart and is not removed. Remove it yourself, or choose another --run-dir."
        )
    lock = RunLock(run_dir)
    lock.take()  # the directory of a live run is not removed
    try:
        shutil.rmtree(run_dir)
    finally:
        lock.release()
