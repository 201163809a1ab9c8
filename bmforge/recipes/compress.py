"""Making a model small by a recipe: phase after phase, each a run that ends in a model directory.

What is in `CompressConfig` is divided into phases (`compress/phases.py`). A phase with steps is a
run of the task, as `bmforge train` would start it, with what the phase does put into its model; one
without is done at once. Run again, phases that are done are passed over and a run goes on.
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
from bmforge.compress.report import PhaseFacts, measure_sizes
from bmforge.config import config_from_dict, config_to_dict
from bmforge.errors import ConfigError
from bmforge.host_tuning import return_freed_memory
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.models.config_file import GENERATION_FILE
from bmforge.models.formats.compressed_write import save_compressed
from bmforge.models.formats.convert import find_companions, write_directory
from bmforge.models.hub import find_model
from bmforge.models.save import write_model
from bmforge.parallel import init_distributed, run_on_first
from bmforge.recipes.compressing import CalibrationConfig, PhaseConfig, read_calibration
from bmforge.recipes.evaluate import evaluate_model
from bmforge.recipes.registry import Recipe, find_recipe
from bmforge.recipes.run_dir import claim_run_dir, occupy_run_dir
from bmforge.recipes.small import (
    changeable_fields,
    check_compressible,
    check_vocabularies,
    check_widths_after,
    estimate_phases,
)
from bmforge.recipes.speed import check_speed, measure_speeds
from bmforge.settings import EvaluateConfig

__all__ = [
    "CompressRunConfig",
    "FileFormat",
    "StoppedError",
    "ask_teacher",
    "describe_phases",
    "read_recipe",
    "run_compress",
]

FileFormat = Literal["bmforge", "compressed-tensors"]
_PHASES, _EXPORT, _MADE = "phases", "export", "made"


class StoppedError(KeyboardInterrupt):
    """A signal ended a phase before its last step; the same command goes on from there."""


@dataclass(kw_only=True)
class CompressRunConfig:
    """Everything about making a model small.

    Args:
        model: directory or hub id of the model.
        out: directory of the small model; the phases lie in it.
        compress: what is done.
        steps: of training in each phase.
        task: what is trained in phases with steps, such as "pretrain" or "BoolQ".
        run: fields of the task's runs: `data`, `train`, `layout`, ...; see `bmforge train`.
        calibration: texts for methods that look at what goes through the model.
        evaluate: on what the model is measured before and after each phase.
        speed: time in the end how fast the model reads and writes in the runtime, as it came and
            after each phase.
        format: of the small model's files: "bmforge" is our own, "compressed-tensors" vLLM's, for
            models whose linear layers are quantised by one scheme.
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
    """Read a recipe: TOML with the fields of `CompressConfig` and of `CompressRunConfig`.

    BMCook's JSON is read as well; see `compat.bmcook`.

    Raises:
        ConfigError: the file is missing, is neither, or does not fit.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"recipe {str(path)!r} does not exist.")
    if path.suffix == ".json":
        # Imported here: the package of old programs brings their names with it.
        from bmforge.compat.bmcook.config import recipe_from_bmcook

        values = recipe_from_bmcook(path, model)
    else:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}") from error
    parts = {f.name for f in dataclasses.fields(CompressConfig)}
    inner = {name: values.pop(name) for name in list(values) if name in parts}
    given = {**values, "compress": inner, "model": model, "out": out}
    return config_from_dict(CompressRunConfig, given)


def run_compress(config: CompressRunConfig) -> CompressReport:
    """Make a model small, or go on with it; return what became of it.

    Raises:
        BmforgeError: a setting, the model, the data or the layout does not fit.
        StoppedError: a signal ended a phase; the same call goes on.
    """
    phases, source = _check(config)
    world = init_distributed()
    begun = [p for n, p in enumerate(phases, 1) if _phase_dir(config, n, p).exists()]
    with occupy_run_dir(config.out, config, changeable_fields(begun) | {"speed", "format"}):
        claim_run_dir(config.out, config)
        model, done = AutoModel.describe_pretrained(source)[0], list[PhaseFacts]()
        before, quality = _measure_before(config, source, model)
        for number, phase in enumerate(phases, 1):
            place = _phase_dir(config, number, phase)
            facts = _read_done(place)
            if facts is None:
                get_logger().info("phase %d of %d: %s", number, len(phases), phase.name)
                facts = _run_phase(config, phase, source, place)
                if world.rank == 0:
                    CompressReport(type(model).__name__, before, (facts,)).save(place)
            done.append(facts)
            source = Path(facts.directory)
        report = CompressReport(type(model).__name__, before, tuple(done), quality)
        report = run_on_first(lambda: _publish(report, config)) or report
    return report


def _phase_dir(config: CompressRunConfig, number: int, phase: Phase) -> Path:
    return config.out / _PHASES / f"{number}-{phase.name}"


def _check(config: CompressRunConfig) -> tuple[tuple[Phase, ...], Path]:
    """Return the phases and the model's directory, once all fits that can be known before."""
    phases = split_phases(config.compress, config.steps)
    _check_task(config, phases)
    source = find_model(config.model)
    if config.compress.distill is not None:
        check_vocabularies(source, config.compress.distill)
    if config.speed:
        check_speed(AutoModel.describe_pretrained(source)[0])
    check_widths_after(source, phases)
    for _ in estimate_phases(source, phases):  # raises what a later phase would refuse
        pass
    if config.format != "bmforge":
        check_compressible(source, phases)
    return phases, source


def _measure_before(config: CompressRunConfig, source: Path, model: Any) -> Any:
    """Return sizes and figures of the model as it comes."""
    quality = _evaluate(config, source) if _wants_figures(config) else {}
    return measure_sizes(model), quality


def _wants_figures(config: CompressRunConfig) -> bool:
    given = config.evaluate
    return bool(given.text or given.prepared or given.tasks)


def _evaluate(config: CompressRunConfig, directory: Path) -> dict[str, float]:
    found = evaluate_model(str(directory), config.evaluate)
    return {f"{metric}, {what}": v for metric, part in found.items() for what, v in part.items()}


def _check_task(config: CompressRunConfig, phases: tuple[Phase, ...]) -> None:
    """Raise where nothing trains the phases with steps, or where what trains has none."""
    if not any(phase.steps for phase in phases):
        for name in ("task", "run"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} has no effect: no phase has steps. Give steps.structure, "
                    "steps.experts or steps.weights, or leave it out."
                )
        return
    if not config.task:
        raise ConfigError(
            'phases with steps need a task that they train: task = "pretrain", with its fields '
            "under [run]."
        )
    taken = {"run_dir", "init_from", "export", "compress", "model"} & set(config.run)
    if taken:
        raise ConfigError(f"run.{min(taken)} is the recipe's own: leave it out.")
    find_recipe(config.task, config.model)


def _read_done(place: Path) -> PhaseFacts | None:
    """Return what a phase has left that was done before."""
    if not (place / "compression.json").is_file():
        return None
    return CompressReport.load(place).phases[-1]


def _run_phase(config: CompressRunConfig, phase: Phase, source: Path, place: Path) -> PhaseFacts:
    """Do one phase; return what it left."""
    if phase.steps:
        facts = _train_phase(config, phase, source, place)
    else:
        facts = _change_at_once(config, phase, source, place)
    quality = _evaluate(config, Path(facts.directory)) if _wants_figures(config) else {}
    return dataclasses.replace(facts, name=phase.name, quality=quality)


def _train_phase(config: CompressRunConfig, phase: Phase, source: Path, place: Path) -> PhaseFacts:
    """Run the task with what the phase does put into the model."""
    run_dir = place / "run"
    recipe, settings = _settle_run(config, phase, source, run_dir)
    result = recipe.run(settings)
    if result.stopped:
        raise StoppedError
    run_on_first(lambda: _copy_companions(source, run_dir / _EXPORT))
    found = CompressReport.load(run_dir / "compression").phases[-1]
    return dataclasses.replace(found, directory=str(run_dir / _EXPORT))


def _copy_companions(source: Path, export: Path) -> None:
    """Give a phase's model its tokenizer where the run's data brought none."""
    if set(find_companions(export)) <= {GENERATION_FILE}:
        for name in find_companions(source):
            shutil.copyfile(source / name, export / name)


def _settle_run(
    config: CompressRunConfig, phase: Phase, source: Path, run_dir: Path
) -> tuple[Recipe, Any]:
    """Return the task's recipe, and what its run of a phase is told."""
    # Of the model as the last phase has left it.
    recipe = find_recipe(config.task, str(source))
    made = dataclasses.make_dataclass(
        f"Small{recipe.config.__name__}",
        [("compress", PhaseConfig, field(default_factory=PhaseConfig))],
        bases=(recipe.config,),
        kw_only=True,
    )
    made.__doc__, made.__module__ = recipe.config.__doc__, __name__
    usual = config_to_dict(recipe.config())
    usual.pop("model")  # the sizes are those of the model that it starts from
    given = _merge(usual, {**config.run, "run_dir": str(run_dir), "init_from": str(source)})
    given = _merge(given, {"train": {"steps": phase.steps}})
    settings: Any = config_from_dict(made, given, "run.")
    settings.compress = PhaseConfig(config=phase.config, calibration=config.calibration)
    settings.model_changes = ()
    return recipe, settings


def ask_teacher(config: CompressRunConfig, count: int) -> Path:
    """Keep a teacher's answers to all rows of a recipe's runs, in `out`; make nothing small.

    The phases of a recipe read the same rows from the first on, so the longest has all of them.

    Args:
        config: a recipe with `distill.teacher`.
        count: k, of the tokens that are kept at every position.

    Raises:
        BmforgeError: a setting, the teacher or the data does not fit; or `out` exists.
    """
    told = config.compress.distill
    if told is None or told.teacher is None:
        raise ConfigError(
            "the recipe names no teacher to ask: give [distill] teacher; for the student take a "
            "recipe with [distill] answers instead."
        )
    if config.out.exists():
        raise ConfigError(f"out={str(config.out)!r} exists already: name another directory.")
    phases, source = _check(config)
    phase = max(phases, key=lambda phase: phase.steps)
    with tempfile.TemporaryDirectory() as folder:
        recipe, settings = _settle_run(config, phase, source, Path(folder) / "run")
        asked = {"answers": config.out, "answer_count": count}
        settings.compress = dataclasses.replace(settings.compress, **asked)
        recipe.run(settings)
    get_logger().info("kept the teacher's answers in %s: [distill] answers names them", config.out)
    return config.out


def _merge(usual: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return nested tables with what is given in them."""
    out = dict(usual)
    for name, value in given.items():
        both = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = _merge(out[name], value) if both else value
    return out


def _change_at_once(
    config: CompressRunConfig, phase: Phase, source: Path, place: Path
) -> PhaseFacts:
    """Do what a phase without steps does, on one process, from directory to directory."""
    target = place / _EXPORT

    def make() -> None:
        return_freed_memory()  # layers come and go, and few are alike
        model = AutoModel.from_pretrained(source)
        batches = None
        if phase.config.is_calibrated:
            batches = read_calibration(model, source, config.calibration)
        job = compress(model, phase.config, batches=batches)
        report = job.finish_()
        if target.exists():  # of a phase that was killed before it was whole
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)

        def write(directory: Path, partial: Path) -> str:
            write_model(job.model, partial, alone=True)
            return f"{report.model}, {report.after.size_bytes / 1e6:,.1f} MB"

        write_directory(source, target, write)
        report.save(place / _MADE)

    run_on_first(make)
    found = CompressReport.load(place / _MADE).phases[-1]
    return dataclasses.replace(found, directory=str(target))


def _publish(report: CompressReport, config: CompressRunConfig) -> CompressReport:
    """Put the small model into the directory that was asked for, beside its phases."""
    if config.speed:
        report = _with_speed(report, find_model(config.model))
    source, out = _in_format(config, Path(report.phases[-1].directory)), config.out
    for file in sorted(path for path in source.iterdir() if path.is_file()):
        target = out / file.name
        if file.name in ("run.toml", "log.txt"):
            continue
        partial = out / f"{file.name}.partial"
        partial.unlink(missing_ok=True)
        try:
            os.link(file, partial)
        except OSError:  # another file system, or one without links
            shutil.copyfile(file, partial)
        os.replace(partial, target)
    page = report.save(out)
    get_logger().info("%s\nreport: %s", report.format(), page)
    return report


def _with_speed(report: CompressReport, source: Path) -> CompressReport:
    """Return a report with how fast the model was, and is after each phase."""
    first, *others = measure_speeds(source, [Path(phase.directory) for phase in report.phases])
    phases = tuple(
        dataclasses.replace(phase, speed=speed)
        for phase, speed in zip(report.phases, others, strict=True)
    )
    return dataclasses.replace(report, phases=phases, speed=first)


def _in_format(config: CompressRunConfig, source: Path) -> Path:
    """Return the directory of the small model in the form that was asked for."""
    if config.format == "bmforge":
        return source
    target = config.out / _PHASES / config.format

    def write(directory: Path, partial: Path) -> str:
        save_compressed(AutoModel.from_pretrained(directory), partial)
        return f"for vLLM and transformers, {config.format}"

    # It comes there whole, or not at all.
    return target if target.exists() else write_directory(source, target, write)


def describe_phases(config: CompressRunConfig) -> str:
    """Return what would be done, and how large the model would be after each phase."""
    phases, source = _check(config)
    lines = []
    for phase, sizes, said in estimate_phases(source, phases):
        trained = f"{phase.steps} steps" if phase.steps else "at once"
        what = ", ".join((*phase.config.names, *(["distill"] if phase.config.distill else [])))
        lines.append(f"{phase.name:<12}{what:<32}{trained:<14}{sizes}{said}")
    return "\n".join(lines)
