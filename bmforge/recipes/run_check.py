"""The first two steps of every training run: checks of its options, and of its data.

`check_options` needs no data, and `read_data` no weights, so that a mistake is reported before any
work is done. A dry run makes these two steps only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import Any

from bmforge.errors import MissingDependencyError
from bmforge.files import check_input
from bmforge.parallel import World, run_on_first
from bmforge.recipes.adapters import resolve_adapter, set_rates
from bmforge.recipes.build import check_build, describe_model
from bmforge.recipes.compression_phases import has_phase, only_stores_answers
from bmforge.recipes.epochs import resolve_epochs
from bmforge.recipes.export import check_push
from bmforge.recipes.idle_options import refuse_idle_for, refuse_idle_options, refuse_idle_with
from bmforge.recipes.micro_batches import resolve_batch
from bmforge.recipes.resume_check import check_resumed_data
from bmforge.recipes.run_dir import check_new_run, check_overridden
from bmforge.recipes.start import check_length, complete_model_config, need_fields
from bmforge.train.best import BestEvaluation
from bmforge.train.optim.build import build_optimizers
from bmforge.train.schedule import build_schedule
from bmforge.value_ranges import check_values

__all__ = ["FREE_FIELDS", "check_options", "check_start", "read_data"]

# Fields that a resumed run may change, since they do not affect the steps trained so far. Data may
# be moved, because the loader's state contains a digest of it. `model` includes `model_changes`.
_FREE = """
    run_dir layout offload recompute compile prefetch wandb_project export train.steps
    train.eval_every_steps train.save_every_steps train.keep_last train.keep_every_steps
    train.log_every_steps train.profile_steps train.early_stopping_patience
    train.early_stopping_threshold train.num_epochs data.micro_batch_size data.prefetch_steps
    data.validation_batches data.paths data.validation model_changes new_head family
    epochs adapter.merge export_dtype push_to_hub search license timeout_s
"""
FREE_FIELDS = frozenset(_FREE.split())


def check_start(config: Any, *, reads_data: bool = True) -> None:
    """Check the options of a run that do not depend on its model, before anything is read.

    Args:
        config: the run's config.
        reads_data: whether the data files must exist.
    """
    check_values(config)
    if config.wandb_project is not None and find_spec("wandb") is None:
        raise MissingDependencyError("wandb", "wandb", "Weights & Biases logging")
    if config.push_to_hub is not None:
        check_push(config.push_to_hub, config.export)
    for name in ("paths", "validation") if reads_data else ():
        paths = getattr(config.data, name, None) or ()
        for path in [paths] if isinstance(paths, str) else paths:
            check_input(path, f"data.{name}")
    check_new_run(config.run_dir)
    check_overridden(config)


def check_options(
    config: Any,
    processes: int,
    check: Callable[[Any, int], None] | None,
    needs: Mapping[str, Any],
) -> Any:
    """Check the options of a run without its data; return the config with all defaults resolved.

    Args:
        config: the run's config.
        processes: number of processes.
        check, needs: as for `run_recipe`.

    Raises:
        ConfigError: an option is invalid, has no effect, or conflicts with another one.
    """
    config.layout.check(processes)
    config.loss_scale.check(config.train.precision)
    config = complete_model_config(config)
    refuse_idle_options(config, **needs)
    config = resolve_adapter(need_fields(config, needs))
    config = dataclasses.replace(config, data=resolve_batch(config, processes))
    if check is not None:
        check(config, processes)
    if hasattr(config.data, "seq_len"):
        check_length(config)
    check_build(config, processes)
    model, train = describe_model(config), config.train
    refuse_idle_for(model, config)
    if not has_phase(config):  # a phase adds weights and parameter groups
        optim = set_rates(train, config.adapter, model).optim
        build_optimizers(model, optim, offloaded=config.offload.is_on)
    if config.epochs is None:
        build_schedule(train.schedule, train.steps)
    return config


def read_data(
    config: Any, open_data: Callable[[Any, World], Any], rows: World, overridden: Collection[str]
) -> tuple[Any, Any]:
    """Read the data of a run, and check the options that depend on the data.

    Args:
        config: result of `check_options`.
        open_data: function that reads the data, see `run_recipe`.
        rows: data-parallel rank and size of this process.
        overridden: fields and tables of the run that the user has changed intentionally.

    Returns:
        the config with ``train.steps`` computed from ``epochs``, and the `TrainingData`

    Raises:
        BmforgeError: the data is invalid, an option has no effect on it, or a resumed run was
            trained on other data.
    """
    check = getattr(config.data, "check", None)
    if check is not None:
        check()
    data = open_data(config, rows)
    try:
        refuse_idle_with(data, config)
        if only_stores_answers(config):
            return config, data
        BestEvaluation(config.train, bool(data.held_out), has_run_dir=True)
        run_on_first(lambda: check_resumed_data(config.run_dir, data.loader, overridden))
        config = resolve_epochs(config, data.epoch_rows)
        build_schedule(config.train.schedule, config.train.steps)
    except BaseException:
        if data.close is not None:
            data.close()
        raise
    return config, data
