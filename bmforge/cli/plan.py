"""`bmforge plan`: shows which layouts of a model fit on given GPUs, their speed and cost."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from bmforge.cli.plan_json import plan_to_dict
from bmforge.cli.plan_options import PlanCommand
from bmforge.cli.plan_plot import draw_memory
from bmforge.cli.plan_tasks import (
    DATA_VARIABLES,
    check_task,
    head_of_task,
    plan_residents,
    supports_layout,
    task_step,
    traced_task,
)
from bmforge.cli.plan_workload import build_value_model, read_model, trained_names, workload_of
from bmforge.device import parse_dtype
from bmforge.errors import ConfigError
from bmforge.files import check_place, replace_file
from bmforge.logging import ProgressBar, get_logger
from bmforge.models import Model
from bmforge.parallel.layout import Layout
from bmforge.parallel.planner.estimate import PlanRequest, PlanRow
from bmforge.parallel.planner.hardware import FULL_SOURCE, Cluster, find_device, parse_interconnect
from bmforge.parallel.planner.search import Plan, plan, sensible_layouts
from bmforge.parallel.planner.trace_cache import default_directory
from bmforge.recipes.adapters import AdapterConfig, with_adapter
from bmforge.recipes.base_weights import quantize_base_
from bmforge.recipes.resident_models import list_resident_models, planned_task
from bmforge.recipes.reward import with_reward_head
from bmforge.recipes.run import RunConfig
from bmforge.recipes.start import family_of, read_changes, with_changes

__all__ = [
    "auto_layout",
    "describe_plan",
    "launch_line",
    "make_request",
    "run_plan_command",
]

_GIB = 2**30
# Width of the table in characters, if the output is not a terminal.
_WIDE = 140


def make_request(command: PlanCommand) -> PlanRequest:
    """Convert the command's options to a request for the planner.

    Raises:
        ConfigError: the model or GPU is unknown, or a number is invalid.
    """
    if command.price is not None and command.tokens is None:
        raise ConfigError("--price has no effect without --tokens. Pass --tokens as well.")
    for name in ("tokens", "price"):
        value = getattr(command, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} {value} must be above 0.")
    device = find_device(command.gpu, command.gpu_memory, command.gpu_tflops)
    cluster = Cluster(
        device,
        command.gpus,
        command.gpus_per_node,
        parse_interconnect(command.interconnect),
        command.host_memory,
    )
    check_task(command)
    family, config = read_model(command.model, command.set)
    config = head_of_task(command.task, config)
    if command.changes is not None:
        changes = (*config.changes, *read_changes(command.changes))
        config = config.replace(changes=changes)
    config = _with_adapter(command, family, config)
    row_tokens = command.seq or min(config.max_seq_len, 4096)
    precision = command.precision or ("bf16" if device.has_bf16 else "fp16")
    workload = workload_of(
        command.model,
        config,
        row_tokens,
        trained_names(command, config, command.task),
        parse_dtype(precision),
        traced_task(command),
    )
    return PlanRequest(
        workload,
        cluster,
        -(-8 // command.gpus) * command.gpus if command.batch is None else command.batch,
        precision,
        command.offload,
        command.compile,
        plan_residents(
            command,
            workload.whole,
            partial(build_value_model, command, config, parse_dtype(precision)),
            _build_model,
            precision,
            row_tokens,
        ),
    )


def _build_model(name: str) -> Model:
    family, config = read_model(name)
    return family.from_config(config, device="meta")


def _with_adapter(command: PlanCommand, family: type[Model], config: Any) -> Any:
    """Return the model's config with the adapter and quantized base that the command selects."""
    if command.adapter is None:
        if command.base_dtype is not None:
            raise ConfigError(
                f"--base-dtype {command.base_dtype} needs a frozen base model. Add --adapter lora."
            )
        return config
    if command.freeze_base:
        raise ConfigError("--freeze-base has no effect with --adapter. Leave it out.")
    if command.base_dtype is not None:
        model = family.from_config(config, device="meta")
        quantize_base_(model, command.base_dtype)
        config = model.config
    adapter = AdapterConfig(kind=command.adapter, rank=command.adapter_rank)
    return with_adapter(family, config, RunConfig(adapter=adapter))


def run_plan_command(command: PlanCommand) -> None:
    """Print the table of layouts, the fastest one, and the cost of the run."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    if command.plot is not None:
        check_place(command.plot, "plot", is_file=True)
    request = make_request(command)
    layouts = tuple(
        layout
        for layout in sensible_layouts(request)
        if supports_layout(traced_task(command), layout, command.gpus)
    )
    with ProgressBar("plan", len(layouts)) as bar:
        result = plan(
            request,
            note=lambda layout: bar.advance(text=layout),
            layouts=layouts,
            processes=os.cpu_count() or 1,
            keep=default_directory(),
        )
    if command.json:
        print(json.dumps(plan_to_dict(result, command.tokens, command.price), indent=1))
    else:
        describe_plan(result, command, console)
    if command.plot is not None:
        command.plot.parent.mkdir(parents=True, exist_ok=True)
        replace_file(command.plot, draw_memory(result, command.rows))
        get_logger().info("memory: %s", command.plot)
    if not result.rows or not result.rows[0].fits:
        _ = result.winner  # raises an error with the missing memory if no layout fits


def describe_plan(result: Plan, command: PlanCommand, console: Console) -> None:
    """Print the request, the table, and the command that starts the fastest layout."""
    request = result.request
    cluster, device = request.cluster, request.cluster.device
    console.print(
        f"{request.workload.name}: {request.batch} sequences of {request.workload.row_tokens} "
        f"tokens per step, {request.precision}, on {cluster.count} x {device.name} "
        f"({device.memory_bytes / _GIB:.1f} GiB usable, {cluster.per_node} per node, "
        f"{cluster.network_gbit_s:g} Gb/s per GPU between nodes)"
    )
    console.print(make_table(result, command.rows))
    for reason, layouts in _by_reason(result)[:3]:
        more = f" and {len(layouts) - 1} more" if len(layouts) > 1 else ""
        console.print(f"not possible: {layouts[0]}{more}: {reason}", highlight=False)
    console.print(
        f"matrix products at {device.reached(request.precision):.0%} of the peak "
        f"({FULL_SOURCE if request.precision == 'fp32' else device.measured}); GPU data: "
        f"{device.source}",
        highlight=False,
    )
    if not result.rows or not result.rows[0].fits:
        return
    if result.least is not None and result.least.memory.total < result.winner.memory.total:
        console.print(least_line(result.least), highlight=False)
    if command.tokens is not None:
        console.print(cost_line(result.winner, request, command), highlight=False)
    line = launch_line(request, result.winner, _model_options(command), command.task)
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def _by_reason(result: Plan) -> list[tuple[str, list[Layout]]]:
    """Group the rejected layouts by the reason of their rejection."""
    reasons: dict[str, list[Layout]] = {}
    for layout, reason in result.refused:
        reasons.setdefault(reason, []).append(layout)
    return list(reasons.items())


def make_table(result: Plan, count: int) -> Table:
    """Return a table of the first `count` layouts."""
    table = Table(box=None, pad_edge=False)
    columns = ("layout", "rows", "recompute", "offload", "GiB", "state", "activ.", "other")
    for name in (*columns, "s/step", "tokens/s", "MFU", ""):
        table.add_column(name, justify="left" if name in ("layout", "") else "right")
    for row in result.rows[:count]:
        table.add_row(*_cells(row, result.request))
    return table


def _cells(row: PlanRow, request: PlanRequest) -> list[str]:
    choice, parts = row.choice, row.memory.parts
    residents = [resident.name for resident in request.residents]
    states = ("parameters", "gradients", "optimizer", *residents)
    state = sum(parts.get(name, 0.0) for name in states)
    activations = parts.get("activations", 0.0)
    cells = [
        str(choice.layout).removeprefix("Layout(").removesuffix(")"),
        str(choice.rows),
        "yes" if choice.recompute else "no",
        f"{choice.offloaded:.0%}" if choice.offloaded else "no",
        *(f"{size / _GIB:.1f}" for size in (row.memory.total, state, activations)),
        f"{(row.memory.total - state - activations) / _GIB:.1f}",
    ]
    if not row.traced:
        return [*cells, "", "", "", f"weights exceed memory by {row.short_bytes / _GIB:.1f} GiB"]
    peak = request.cluster.count * request.cluster.device.peak_flops(request.precision)
    used = row.tokens_per_s * request.workload.flops_per_token / peak
    cells += [f"{row.times.total:.2f}", f"{row.tokens_per_s:,.0f}", f"{used:.0%}"]
    if row.fits:
        return [*cells, "fits"]
    if row.short_bytes > 0:
        return [*cells, f"exceeds the memory by {row.short_bytes / _GIB:.1f} GiB"]
    return [*cells, f"exceeds the host memory by {row.host_short_bytes / _GIB:.0f} GiB"]


def least_line(row: PlanRow) -> str:
    """Return a line with the options of the layout that needs the least memory."""
    layout = str(row.choice.layout).removeprefix("Layout(").removesuffix(")")
    return (
        f"least memory: {row.memory.total / _GIB:.1f} GiB ({layout}, --data.micro-batch-size 1 "
        f"--recompute), {row.tokens_per_s:,.0f} tokens/s"
    )


def cost_line(row: PlanRow, request: PlanRequest, command: PlanCommand) -> str:
    """Return a line with the hours, GPU-hours and cost of training on `command.tokens` tokens."""
    assert command.tokens is not None
    hours = row.hours(command.tokens)
    gpu_hours = hours * request.cluster.count
    text = (
        f"{command.tokens:.4g} tokens: {hours:,.1f} hours ({hours / 24:,.1f} days), "
        f"{gpu_hours:,.0f} GPU-hours"
    )
    if command.price is not None:
        text += f", {gpu_hours * command.price:,.0f} {command.currency}"
    return text


def launch_line(
    request: PlanRequest, row: PlanRow, model: Sequence[str] = (), task: str = "pretrain"
) -> str:
    """Return the command that starts training with a given layout on every node.

    Values that the planner does not know are shell variables, which the user must set: the output
    directory of `bmforge prepare`, or the conversations for an adapter; and, with several nodes,
    the address of the first node.

    Args:
        request: the planner request.
        row: entry of the plan with the layout.
        model: command line options for the planned model.
        task: planned task; for an adapter, pretrain is replaced by conversations.
    """
    cluster, choice = request.cluster, row.choice
    per_node = min(cluster.per_node, cluster.count)
    nodes = cluster.count // per_node
    start = f"torchrun --nproc-per-node {per_node}"
    if nodes > 1:
        first = "${FIRST_NODE:?its name or address}"
        start += f' --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "{first}:29500"'
    if task == "pretrain" and any(option.startswith("--adapter") for option in model):
        task = "conversations"
    data = DATA_VARIABLES[task]
    return " ".join(
        [
            start,
            f"-m bmforge train {task} --model",
            shlex.quote(request.workload.name),
            *model,
            f'--data.paths "{data}"',
            *_options(request, choice, task),
        ]
    )


def _model_options(command: PlanCommand) -> list[str]:
    options = []
    if command.reference is not None and command.task == "preferences":
        options.append(f"--reference {command.reference}")
    options += [f"--reference-dtype {command.reference_dtype}"] if command.reference_dtype else []
    options += ["--reference-offload"] if command.reference_offload else []
    if command.teacher is not None:
        options.append(f"--teacher {shlex.quote(command.teacher)}")
        top_k = command.distill_top_k
        options += [f"--distill-top-k {top_k}"] if top_k else []
    if command.task == "rl":
        options.append('--reward "${REWARD:?module:function}"')
        options += ["--method ppo"] if command.value_model else []
    if command.max_num_seqs is not None:
        options.append(f"--rollout.max-num-seqs {command.max_num_seqs}")
    for change in command.set:
        key, _, value = change.partition("=")
        options.append(f"--model.{key.replace('_', '-')} {shlex.quote(value)}")
    if command.changes is not None:
        options.append(f"--changes {shlex.quote(command.changes)}")
    if command.adapter is not None:
        options.append(f"--adapter {command.adapter}")
        options += [f"--adapter.rank {command.adapter_rank}"] if command.adapter_rank else []
        options += [f"--base-dtype {command.base_dtype}"] if command.base_dtype else []
    return options + (["--freeze-base"] if command.freeze_base else [])


def _options(request: PlanRequest, choice: Any, task: str) -> list[str]:
    sequence_tokens = request.workload.row_tokens // task_step(task).sequences
    options: dict[str, Any] = {
        f"layout.{n.replace('_', '-')}": v for n, v in choice.layout.unusual().items()
    }
    options |= {"train.precision": request.precision}
    if choice.recompute:
        options["recompute"] = True
    if request.compiled:
        options["compile"] = True
    if choice.offloaded:
        options["offload.fraction"] = choice.offloaded
    options |= {
        "data.seq-len": sequence_tokens,
        "data.global-batch-size": request.batch,
        "data.micro-batch-size": choice.rows,
    }
    return [f"--{name} {value}" for name, value in options.items()]


def auto_layout(
    config: Any, cluster: Cluster, *, offload: bool = True
) -> tuple[Layout, bool, float, int]:
    """Return the fastest layout of a run, with the options that it needs.

    `--layout auto` calls this function with a recipe's config.

    Args:
        config: a `RunConfig` with `model` and `data`; reference models, teachers and rollout copies
            are included.
        cluster: machines of the run.
        offload: whether the optimizer states may be offloaded.

    Returns:
        layout, whether to recompute activations, offloaded fraction, and micro-batch size

    Raises:
        ConfigError: no layout fits.
    """
    task, sequence_tokens = planned_task(config)
    config = with_reward_head(config) if task in ("reward", "process-reward") else config
    trained = None
    if config.freeze_base or config.adapter.kind is not None:
        trained = config.model.heads[config.model.head].names if config.new_head else ()
    sizes = with_adapter(family_of(config.model), with_changes(config), config)
    precision = config.train.precision
    workload = workload_of(
        type(config.model).__name__,
        sizes,
        sequence_tokens,
        trained,
        parse_dtype(precision),
        task,
    )
    request = PlanRequest(
        workload,
        cluster,
        config.data.global_batch_size,
        precision,
        offload,
        compiled=config.compile,
        residents=list_resident_models(config, workload.whole(), cluster.count),
    )
    layouts = tuple(
        each for each in sensible_layouts(request) if supports_layout(task, each, cluster.count)
    )
    choice = plan(request, layouts=layouts).winner.choice
    return choice.layout, choice.recompute, choice.offloaded, choice.rows
