"""Compresses a model with a recipe, in phases that each write a model directory.

`CompressConfig` is divided into phases (`compress/phases.py`). A phase with training steps is a
run of the task, as `bmforge train` would start it, with the phase's methods attached to its model;
a phase without steps is applied immediately. A repeated call skips finished phases and resumes the
run.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bmforge.compress import CompressConfig, CompressReport, compress
from bmforge.compress.phases import Phase, PhaseSteps, split_phases
from bmforge.compress.report import PhaseResults, measure_sizes
from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.host_tuning import return_freed_memory
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.models.formats.compressed_write import save_compressed
from bmforge.models.formats.convert import find_companions, write_directory
from bmforge.models.formats.hf_format import remove_stale_weights
from bmforge.models.save import write_model
from bmforge.parallel import init_distributed, run_on_first
from bmforge.provenance import read_provenance, write_provenance
from bmforge.recipes.adapter_dirs import find_source, plain_model
from bmforge.recipes.compress_checks import (
    changeable_fields,
    check_compressible,
    check_vocabularies,
    check_widths_after,
    describe_stored,
    estimate_phases,
    stored_dtype,
)
from bmforge.recipes.compress_runs import check_runs, check_task, make_phase_run
from bmforge.recipes.compression_phases import CalibrationConfig, read_calibration
from bmforge.recipes.evaluate import evaluate_model
from bmforge.recipes.run_dir import check_new_run, lock_run_dir, write_run_config
from bmforge.recipes.speed import check_speed, with_speed
from bmforge.settings import EvaluateConfig

__all__ = [
    "CompressRunConfig",
    "FileFormat",
    "StoppedError",
    "store_teacher_answers",
    "describe_phases",
    "read_recipe",
    "run_compress",
]

FileFormat = Literal["bmforge", "compressed-tensors"]
_PHASES, _EXPORT, _MADE, _MERGED = "phases", "export", "made", "merged"


class StoppedError(KeyboardInterrupt):
    """Raised if a signal ended a phase before its last step; the same command resumes it."""


@dataclass(kw_only=True)
class CompressRunConfig:
    """Config of a compression run.

    Args:
        model: directory or hub id of the model; an adapter directory is merged into its base first.
        out: directory of the compressed model; its phases are subdirectories.
        compress: compression methods and their options.
        steps: training steps of each phase.
        task: task that phases with steps train on, such as "pretrain" or "BoolQ".
        run: training options of the task (`data`, `train`, `layout`, ...), as for `bmforge train`.
        calibration: texts for methods that need activations of the model.
        evaluate: tasks and texts to evaluate on before and after each phase.
        speed: measure the prefill and decoding speed before compression and after each phase.
        format: file format of the compressed model: "bmforge" (native) or "compressed-tensors"
            (vLLM's, for models with one quantization scheme for all linear layers).
    """

    model: str = ""
    out: Path = Path("small")
    compress: CompressConfig = field(default_factory=CompressConfig)
    steps: PhaseSteps = field(default_factory=PhaseSteps)
    task: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    speed: bool = False
    format: FileFormat = "bmforge"


def read_recipe(file: str | Path, model: str, out: Path) -> CompressRunConfig:
    """Read a compression recipe from TOML, with the fields of `CompressRunConfig`.

    BMCook's JSON is supported as well; see `compat.bmcook`.

    Raises:
        ConfigError: the file is missing, in neither format, or has invalid fields.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"recipe {str(path)!r} does not exist. Check its path.")
    if path.suffix == ".json":
        # Imported lazily: the compatibility package is only needed for JSON recipes.
        from bmforge.compat.bmcook.config import recipe_from_bmcook

        values = recipe_from_bmcook(path, model)
    else:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"recipe {str(path)!r} is not valid TOML ({error}). Correct the file."
            ) from error
    parts = {f.name for f in dataclasses.fields(CompressConfig)}
    inner = {name: values.pop(name) for name in list(values) if name in parts}
    values_given = {**values, "compress": inner, "model": model, "out": out}
    return config_from_dict(CompressRunConfig, values_given)


def run_compress(config: CompressRunConfig) -> CompressReport:
    """Compress a model, or resume its compression; return the report.

    Raises:
        BmforgeError: a setting, the model, the data or the layout is invalid or unsuitable.
        StoppedError: a signal ended a phase; the same call resumes it.
    """
    phases, source = _check(config)
    world = init_distributed()
    begun = [p for n, p in enumerate(phases, 1) if _phase_dir(config, n, p).exists()]
    with lock_run_dir(config.out, config, changeable_fields(begun) | {"speed", "format"}):
        write_run_config(config.out, config)
        merged = config.out / _PHASES / _MERGED
        run_on_first(lambda: plain_model(config.model, merged))
        source = original = merged if merged.exists() else source
        model, done = describe_stored(source), list[PhaseResults]()
        before, quality = _measure_before(config, source, model)
        for number, phase in enumerate(phases, 1):
            phase_dir = _phase_dir(config, number, phase)
            facts = _read_done(phase_dir)
            if facts is None:
                get_logger().info("phase %d of %d: %s", number, len(phases), phase.name)
                facts = _run_phase(config, phase, source, phase_dir)
                if world.rank == 0:
                    CompressReport(type(model).__name__, before, (facts,)).save(phase_dir)
            done.append(facts)
            source = Path(facts.directory)
        report = CompressReport(type(model).__name__, before, tuple(done), quality)
        report = run_on_first(lambda: _publish(report, config, original)) or report
    return report


def _phase_dir(config: CompressRunConfig, number: int, phase: Phase) -> Path:
    return config.out / _PHASES / f"{number}-{phase.name}"


def _check(
    config: CompressRunConfig, *, reads_data: bool = False
) -> tuple[tuple[Phase, ...], Path]:
    """Run all checks that need no training; return the phases and the model's directory.

    Args:
        config: the recipe.
        reads_data: read the training data too, which a run does at the start of its first phase.
    """
    check_new_run(config.out, "out")
    phases = split_phases(config.compress, config.steps)
    check_task(config, phases)
    # An adapter is merged into its base model, and the merged model has the same sizes as the base.
    source = find_source(config.model).model
    if config.compress.distill is not None:
        check_vocabularies(source, config.compress.distill)
    if config.speed:
        check_speed(describe_stored(source))
    check_widths_after(source, phases)
    list(estimate_phases(source, phases))  # raises the errors of later phases early
    if config.format != "bmforge":
        check_compressible(source, phases)
    if any(phase.config.is_calibrated for phase in phases):  # too few texts, before any training
        read_calibration(describe_stored(source), source, config.calibration)
    check_runs(config, phases, source, reads_data=reads_data)
    return phases, source


def _measure_before(config: CompressRunConfig, source: Path, model: Any) -> Any:
    """Return the sizes and metrics of the original model."""
    quality = _evaluate(config, source) if _measures_quality(config) else {}
    return measure_sizes(model), quality


def _measures_quality(config: CompressRunConfig) -> bool:
    evaluation = config.evaluate
    return bool(evaluation.text or evaluation.prepared or evaluation.tasks)


def _evaluate(config: CompressRunConfig, directory: Path) -> dict[str, float]:
    metrics = evaluate_model(str(directory), config.evaluate)
    return {f"{metric}, {what}": v for metric, part in metrics.items() for what, v in part.items()}


def _read_done(directory: Path) -> PhaseResults | None:
    """Return the report of a finished phase; None if it has not finished."""
    if not (directory / "compression.json").is_file():
        return None
    return CompressReport.load(directory).phases[-1]


def _run_phase(
    config: CompressRunConfig, phase: Phase, source: Path, phase_dir: Path
) -> PhaseResults:
    """Run one phase of the compression and return its report."""
    if phase.steps:
        facts = _train_phase(config, phase, source, phase_dir)
    else:
        facts = _change_at_once(config, phase, source, phase_dir)
    quality = _evaluate(config, Path(facts.directory)) if _measures_quality(config) else {}
    return dataclasses.replace(facts, name=phase.name, quality=quality)


def _train_phase(
    config: CompressRunConfig, phase: Phase, source: Path, phase_dir: Path
) -> PhaseResults:
    """Run a phase by training on the task with the phase's methods attached to the model."""
    run_dir = phase_dir / "run"
    recipe, settings = make_phase_run(config, phase, source, run_dir)
    result = recipe.run(settings)
    if result.stopped:
        raise StoppedError
    facts = CompressReport.load(run_dir / "compression").phases[-1]
    # The size of the export; a model is trained in fp32.
    stored = measure_sizes(describe_stored(run_dir / _EXPORT)).size_bytes
    sizes = dataclasses.replace(facts.sizes, size_bytes=stored)
    return dataclasses.replace(facts, sizes=sizes, directory=str(run_dir / _EXPORT))


def store_teacher_answers(config: CompressRunConfig, count: int) -> Path:
    """Store a teacher's top tokens for all training data of a recipe, without compressing.

    All phases of a recipe read the same sequences in order, so the longest phase reads all of them.

    Args:
        config: a recipe with `distill.teacher`.
        count: number of top tokens to store per position.

    Raises:
        BmforgeError: a setting, the teacher or the data is invalid or unsuitable; or `out` exists.
    """
    distill = config.compress.distill
    if distill is None or distill.teacher is None:
        raise ConfigError(
            "the recipe has no teacher. Set [distill] teacher; to train the student, "
            "use a recipe with [distill] answers instead."
        )
    if config.out.exists():
        raise ConfigError(f"out={str(config.out)!r} already exists. Choose another directory.")
    phases, source = _check(config)
    phase = max(phases, key=lambda phase: phase.steps)
    with tempfile.TemporaryDirectory() as folder:
        recipe, settings = make_phase_run(config, phase, source, Path(folder) / "run")
        changes = {"answers": config.out, "answer_count": count}
        settings.compress = dataclasses.replace(settings.compress, **changes)
        recipe.run(settings)
    get_logger().info("stored the teacher's predictions in %s for [distill] answers", config.out)
    return config.out


def _change_at_once(
    config: CompressRunConfig, phase: Phase, source: Path, phase_dir: Path
) -> PhaseResults:
    """Compress the model in `source` on one process, without training; write it to `phase_dir`."""
    target = phase_dir / _EXPORT

    def make() -> None:
        return_freed_memory()  # layers are allocated and freed with many different sizes
        model = AutoModel.from_pretrained(source, dtype=stored_dtype(source))
        batches = None
        if phase.config.is_calibrated:
            batches = read_calibration(model, source, config.calibration)
        job = compress(model, phase.config, batches=batches)
        report = job.finish_()
        if target.exists():  # left by a phase that was killed while writing
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)

        def write(directory: Path, partial: Path) -> str:
            write_model(job.model, partial, alone=True)
            return f"{report.model}, {report.after.size_bytes / 1e6:,.1f} MB"

        write_directory(source, target, write)
        report.save(phase_dir / _MADE)

    run_on_first(make)
    facts = CompressReport.load(phase_dir / _MADE).phases[-1]
    return dataclasses.replace(facts, directory=str(target))


def _publish(report: CompressReport, config: CompressRunConfig, original: Path) -> CompressReport:
    """Copy the last phase's model to the output directory, and write the report."""
    if config.speed:
        report = with_speed(report, original)
    source, out = _in_format(config, Path(report.phases[-1].directory)), config.out
    names = [path.name for path in source.iterdir() if path.is_file()]
    for name in sorted({*names, *find_companions(source)} - {"run.toml", "log.txt"}):
        file, target = source / name, out / name
        target.parent.mkdir(exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        partial.unlink(missing_ok=True)
        try:
            os.link(file, partial)
        except OSError:  # another file system, or no hard links
            shutil.copyfile(file, partial)
        os.replace(partial, target)
    # An earlier recipe may have left weights under other names.
    remove_stale_weights(out, [path.name for path in source.iterdir()])
    write_provenance(out, read_provenance(out), name=out.resolve().name)
    page = report.save(out)
    get_logger().info("%s\nreport: %s", report.format(), page)
    return report


def _in_format(config: CompressRunConfig, source: Path) -> Path:
    """Convert the compressed model to the requested format; return its directory."""
    if config.format == "bmforge":
        return source
    target = config.out / _PHASES / config.format

    def write(directory: Path, partial: Path) -> str:
        model = AutoModel.from_pretrained(directory, dtype=stored_dtype(directory))
        save_compressed(model, partial)
        return f"for vLLM and transformers, {config.format}"

    # The directory is renamed to its final name when it is complete.
    return target if target.exists() else write_directory(source, target, write)


def describe_phases(config: CompressRunConfig) -> str:
    """Describe the phases, and the estimated model size after each, as text."""
    phases, source = _check(config, reads_data=True)
    lines = []
    for phase, sizes, note in estimate_phases(source, phases):
        trained = f"{phase.steps} steps" if phase.steps else "at once"
        what = ", ".join((*phase.config.names, *(["distill"] if phase.config.distill else [])))
        lines.append(f"{phase.name:<12}{what:<32}{trained:<14}{sizes}{note}")
    return "\n".join(lines)
