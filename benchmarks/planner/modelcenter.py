"""Predictions of the planner compared with ModelCenter's published benchmark.

    python -m benchmarks.planner.modelcenter

The benchmark (docs/source/notes/benchmark.md of ModelCenter) has BERT-Large on a V100 with 32 GB
and a 2080 Ti, with transformers in fp32 and fp16 and with ModelCenter, and T5-11B on two A100 with
40 GB. It does not state the number of tokens; the script assumes 512, BERT's maximum. ModelCenter
recomputes every block. The last table explains the published cost savings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.harness import header, make_parser, table
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
    """A row of the published table.

    Args:
        program: the program.
        gpu: model of the GPU.
        precision: precision of the run.
        recompute: activation recomputation.
        batch: largest batch that ran; 0 for none.
        seconds: step time; 0 if it is not published.
    """

    program: str
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
    """Return the dict of traces that all rows of a GPU share."""
    return {}


def estimate(case: Case, rows: int) -> PlanRow:
    """Return the planner's estimate of a row with a batch size."""
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
    """Return the table of BERT-Large: largest batches and step times."""
    lines: list[list[object]] = []
    for case in CASES:
        asked = estimate(case, max(1, case.batch))
        seconds = asked.times.total
        error = f"{seconds / case.seconds - 1:+.1%}" if case.seconds else ""
        lines.append([
            case.program, case.gpu, case.precision, "yes" if case.recompute else "no",
            case.batch, largest(case), f"{asked.memory.total / GIB:.1f} GiB",
            f"{case.seconds:g} s" if case.seconds else "", f"{seconds:.2f} s", error,
        ])  # fmt: skip
    columns = ["program", "GPU", "precision", "recompute", "largest batch, published",
               "largest batch, planner", "memory of the published batch", "step, published",
               "step, planner", "error"]  # fmt: skip
    return table(columns, lines) + "\n"


def t5_table() -> str:
    """Return the table of T5-11B: the best plan for a number of GPUs, with and without offload."""
    lines: list[list[object]] = []
    for gpus, offload in ((2, True), (2, False), (4, False), (8, False)):
        cluster = Cluster(find_device("a100-40gb"), gpus)
        result = plan(PlanRequest(workload_of("T5-11B", T5, TOKENS), cluster, 16, offload=offload))
        row = result.rows[0]
        missing = f"lacks {max(row.short_bytes, row.host_short_bytes) / GIB:.1f} GiB"
        times = [f"{row.times.total:.2f} s", f"{gpus * row.times.total / 16:.2f} s"]
        lines.append([
            gpus, "yes" if offload else "no", row.choice.layout, row.choice.rows,
            "yes" if row.choice.recompute else "no", f"{row.choice.offloaded:.0%}",
            f"{row.memory.total / GIB:.1f} GiB", *(times if row.fits else [missing, ""]),
        ])  # fmt: skip
    columns = ["GPUs", "may offload", "layout", "rows", "recompute", "offloaded", "memory",
               "step of 16 rows", "GPU-seconds a row"]  # fmt: skip
    return table(columns, lines) + "\n"


def cost_table() -> str:
    """Return the table of costs of BERT-Large, relative to transformers in fp32."""
    base = CASES[0]
    published = base.seconds / base.batch
    planned = estimate(base, base.batch).times.total / base.batch
    lines: list[list[object]] = []
    for case in (*CASES[:3], CASES[5]):
        published_s = case.seconds / case.batch
        planned_s = estimate(case, case.batch).times.total / case.batch
        speed = f"{published / published_s:.2f}" if published_s else ""
        # The largest price of this GPU at which a row costs a tenth of the base case.
        price = f"{0.1 * planned / planned_s:.2f}"
        lines.append(
            [case.program, case.gpu, case.precision, speed, f"{planned / planned_s:.2f}", price]
        )
    columns = ["program", "GPU", "precision", "speed, program / transformers fp32, published",
               "the same, planner", "price for a saving of 90 %, V100 = 1"]  # fmt: skip
    return table(columns, lines) + "\n"


def main() -> None:
    """Print the three tables."""
    make_parser(__doc__).parse_args()
    print(header(1, ["torch"]) + "\n")
    for make in (bert_table, t5_table, cost_table):
        print(make(), flush=True)


if __name__ == "__main__":
    main()
