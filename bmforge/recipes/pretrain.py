"""Pretraining of language models on prepared text, on one process or many; see `run.py`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError
from bmforge.models import Model
from bmforge.models.config_file import GENERATION_KEY, read_config_file
from bmforge.models.cpm1 import CPM1Config
from bmforge.models.formats.convert import copy_companion, find_companions
from bmforge.models.gpt2 import GPT2Config
from bmforge.models.hub import find_model
from bmforge.models.llama import LlamaConfig
from bmforge.parallel import World
from bmforge.recipes.export import SIDE_FILES
from bmforge.recipes.inputs.corpus import Corpus, CorpusConfig, open_corpus
from bmforge.recipes.inputs.vocabulary import find_own_tokenizer
from bmforge.recipes.run import Launch, Results, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.train import EvalResult

__all__ = [
    "CPM1PretrainConfig",
    "GPT2PretrainConfig",
    "LlamaPretrainConfig",
    "PretrainConfig",
    "pretrain",
]


@dataclass(kw_only=True)
class PretrainConfig(RunConfig):
    """Config of a pretraining run; the other fields are those of `RunConfig`.

    Args:
        data: training and validation text.
    """

    run_dir: Path = Path("runs/pretrain")
    data: CorpusConfig = field(default_factory=CorpusConfig)


@dataclass(kw_only=True)
class GPT2PretrainConfig(PretrainConfig):
    """Config for pretraining a GPT-2; `model` is its config."""

    run_dir: Path = Path("runs/gpt2-pretrain")
    model: GPT2Config = field(default_factory=lambda: GPT2Config.preset("gpt2-small"))


@dataclass(kw_only=True)
class LlamaPretrainConfig(PretrainConfig):
    """Config for pretraining a Llama; `model` is its config."""

    run_dir: Path = Path("runs/llama-pretrain")
    model: LlamaConfig = field(default_factory=lambda: LlamaConfig.preset("llama-3.2-1b"))


@dataclass(kw_only=True)
class CPM1PretrainConfig(PretrainConfig):
    """Config for pretraining a CPM-1; `model` is its config."""

    run_dir: Path = Path("runs/cpm1-pretrain")
    model: CPM1Config = field(default_factory=lambda: CPM1Config.preset("cpm1-small"))


def pretrain(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume a pretraining run.

    Args:
        config: a `PretrainConfig` whose `model` is the config of any decoder-only family.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, _check, head="language_model")


def _check(config: Any, processes: int) -> None:
    if config.data.reset_at_documents and config.adapter.kind == "soft-prompt":
        raise ConfigError(
            "data.reset_at_documents=True does not work with adapter.kind='soft-prompt', which is "
            "prepended to sequences and not to documents. Leave one of them out."
        )


def _open_data(config: Any, rows: World) -> TrainingData:
    corpus = open_corpus(config.data, config.model.vocab_size, rows, config.init_from)
    held_out = {}
    if corpus.validation is not None:
        held_out["validation"] = lambda: corpus.held_out_batches(rows)

    def figures(model: Model, evaluation: EvalResult) -> Results:
        return _bits_per_byte(corpus, evaluation)

    return TrainingData(
        corpus.loader,
        config.data.seq_len,
        held_out,
        save_tokenizer=lambda directory: _copy_tokenizer(
            _find_tokenizer(corpus, config), directory
        ),
        special_ids=_end_ids(corpus, config.init_from),
        figures=figures,
        close=corpus.loader.close,
    )


def _end_ids(corpus: Corpus, init_from: str | None) -> dict[str, Any]:
    """Return the special-token ids to export; the EOS id of an initial model is kept."""
    if corpus.eos_id is None:
        return {}
    if init_from is None:
        return {"bos_token_id": corpus.eos_id, "eos_token_id": corpus.eos_id}
    raw = read_config_file(find_model(init_from))
    ends = (raw.get("eos_token_id"), raw.get(GENERATION_KEY, {}).get("eos_token_id"))
    return {"eos_token_id": corpus.eos_id} if ends == (None, None) else {}


def _find_tokenizer(corpus: Corpus, config: Any) -> Path | None:
    """Return the directory of the tokenizer to export."""
    own = find_own_tokenizer(config.init_from) if config.data.tokenizer is None else None
    return own or corpus.tokenizer_dir


def _copy_tokenizer(source: Path | None, directory: Path) -> None:
    """Copy a tokenizer to an export; from a model directory, copy only the tokenizer files."""
    if source is None:
        return
    if not (source / "config.json").is_file():
        shutil.copytree(source, directory, dirs_exist_ok=True)
        return
    for name in find_companions(source):
        if name not in SIDE_FILES:
            copy_companion(source, directory, name)


def _bits_per_byte(corpus: Corpus, evaluation: EvalResult) -> Results:
    config = corpus.config
    # If documents are reset, a document's first token is not predicted, so its bytes have no code
    # length.
    is_complete = config.validation_batches is None and not config.reset_at_documents
    if not corpus.validation_text_bytes or not is_complete:
        return {}
    bits = evaluation.bits_per_byte(corpus.validation_text_bytes)
    return {"bits per byte": {"model": bits}}
