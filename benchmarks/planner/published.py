"""Predictions of the planner compared with published figures: speed, memory and cost.

    python -m benchmarks.planner.published [--only speed] [--fit] [--write FILE]

- speed: training speed of Megatron-LM, torchtitan, KempnerForge, OLMo-core and BMTrain. The
  efficiency of each GPU is fitted to the row that `hardware.py` names; all other rows are
  predictions. Rows in fp8 are not compared, because the planner does not support fp8.
- fits: whether a 13B model fits on 32 V100, from BMTrain's table.
- gpt3, network: time of a GPT-3 training, and its dependence on the network.
- bert: largest batch of BERT-Large on a 2080 Ti.

`--fit` prints the fitted efficiencies. Settings that a source does not state, such as Megatron's
micro-batches and BMTrain's network, are assumed as commented below.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import header, make_parser, table
from bmforge.cli.plan_workload import workload_of
from bmforge.models.bert import BertConfig
from bmforge.models.gpt2 import GPT2Config
from bmforge.models.llama import LlamaConfig
from bmforge.parallel import Layout
from bmforge.parallel.planner.estimate import Estimator, PlanRequest, PlanRow, TrainingSetup
from bmforge.parallel.planner.hardware import Cluster, Device, find_device
from bmforge.parallel.planner.search import plan
from bmforge.parallel.planner.step_time import OURS, TrainingEngine

GIB = 2**30


@dataclass(frozen=True)
class Published:
    """A published row.

    Args:
        source, label: project and name of the row.
        model: config of the model.
        gpu, gpus, per_node: model and number of the GPUs, GPUs per node.
        length, rows: tokens of a row, rows of a micro-batch.
        micro_batches: micro-batches of a step.
        layout: layout in bmforge's terms.
        tokens_per_s: speed per GPU.
        recompute, compiled: settings of the run.
        network: network in Gb/s per GPU.
        has_switch: the GPUs of a node are connected by a switch.
        engine: communication of the training engine.
        fitted: the efficiency of the GPU is fitted to this row.
    """

    source: str
    label: str
    model: Any
    gpu: str
    gpus: int
    length: int
    rows: int
    layout: Layout
    tokens_per_s: float
    micro_batches: int = 1
    recompute: bool = True
    compiled: bool = False
    per_node: int = 8
    network: float = 200.0
    has_switch: bool = True
    engine: TrainingEngine = OURS
    fitted: bool = False


def _llama(hidden: int, layers: int, heads: int, width: int) -> Any:
    return LlamaConfig(
        vocab_size=128256, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=8,
        intermediate_size=width, max_seq_len=8192, tie_word_embeddings=False,
    )  # fmt: skip


def _gpt(hidden: int, layers: int, heads: int, vocab: int = 51200, length: int = 2048) -> Any:
    return GPT2Config(
        vocab_size=vocab, hidden_size=hidden, num_layers=layers, num_heads=heads,
        max_seq_len=length,
    )  # fmt: skip


L8, L13, L70 = _llama(4096, 32, 32, 14336), _llama(5120, 40, 40, 17920), _llama(8192, 80, 64, 28672)

# Narayanan et al. 2021, table 1: hidden, layers, heads, tp, pp, GPUs, batch, TFLOP/s per GPU, which
# include recomputation. Micro-batches are not published: 4 rows without a pipeline, 1 with.
MEGATRON = (
    ("1.7B", 2304, 24, 24, 1, 1, 32, 512, 137),
    ("3.6B", 3072, 30, 32, 2, 1, 64, 512, 138),
    ("7.5B", 4096, 36, 32, 4, 1, 128, 512, 142),
    ("18.4B", 6144, 40, 48, 8, 1, 256, 1024, 135),
    ("39.1B", 8192, 48, 64, 8, 2, 512, 1536, 138),
    ("76.1B", 10240, 60, 80, 8, 4, 1024, 1792, 140),
    ("145.6B", 12288, 80, 96, 8, 8, 1536, 2304, 148),
    ("310.1B", 16384, 96, 128, 8, 16, 1920, 2160, 155),
    ("529.6B", 20480, 105, 128, 8, 35, 2520, 2520, 163),
    ("1008B", 25600, 128, 160, 8, 64, 3072, 3072, 163),
)
# KempnerForge, mfu_scaling_2026-04-05 and weak_scaling_160gpu: model, GPUs, tp, tokens/s of all.
KEMPNER = (
    ("7B", 1, 1, 10471), ("7B", 2, 1, 18728), ("7B", 2, 2, 13163), ("7B", 4, 1, 38983),
    ("7B", 4, 4, 25135), ("7B", 4, 2, 25980), ("7B", 8, 4, 44299), ("13B", 8, 1, 35405),
    ("13B", 8, 4, 27345), ("7B", 16, 4, 82988), ("13B", 16, 4, 53814), ("7B", 32, 4, 155917),
    ("13B", 32, 4, 104309), ("70B", 32, 4, 17657), ("13B", 64, 4, 216507),
    ("13B", 160, 4, 534644), ("70B", 64, 4, 35824), ("70B", 160, 4, 85571),
)  # fmt: skip
# Rows and micro-batches of a tensor parallel group in mfu_bench.sh; the first two rows of 7B have
# 2 rows and 4 micro-batches.
KEMPNER_BATCH = {"7B": (L8, 4, 2), "13B": (L13, 4, 4), "70B": (L70, 2, 4)}
# tensor_parallel.py all-gathers the tokens for each of q, k, v, gate and up, and reduce-scatters
# for o and down: 7 collectives per direction, and 6 in the recomputation, which ends before the
# last one. The profile (13b_24gpu_profiling.md) has the same: 9,679 all-gathers and 6,420 reduce-
# scatters in 5 steps of 4 micro-batches and 40 blocks. The head gathers all logits in bf16 on
# every process. Each of 41 units is reduced once per step, between nodes at 19 GB/s, which a link
# of 200 Gb/s provides at the planner's 80 %.
KEMPNER_ENGINE = TrainingEngine(collectives=(7, 7, 6), reduces_once=True)
KEMPNER_NETWORK = 200.0
BMTRAIN = {8: 24.15, 16: 26.94, 24: 29.42, 32: 28.28}
GPT_13B = _gpt(5120, 40, 128, 50257, 512)


def published_rows() -> Iterator[Published]:
    """Yield all published rows."""
    for label, hidden, layers, heads, tp, pp, gpus, batch, tflops in MEGATRON:
        flops = 96 * batch * 2048 * layers * hidden**2
        flops *= 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
        speed = batch * 2048 * tflops * 1e12 / flops
        rows = 4 if pp == 1 else 1
        count = batch // (gpus // tp // pp) // rows
        layout = Layout(zero=0, tp=tp, pp=pp)
        if pp > 1 and layers % (2 * pp) == 0:
            layout = replace(layout, pp_schedule="interleaved-1f1b", pp_stages_per_rank=2)
        yield Published(
            "Megatron-LM", label, _gpt(hidden, layers, heads), "a100-80gb", gpus, 2048, rows,
            layout, speed, count, fitted=label == "7.5B",
        )  # fmt: skip
    titan = {"recompute": False, "network": 400.0}
    for gpus, compiled, speed in ((8, False, 5762), (8, True, 6667), (128, False, 5605),
                                  (128, True, 6514)):  # fmt: skip
        yield Published(
            "torchtitan", f"8B, {gpus} GPUs{', compiled' if compiled else ''}", L8,
            "h100-96gb-500w", gpus, 8192, 2, Layout(), speed, compiled=compiled,
            fitted=compiled and gpus == 8, **titan,  # type: ignore[arg-type]
        )  # fmt: skip
    for name, gpus, tp, speed in KEMPNER:
        model, rows, count = KEMPNER_BATCH[name]
        if name == "7B" and gpus <= 2 and tp == 1:
            rows, count = 2, 4
        yield Published(
            "KempnerForge", f"{name}, {gpus} GPUs, tp={tp}", model, "h200", gpus, 4096, rows,
            Layout(tp=tp, sequence_parallel=tp > 1), speed / gpus, count,
            compiled=(name, gpus, tp) != ("13B", 8, 1),  # as mfu_bench.sh says
            # All pairs of the four GPUs of a board are linked.
            per_node=4, has_switch=False, network=KEMPNER_NETWORK,
            engine=replace(KEMPNER_ENGINE, gathered_bytes=2.0 * rows * 4096 * model.vocab_size),
            fitted=gpus == 1,
        )  # fmt: skip
    olmo = replace(L8, num_kv_heads=32, intermediate_size=11008, vocab_size=50304)
    for name, model, speed in (("7B", olmo, 10000), ("Llama-3 8B", L8, 9500)):
        yield Published(
            "OLMo-core", name, model, "h100-80gb", 64, 4096, 2, Layout(), speed, recompute=False,
            compiled=True, network=400.0, fitted=name == "Llama-3 8B",
        )  # fmt: skip
    for rows, samples in BMTRAIN.items():
        yield Published(
            "BMTrain", f"13B, batch {rows}", GPT_13B, "v100-32gb", 32, 512, rows, Layout(),
            samples * 512 / 32, network=12.5, fitted=rows == 16,
        )  # fmt: skip


def request_of(row: Published, device: Device) -> PlanRequest:
    """Return the planner's request for a row."""
    replicas = row.gpus // row.layout.tp // row.layout.pp
    return PlanRequest(
        workload_of(row.label, row.model, row.length),
        Cluster(device, row.gpus, row.per_node, row.network, has_switch=row.has_switch),
        replicas * row.rows * row.micro_batches,
        "bf16" if device.has_bf16 else "fp16",
        compiled=row.compiled,
    )


@cache
def traces_of(model: str, length: int) -> dict[Any, Any]:
    """Return the dict of traces that all rows of a model share."""
    return {}


def predict(row: Published) -> PlanRow:
    """Return the planner's estimate of a row."""
    traces = traces_of(repr(row.model), row.length)
    request = request_of(row, find_device(row.gpu))
    estimator = Estimator(request, engine=row.engine, traces=traces)
    return estimator.estimate(TrainingSetup(row.layout, row.rows, row.recompute))


def fit(row: Published) -> float:
    """Return the efficiency at which the planner predicts the published speed."""
    device = find_device(row.gpu)
    estimator = Estimator(request_of(row, device), engine=row.engine)
    choice = TrainingSetup(row.layout, row.rows, row.recompute)
    low, high = 0.05, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        changed = replace(device, efficiency=middle)
        cluster = replace(estimator.request.cluster, device=changed)
        estimator.request = replace(estimator.request, cluster=cluster)
        speed = estimator.estimate(choice).tokens_per_s / row.gpus
        low, high = (middle, high) if speed < row.tokens_per_s else (low, middle)
    return middle


def speed_table(rows: list[Published]) -> str:
    """Return the table of speeds."""
    lines, errors = [], []
    for row in rows:
        speed = predict(row).tokens_per_s / row.gpus
        error = speed / row.tokens_per_s - 1
        if not row.fitted:
            errors.append(abs(error))
        shown = str(row.layout).removeprefix("Layout(").removesuffix(")")
        lines.append([row.source, row.label, f"{row.gpus} x {row.gpu}", shown,
                      f"{row.tokens_per_s:,.0f}", f"{speed:,.0f}",
                      "fitted" if row.fitted else f"{error:+.0%}"])  # fmt: skip
    columns = ["source", "row", "GPUs", "layout", "published, tokens/s/GPU", "planner", "error"]
    return (
        table(columns, lines)
        + f"\n\n{len(errors)} predictions: median error {statistics.median(errors):.0%}, "
        + f"worst {max(errors):.0%}.\n"
    )


def fits_table() -> str:
    """Return BMTrain's table of a 13B model on 32 V100-32GB and the predictions; all recompute."""
    device, lines = find_device("v100-32gb"), []
    cases: list[tuple[str, Layout, tuple[int, ...], tuple[str, ...]]] = [
        ("BMTrain, ZeRO-3", Layout(), (8, 16, 24, 32), ("fits",) * 4),
        ("ZeRO-3, mp=1", Layout(), (8, 16, 24, 32), ("fits", "fits", "fits", "OOM")),
        ("ZeRO-3, mp=4", Layout(tp=4), (8, 16, 24, 32), ("fits", "OOM", "OOM", "OOM")),
        ("ZeRO-3, mp=8", Layout(tp=8), (8, 16, 24, 32), ("fits", "OOM", "OOM", "OOM")),
        ("ZeRO-2, mp=1", Layout(zero=2), (8, 16, 24, 32), ("OOM",) * 4),
        ("ZeRO-2, mp=4", Layout(zero=2, tp=4), (8, 16, 24, 32), ("fits", "OOM", "OOM", "OOM")),
        ("ZeRO-2, mp=8", Layout(zero=2, tp=8), (8, 16, 24, 32), ("fits", "OOM", "OOM", "OOM")),
    ]
    for name, layout, batches, verdicts in cases:
        cells = []
        for rows, published in zip(batches, verdicts, strict=True):
            # The published batch is that of one GPU; a tensor parallel group has tp times as many.
            case = Published("", name, GPT_13B, device.name, 32, 512, rows * layout.tp, layout, 1.0)
            row = predict(case)
            verdict = "fits" if row.fits else "does not fit"
            cells.append(f"{row.memory.total / GIB:.1f} GiB, {verdict} ({published})")
        lines.append([name, *cells])
    usable = f"{device.memory_bytes / GIB:.1f} GiB usable; published result in parentheses"
    return table([usable, "batch 8", "16", "24", "32"], lines) + "\n"


def gpt3_lines() -> str:
    """Return the table of GPT-3 175B with 300B tokens on small clusters of A100-40GB."""
    model, lines = _gpt(12288, 96, 96), []
    for gpus, theirs in ((64, "about 2 years"), (128, "about 6 months")):
        start = time.perf_counter()
        cluster = Cluster(find_device("a100-40gb"), gpus)
        found = plan(PlanRequest(workload_of("GPT-3", model, 2048), cluster, 1536))
        seconds = time.perf_counter() - start
        best = found.winner
        plain = [row for row in found.rows if row.fits and not row.choice.offloaded]
        months = best.hours(300e9) / 24 / 365.25 * 12
        without = f"{plain[0].choice.layout}" if plain else "nothing"
        lines.append([gpus, theirs, f"{months:.1f} months", best.choice.layout, best.choice.rows,
                      best.choice.recompute, f"{best.choice.offloaded:.0%}", without,
                      f"{best.hours(300e9) * gpus:,.0f}", f"{seconds:.0f} s"])  # fmt: skip
    columns = ["GPUs", "published", "planner", "layout", "rows", "recompute", "offloaded",
               "fits without offload", "GPU-hours", "planned in"]  # fmt: skip
    return table(columns, lines) + "\n"


def gpt3_by_network() -> str:
    """Return the table of GPT-3 with ZeRO-3 and recomputation, by the network's bandwidth per GPU.

    The published times do not state the network; parentheses show the error of the planner.
    """
    model, lines = _gpt(12288, 96, 96), []
    traces: dict[Any, Any] = {}
    for network in (25.0, 29.0, 33.0, 37.0, 41.0, 50.0, 100.0, 200.0):
        line: list[object] = [f"{network:g}"]
        for gpus, theirs in ((64, 24), (128, 6)):
            cluster = Cluster(find_device("a100-40gb"), gpus, network_gbit_s=network)
            request = PlanRequest(workload_of("GPT-3", model, 2048), cluster, 1536)
            estimator = Estimator(request, traces=traces)
            # Offloading costs time, so the smallest share that fits is used.
            fitting = []
            for rows in (1, 2, 3, 4, 6):
                shares = (0.05 * step for step in range(21))
                found = (
                    estimator.estimate(TrainingSetup(Layout(), rows, True, one)) for one in shares
                )
                if 1536 % (gpus * rows) == 0:
                    fitting += [row for row in found if row.fits][:1]
            best = min(fitting, key=lambda row: row.hours(300e9))
            months = best.hours(300e9) / 24 / 365.25 * 12
            line += [best.choice.rows, f"{best.choice.offloaded:.0%}",
                     f"{months:.1f} months ({months / theirs - 1:+.0%})"]  # fmt: skip
        lines.append(line)
    columns = ["Gb/s per GPU", "64 GPUs: rows", "offloaded", "time (24 months)",
               "128 GPUs: rows", "offloaded", "time (6 months)"]  # fmt: skip
    return table(columns, lines) + "\n"


def bert_line() -> str:
    """Return the table of the largest batches of BERT-Large on 11 GB: fine-tuning, 512 tokens."""
    device, lines = find_device("2080ti"), []
    model = BertConfig.preset("bert-large-uncased")
    for recompute, offloaded in ((False, 0.0), (True, 0.0)):
        low, high, memory = 0, 256, 0.0
        while high - low > 1:
            rows = (low + high) // 2
            case = Published("", "BERT", model, device.name, 1, 512, rows, Layout(zero=0), 1.0)
            estimator = Estimator(request_of(case, device))
            found = estimator.estimate(TrainingSetup(case.layout, rows, recompute, offloaded))
            if found.fits:
                low, memory = rows, found.memory.total / GIB
            else:
                high = rows
        lines.append([recompute, f"{offloaded:.0%}", low, f"{memory:.2f} GiB"])
    return table(["recompute", "offloaded", "largest batch", "memory"], lines) + "\n"


def main() -> None:
    """Print the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="print the fitted efficiencies")
    parser.add_argument("--only", choices=("speed", "fits", "gpt3", "network", "bert"))
    parser.add_argument("--write", type=Path, help="file that receives the table of speeds")
    arguments = parser.parse_args()
    rows = list(published_rows())
    if arguments.fit:
        for row in rows:
            if row.fitted:
                print(f"{row.gpu}: {fit(row):.3f}")
        return
    print(header(1, ["torch"]) + "\n")
    parts = {"speed": lambda: speed_table(rows), "fits": fits_table, "gpt3": gpt3_lines,
             "network": gpt3_by_network, "bert": bert_line}  # fmt: skip
    for name, make in parts.items():
        if arguments.only in (None, name):
            text = make()
            print(text, flush=True)
            if name == "speed" and arguments.write is not None:
                arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
