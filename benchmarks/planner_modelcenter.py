"""The planner against ModelCenter's own table, row by row, and what its two costs assume.

The table (docs/source/notes/benchmark.md of ModelCenter): BERT-Large on a V100 of 32 GB and a 2080
Ti, by transformers in fp32 and fp16 and by ModelCenter, and T5-11B on two A100 of 40 GB. It names
no number of tokens; 512 are taken, BERT's most. ModelCenter recomputes every block.

    python benchmarks/planner_modelcenter.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from harness import header, table

from bmforge.cli.plan_workload import workload_of
from bmforge.models.bert import BertConfig
from bmforge.models.t5 import T5Config
from bmforge.parallel import Layout
from bmforge.parallel.planner.estimate import Estimator, PlanRequest, PlanRow, TrainingSetup
from bmforge.parallel.planner.hardware import Cluster, find_device
from bmforge.parallel.planner.search import plan

GIB, TOKENS = 2**30, 512
BERT, T5 = BertConfig.preset("bert-large-uncased"), T5Config.preset("t5-11b")


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        who: whose program.
        gpu: on which GPU, one of them.
        precision, recompute: as they ran it.
        batch: the largest they could run; 0 for none.
        seconds: a step took; 0 where they do not say.
    """

    who: str
    gpu: str
    precision: str
    recompute: bool
    batch: int
    seconds: float = 0.0


CASES = (
    Case("transformers", "v100-32gb", "fp32", False, 11, 1.11),
    Case("transformers, fp16", "v100-32gb", "fp16", False, 14, 0.53),
    Case("ModelCenter", "v100-32gb", "fp16", True, 256, 10.3),
    Case("transformers", "2080ti", "fp32", False, 0),
    Case("transformers, fp16", "2080ti", "fp16", False, 0),
    Case("ModelCenter", "2080ti", "fp16", True, 72),
)


@cache
def traces_of(gpu: str) -> dict[Any, Any]:
    """Return where the rows of a GPU share their traces."""
    return {}


def estimate(case: Case, rows: int) -> PlanRow:
    cluster = Cluster(find_device(case.gpu), 1)
    request = PlanRequest(workload_of("BERT-Large", BERT, TOKENS), cluster, rows, case.precision)
    estimator = Estimator(request, traces=traces_of(case.gpu))
    return estimator.estimate(TrainingSetup(Layout(zero=0), rows, case.recompute))


def largest(case: Case) -> int:
    """Return the largest batch that fits, by bisection."""
    low, high = 0, 1024
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if estimate(case, middle).fits else (low, middle)
    return low


def bert_table() -> str:
    lines: list[list[object]] = []
    for case in CASES:
        asked = estimate(case, max(1, case.batch))
        seconds = asked.times.total
        error = f"{seconds / case.seconds - 1:+.1%}" if case.seconds else ""
        lines.append([
            case.who, case.gpu, case.precision, "yes" if case.recompute else "no",
            case.batch, largest(case), f"{asked.memory.total / GIB:.1f} GiB",
            f"{case.seconds:g} s" if case.seconds else "", f"{seconds:.2f} s", error,
        ])  # fmt: skip
    columns = ["program", "GPU", "precision", "recompute", "their largest batch", "planner's",
               "memory at theirs", "their step", "planner's step", "error"]  # fmt: skip
    return table(columns, lines) + "\n"


def t5_table() -> str:
    """T5-11B with 16 rows on GPUs of 40 GB: what is best on how many, and without what."""
    lines: list[list[object]] = []
    for gpus, offload in ((2, True), (2, False), (4, False), (8, False)):
        cluster = Cluster(find_device("a100-40gb"), gpus)
        found = plan(PlanRequest(workload_of("T5-11B", T5, TOKENS), cluster, 16, offload=offload))
        row = found.rows[0]
        missing = f"lacks {max(row.short_bytes, row.host_short_bytes) / GIB:.1f} GiB"
        said = [f"{row.times.total:.2f} s", f"{gpus * row.times.total / 16:.2f} s"]
        lines.append([
            gpus, "yes" if offload else "no", row.choice.layout, row.choice.rows,
            "yes" if row.choice.recompute else "no", f"{row.choice.offloaded:.0%}",
            f"{row.memory.total / GIB:.1f} GiB", *(said if row.fits else [missing, ""]),
        ])  # fmt: skip
    columns = ["GPUs", "may offload", "layout", "rows", "recompute", "offloaded", "memory",
               "step of 16 rows", "GPU-seconds a row"]  # fmt: skip
    return table(columns, lines) + "\n"


def cost_table() -> str:
    """GPU-seconds of a row of BERT-Large, as published and as planned, over transformers' fp32."""
    base = CASES[0]
    published = base.seconds / base.batch
    planned = estimate(base, base.batch).times.total / base.batch
    lines: list[list[object]] = []
    for case in (*CASES[:3], CASES[5]):
        theirs = case.seconds / case.batch
        ours = estimate(case, case.batch).times.total / case.batch
        own = f"{published / theirs:.2f}x" if theirs else ""
        # What one of the other GPUs may cost for nine tenths to be saved.
        price = f"{0.1 * planned / ours:.2f}"
        lines.append([case.who, case.gpu, case.precision, own, f"{planned / ours:.2f}x", price])
    columns = ["program", "GPU", "precision", "published, rows per GPU and second",
               "planner", "price for 90 % cheaper, V100 = 1"]  # fmt: skip
    return table(columns, lines) + "\n"


def main() -> None:
    print(header("python benchmarks/planner_modelcenter.py", 1, ["torch"]) + "\n")
    for make in (bert_table, t5_table, cost_table):
        print(make(), flush=True)


if __name__ == "__main__":
    main()
