"""Opening prepared text for a run: directories of `bmforge prepare`, or bare token stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.data import DataLoader, Mixture, PackedDataset, TokenStore, check_vocabulary, iter_once
from bmforge.data.prepared import RECORD_NAME, read_record
from bmforge.errors import ConfigError
from bmforge.parallel import World, data_parallel_size
from bmforge.train import EvalResult, evaluate

__all__ = ["CorpusConfig", "Corpus", "open_corpus"]


@dataclass(kw_only=True)
class CorpusConfig:
    """What a run reads.

    Args:
        paths: directories made by `bmforge prepare`, or prefixes of .bin/.idx token stores; several
            are mixed.
        weights: share of each path, relative; empty weighs all the same.
        seq_len: tokens per row.
        global_batch_size: rows per optimizer step over all processes.
        micro_batch_size: rows per forward pass on one process.
        reset_at_documents: attention and positions start anew at every document.
        eos_id: token behind every document; None takes the prepared directory's.
        validation: prefix of a validation store; None takes the first prepared directory's.
        validation_batches: stop an evaluation after so many micro-batches; None reads all.
        seed: of the sample order.
        prefetch_steps: optimizer steps that are made ready ahead.
    """

    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    seq_len: int = 512
    global_batch_size: int = 32
    micro_batch_size: int = 8
    reset_at_documents: bool = False
    eos_id: int | None = None
    validation: str | None = None
    validation_batches: int | None = None
    seed: int = 0
    prefetch_steps: int = 2


@dataclass(frozen=True)
class Corpus:
    """An opened corpus: its loader, held-out rows, tokenizer, and what a document ends with."""

    loader: DataLoader
    validation: PackedDataset | None
    validation_text_bytes: int | None
    tokenizer_dir: Path | None
    eos_id: int | None
    config: CorpusConfig

    def make_evaluator(
        self, world: World, mesh: DeviceMesh | None
    ) -> Callable[[nn.Module], EvalResult] | None:
        """Return the function that evaluates a model on the held-out rows; None without any."""
        if self.validation is None:
            return None
        dataset, config = self.validation, self.config

        def run(model: nn.Module) -> EvalResult:
            batches = iter_once(
                dataset,
                config.micro_batch_size,
                world.rank,
                data_parallel_size(mesh),
                config.validation_batches,
                reset_at_documents=config.reset_at_documents,
            )
            return evaluate(model, batches, mesh=mesh, device=world.device)

        return run


def open_corpus(config: CorpusConfig, vocab_size: int, world: World) -> Corpus:
    """Open the token stores of a run and check that the model can read them.

    Raises:
        ConfigError: nothing to read, or weights that do not fit the paths.
        DataError: a store is missing, damaged, too short, or has ids beyond `vocab_size`.
    """
    if not config.paths:
        raise ConfigError(
            "data.paths is empty. Prepare a corpus with `bmforge prepare TEXT... --out DIR`, then "
            "give --data.paths DIR."
        )
    if config.weights and len(config.weights) != len(config.paths):
        raise ConfigError(
            f"data.weights has {len(config.weights)} numbers for {len(config.paths)} paths; "
            "give one for each, or none."
        )
    first = Path(config.paths[0])
    report = read_record(first)[0] if (first / RECORD_NAME).exists() else None
    eos_id = config.eos_id if config.eos_id is not None or report is None else report.eos_id
    parts = {}
    for number, path in enumerate(config.paths):
        store = TokenStore(_train_prefix(Path(path)))
        check_vocabulary(store, vocab_size)
        weight = config.weights[number] if config.weights else 1.0
        parts[str(path)] = (PackedDataset(store, config.seq_len, eos_id), weight)
    dataset = next(iter(parts.values()))[0] if len(parts) == 1 else Mixture(parts)
    held_out, text_bytes = config.validation, None
    if held_out is None and report is not None and report.validation_prefix is not None:
        held_out, text_bytes = str(report.validation_prefix), report.validation.text_bytes
    loader = DataLoader(
        dataset,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        rank=world.rank,
        world=world.size,
        seed=config.seed,
        reset_at_documents=config.reset_at_documents,
        prefetch_steps=config.prefetch_steps,
    )
    return Corpus(
        loader,
        None if held_out is None else PackedDataset(TokenStore(held_out), config.seq_len, eos_id),
        text_bytes,
        None if report is None else report.tokenizer_dir,
        eos_id,
        config,
    )


def _train_prefix(path: Path) -> Path:
    return path / "train" / "tokens" if path.is_dir() else path
