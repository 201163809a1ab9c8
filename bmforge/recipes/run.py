"""Steps that all training runs have in common.

A run checks its options, reads its data (`run_check.py`), and then parallelizes the model,
initializes or loads its weights, trains, evaluates and exports. A dry run is the first two steps. A
recipe is a config and a function that reads its data; a repeated call in the same directory resumes
the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from bmforge.config import config_to_dict
from bmforge.device import default_device, device_name
from bmforge.errors import CheckpointError
from bmforge.interrupts import before_output
from bmforge.logging import get_logger
from bmforge.models import Model
from bmforge.models.changes import Change
from bmforge.parallel import (
    FailureDetector,
    Layout,
    OffloadConfig,
    World,
    build_mesh,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    run_everywhere,
    run_on_first,
)
from bmforge.provenance import warn_of_licenses
from bmforge.recipes.adapters import AdapterConfig, log_trained, set_rates
from bmforge.recipes.base_weights import BaseDtype
from bmforge.recipes.build import build_model, describe_model
from bmforge.recipes.compression_phases import (
    add_method_groups,
    finish_phase,
    keep_answers,
    only_stores_answers,
)
from bmforge.recipes.export import export_run
from bmforge.recipes.run_check import FREE_FIELDS, check_options, check_start, read_data
from bmforge.recipes.run_dir import (
    add_results,
    check_run,
    lock_run_dir,
    overridden_fields,
    record_overrides,
    write_run_config,
)
from bmforge.recipes.run_provenance import find_provenance
from bmforge.recipes.start import family_of
from bmforge.train import (
    EvalResult,
    TrainConfig,
    Trainer,
    WandbSink,
    causal_lm,
    evaluate,
    write_report,
)
from bmforge.train.loss_scale import LossScaleConfig, build_scaler
from bmforge.train.objective import Batch, Objective
from bmforge.train.trainer import Callback, Loader

__all__ = [
    "Launch",
    "Results",
    "RunConfig",
    "RunResult",
    "TrainingData",
    "check_recipe",
    "family_of",
    "run_recipe",
]

Results = dict[str, dict[str, float]]


@dataclass(kw_only=True)
class RunConfig:
    """Base config of all runs; a recipe adds `model`, a family's config, and `data`.

    Args:
        run_dir: output directory for checkpoints, logs and the exported model.
        init_from: initial model, as a directory, hub id or short name. Its config gives the model's
            sizes, except for fields that are set in `model` (if None: random initialization).
        model_changes: names of the `model` fields that override the config of `init_from`; set by
            the command line (if None: the fields that differ from the recipe's defaults).
        new_head: initialize the task's head randomly if the model in `init_from` has none.
        family: model family to which `model` belongs; set by the command line and recorded in
            `run.toml`.
        changes: structural changes to the model, such as adapters or pruning, as JSON text or a
            JSON file. They are applied before the model is parallelized; new weights are
            initialized with `seed`.
        adapter: options of the adapter that is trained instead of the whole model.
        base_dtype: dtype of the frozen base weights in a run that trains an adapter; int8 and int4
            quantize them (QLoRA) (if None: the precision of the computation).
        epochs: number of passes over the training data; replaces train.steps (if None: train.steps
            steps, or 3 epochs for `bmforge train conversations` without --steps).
        freeze_base: train only the modules that `changes` attaches and, with `new_head`, the head.
        seed: random seed of the weight initialization.
        train: options for the training loop.
        layout: parallel layout.
        loss_scale: loss scaling for fp16.
        offload: offloading of the optimizer state and weights.
        recompute: recompute the activations of the blocks in the backward pass, which needs less
            memory but more time.
        compile: compile the blocks with torch.compile.
        prefetch: number of blocks whose ZeRO-sharded parameters are gathered ahead of the
            computation.
        export: export the trained model as a Hugging Face directory, ``run_dir/export``, at the
            end.
        export_dtype: dtype of the exported weights (if None: the dtype of the weights in
            `init_from`, or fp32 without `init_from`).
        push_to_hub: repository of the Hugging Face hub, OWNER/NAME, to which the export is
            uploaded; a new repository is private (if None: no upload).
        license: SPDX id of the license of the exported model, such as apache-2.0 (if empty: derived
            from the licenses of the base model and the data).
        wandb_project: Weights & Biases project to which metrics are logged (if None: none).
        timeout_s: time in seconds after which an unresponsive process counts as failed; all
            processes then exit with an error that names it.
        override: fields or tables of the config that may differ from the first start of a resumed
            run, such as train.optim.lr or data.global_batch_size; "data" also accepts a corpus that
            has grown, and restarts with a new sample order.
    """

    run_dir: Path = Path("runs/run")
    init_from: str | None = None
    model_changes: tuple[str, ...] | None = None
    new_head: bool = False
    family: str | None = None
    changes: tuple[Change, ...] = ()
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    base_dtype: BaseDtype | None = None
    epochs: float | None = None
    freeze_base: bool = False
    seed: int = 0
    train: TrainConfig = field(default_factory=TrainConfig)
    layout: Layout = field(default_factory=Layout)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    recompute: bool = False
    compile: bool = False
    prefetch: int = 1
    export: bool = True
    export_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    push_to_hub: str | None = None
    license: str = ""
    wandb_project: str | None = None
    timeout_s: float = 600.0
    override: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingData:
    """Training data of a run, and functions that depend on it; a recipe creates it.

    Args:
        loader: iterator over the micro-batches of every step.
        row_tokens: length of a training sequence in tokens, to compute the FLOPs of attention.
        held_out: dict from name of a held-out data set to a function that returns this process's
            batches of one epoch; every process gets the same number of batches.
        objective: loss function.
        save_tokenizer: function that writes the tokenizer to the export.
        special_ids: fields of the export's config.json for tokens and classes, such as
            ``eos_token_id`` and ``id2label``.
        figures: function (trained model, evaluation) -> further metrics; all processes call the
            function.
        close, begin: functions to call at the end of the run (close) and before training (begin);
            `begin` receives the parallelized model.
        epoch_rows: number of training sequences per epoch; None if the data has no epochs.
    """

    loader: Loader
    row_tokens: int
    held_out: Mapping[str, Callable[[], Iterable[Batch]]] = field(default_factory=dict)
    objective: Objective = causal_lm
    save_tokenizer: Callable[[Path], None] | None = None
    special_ids: Mapping[str, Any] = field(default_factory=dict)
    figures: Callable[[Model, EvalResult], Results] | None = None
    close: Callable[[], None] | None = None
    begin: Callable[[Model], object] = id
    epoch_rows: int | None = None


OpenData = Callable[[Any, World], TrainingData]
CheckOptions = Callable[[Any, int], None]


@dataclass(frozen=True)
class RunResult:
    """Result of a training run.

    Args:
        model: this process's shards of the model.
        step: last optimizer step.
        evaluation: final evaluation.
        world: all processes of the run.
        stopped: True if a signal ended the run before its last step, or after a dry run.
        config: config of the run, with all defaults resolved.
    """

    model: Model
    step: int
    evaluation: EvalResult | None
    world: World
    stopped: bool = False
    config: Any = None


# `run_recipe`, or for a dry run `check_recipe`. Every recipe ends with a call of it, so that a dry
# run makes all checks of a run.
Launch = Callable[..., RunResult]


def run_recipe(
    config: Any, open_data: OpenData, check: CheckOptions | None = None, **needs: Any
) -> RunResult:
    """Run or resume a training run.

    Args:
        config: a `RunConfig` with `model` and `data`.
        open_data: function (config, rows) -> `TrainingData`; `rows` is the data-parallel rank
            and size of this process. It reads no weights and writes nothing.
        check: function (config, number of processes) that raises `ConfigError` for options of the
            task, before the data is read.
        needs: fields of `model` that the task requires, such as the head.

    Raises:
        BmforgeError: a setting, the data, a checkpoint or the layout is invalid or unsuitable;
            raised before training starts.
        CheckpointError: the last checkpoint could not be written; raised after all other outputs
            are written.
    """
    with before_output():
        check_start(config)
        world = init_distributed(timeout_s=config.timeout_s)
        config = check_options(config, world.size, check, needs)
    with FailureDetector().watching(), lock_run_dir(config.run_dir, config, FREE_FIELDS):
        overridden = overridden_fields(config)
        config = run_everywhere(lambda: record_overrides(config.run_dir, config))
        return _run(config, open_data, world, overridden)


def check_recipe(
    config: Any,
    open_data: OpenData,
    check: CheckOptions | None = None,
    *,
    processes: int,
    reads_data: bool = True,
    **needs: Any,
) -> RunResult:
    """Make all checks of a training run, without training and without writing anything.

    Args:
        config, open_data, check, needs: as for `run_recipe`; without data.paths, only the options
            are checked.
        processes: number of processes of the run.
        reads_data: whether to read and encode the data.

    Returns:
        result with the model on the meta device, and `stopped` set.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    check_start(config, reads_data=reads_data)
    world = World(0, processes, default_device())
    config = check_options(config, processes, check, needs)
    check_run(config.run_dir, config, FREE_FIELDS)
    find_provenance(config)
    if config.data.paths and reads_data:
        rows = World(0, config.layout.row_groups(processes), world.device)
        config, data = read_data(config, open_data, rows, overridden_fields(config))
        if data.close is not None:
            data.close()
    return RunResult(describe_model(config), 0, None, world, stopped=True, config=config)


def _run(config: Any, open_data: OpenData, world: World, overridden: frozenset[str]) -> RunResult:
    with before_output():
        mesh = build_mesh(config.layout, world.device)
        rows = World(data_parallel_rank(mesh), data_parallel_size(mesh), world.device)
        provenance = find_provenance(config)
        config, data = read_data(config, open_data, rows, overridden)
    if only_stores_answers(config):
        return RunResult(keep_answers(config, data, world), 0, None, world)
    with before_output():
        model, job, base = build_model(config, world, mesh)
    log_trained(model, config)
    model.provenance = provenance
    data.begin(model)
    trainer = Trainer(
        model,
        data.loader,
        add_method_groups(set_rates(config.train, config.adapter, model), job),
        mesh=mesh,
        run_dir=config.run_dir,
        objective=data.objective if job is None else job.objective(data.objective),
        offload=config.offload,
        evaluator=_make_evaluator(data, world, mesh),
        callbacks=_callbacks(config) if job is None else [*_callbacks(config), job],
        flops_per_token=config.model.flops_per_token(data.row_tokens),
    )
    trainer.base, trainer.overridden = base, overridden
    if trainer.scaler is not None:
        trainer.scaler = build_scaler(config.loss_scale)
    get_logger().info(
        "%s, %d parameters, on %d x %s; run directory %s",
        type(model).__name__,
        sum(p.numel() for p in model.whole().parameters()),
        world.size,
        device_name(world.device),
        config.run_dir,
    )
    if write_run_config(config.run_dir, config, new_only=True):
        warn_of_licenses(config.run_dir, provenance)
    try:
        # run.toml is changed only after the run's checkpoint has been accepted.
        trainer.fit(on_start=lambda: write_run_config(config.run_dir, config))
        evaluation = None
        if trainer.ended or trainer.step >= config.train.steps:
            evaluation = _finish(config, trainer, data, world, mesh)
    finally:
        if data.close is not None:
            data.close()
        if trainer.state_offload is not None and not config.offload.weights:
            trainer.state_offload.close()
    if world.rank == 0:
        get_logger().info("report: %s", write_report(config.run_dir))
    run_on_first(lambda: _check_saved(trainer))
    return RunResult(model, trainer.step, evaluation, world, trainer.stopped, config)


def _check_saved(trainer: Trainer) -> None:
    """Raise `CheckpointError` if the last checkpoint could not be written.

    This is called after all other outputs of the run are written.
    """
    if trainer.save_error is not None:
        raise CheckpointError(
            f"the last checkpoint, at step {trainer.step}, could not be saved: "
            f"{str(trainer.save_error).rstrip('.')}. Free disk space, and run the same command "
            "again to resume from the newest checkpoint on disk."
        )


def _make_evaluator(
    data: TrainingData, world: World, mesh: DeviceMesh | None, *names: str
) -> Callable[[Any], EvalResult] | None:
    """Return a function that evaluates a model on all held-out data sets, or those in `names`."""
    if not data.held_out:
        return None
    parts = [data.held_out[name] for name in names or data.held_out]

    def run(model: Any) -> EvalResult:
        batches = chain.from_iterable(part() for part in parts)
        return evaluate(model, batches, objective=data.objective, mesh=mesh, device=world.device)

    return run


def _callbacks(config: Any) -> list[Callback]:
    project = config.wandb_project
    if project is None:
        return []
    sink = run_on_first(lambda: WandbSink(project, config.run_dir, config_to_dict(config)))
    return [] if sink is None else [lambda trainer, row: sink(trainer.step, row)]


def _finish(
    config: Any, trainer: Trainer, data: TrainingData, world: World, mesh: DeviceMesh | None
) -> EvalResult | None:
    """Evaluate the trained model and export it."""
    if trainer.state_offload is not None:
        trainer.state_offload.restore_()
    model: Any = finish_phase(trainer, config.run_dir)
    evaluation = None
    if trainer.evaluator is not None:
        evaluation = trainer.evaluator(model)
        losses = {"model": evaluation.loss}
        for name in data.held_out if len(data.held_out) > 1 else ():
            part = _make_evaluator(data, world, mesh, name)
            assert part is not None
            losses[name] = part(model).loss
        more = {} if data.figures is None else data.figures(model, evaluation)
        if world.rank == 0:
            add_results(config.run_dir, {"validation loss": losses, **more})
    if config.export:
        export_run(model, config, data.save_tokenizer, dict(data.special_ids), world)
    return evaluation
