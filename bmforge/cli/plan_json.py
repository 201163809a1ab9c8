"""JSON output of `bmforge plan --json`: all estimates as numbers in bytes and seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from bmforge.parallel.planner.estimate import PlanRow
from bmforge.parallel.planner.search import Plan

__all__ = ["plan_to_dict"]


def plan_to_dict(plan: Plan, tokens: float | None = None, price: float | None = None) -> Any:
    """Convert a plan to a dictionary for JSON, with sizes in bytes and times in seconds.

    Args:
        plan: the plan, with the best layout first.
        tokens: training tokens of the whole run, to compute hours; None to omit the hours.
        price: price of one GPU hour, to compute the cost; None to omit the cost.
    """
    request = plan.request
    cluster, device = request.cluster, request.cluster.device
    return {
        "model": request.workload.name,
        "batch_rows": request.batch,
        "row_tokens": request.workload.row_tokens,
        "precision": request.precision,
        "gpu": device.name,
        "gpus": cluster.count,
        "gpus_per_node": cluster.per_node,
        "gpu_memory_bytes": int(device.memory_bytes),
        "network_gbit_s": cluster.network_gbit_s,
        "rows": [_row(row, plan, tokens, price) for row in plan.rows],
        "least_memory": None if plan.least is None else _row(plan.least, plan, tokens, price),
        "not_possible": [
            {"layout": dataclasses.asdict(layout), "reason": reason}
            for layout, reason in plan.refused
        ],
    }


def _row(row: PlanRow, plan: Plan, tokens: float | None, price: float | None) -> dict[str, Any]:
    choice = row.choice
    out: dict[str, Any] = {
        "layout": dataclasses.asdict(choice.layout),
        "micro_batch_rows": choice.rows,
        "micro_batches": row.micro_batches,
        "recompute": choice.recompute,
        "offloaded_ratio": choice.offloaded,
        "fits": row.fits,
        "memory_bytes": int(row.memory.total),
        "memory_parts_bytes": {name: int(size) for name, size in row.memory.parts.items()},
        "short_bytes": max(0, int(row.short_bytes)),
        "host_short_bytes": max(0, int(row.host_short_bytes)),
    }
    if not row.traced:  # the memory is a lower bound, and the time is unknown
        return out
    out |= {"step_s": row.times.total, "tokens_per_s": row.tokens_per_s}
    if tokens is not None:
        out["hours"] = row.hours(tokens)
        if price is not None:
            out["cost"] = out["hours"] * plan.request.cluster.count * price
    return out
