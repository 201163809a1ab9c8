"""Training step with LoRA on int4 and int8 base weights, compared with bf16 base weights and PEFT.

    python -m benchmarks.adapters.qlora_step [--hidden 2048 --intermediate 5632 --layers 2]
        [--peer] [--clock cpu] [--rounds 20] [--threads 1] [--budget-s 300]

All sides open the same Llama with random weights, compute in bf16, and train LoRA on all linear
layers. Each runs in its own process; the steps alternate and include AdamW. `--peer` adds PEFT on
torchao's NF4 (its int4 has no backward pass on a CPU), with adapters in bf16. `--clock cpu` reports
CPU time. The memory is the peak resident memory of a step above the resident memory after it.
"""

from __future__ import annotations

import statistics
import tempfile

import torch

from benchmarks.adapters.lora_step import build_bmforge, build_peft, write_base
from benchmarks.harness import (
    MIB,
    Contender,
    header,
    make_parser,
    paired_ratio,
    run_in_turns,
    table,
)

BASES = ("bf16", "int8", "int4")
PEER = "PEFT, NF4"


def main() -> None:
    """Measure one model size."""
    parser = make_parser(__doc__)
    parser.add_argument("--peer", action="store_true", help="also measure PEFT")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1376)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=300)
    options = parser.parse_args()
    packages = ("torch", "transformers", "peft", "torchao") if options.peer else ("torch",)
    print(header(options.threads, packages))
    with tempfile.TemporaryDirectory() as folder:
        write_base(folder, options)
        batch = "all", options.rank, options.tokens, options.rows, 1.0
        contenders = {
            base: Contender(build_bmforge, options.threads, folder, *batch, base, True, tuned=True)
            for base in BASES
        }
        if options.peer:
            arguments = (folder, *batch, "int4", torch.bfloat16, False, True)
            contenders[PEER] = Contender(build_peft, options.threads, *arguments, tuned=True)
        losses = {name: contender.step().loss for name, contender in contenders.items()}
        assert max(losses.values()) - min(losses.values()) < 0.2, losses
        steps = {n: c.step(measure_memory=True) for n, c in contenders.items()}
        peaks = {name: step.peak_bytes for name, step in steps.items()}
        for contender in contenders.values():
            contender.step()
        timed = run_in_turns(contenders, options.rounds, options.budget_s)
        for contender in contenders.values():
            contender.close()
    seconds = {
        name: [step.cpu_seconds if options.clock == "cpu" else step.seconds for step in some]
        for name, some in timed.items()
    }
    print(f"\n{len(seconds['bf16'])} rounds\n")
    rows = []
    for name, times in seconds.items():
        cells = [f"{statistics.median(times):.3f}", f"{paired_ratio(seconds, name, 'bf16'):.2f}"]
        cells.append(f"{peaks[name] / MIB:.0f}")
        if options.peer:
            cells.append(f"{paired_ratio(seconds, name, PEER):.2f}")
            cells.append(f"{peaks[name] / peaks[PEER]:.2f}")
        rows.append([name, *cells])
    columns = ["base weights", f"{options.clock} s", "speed, base / bf16", "peak, MiB"]
    columns += ["speed, base / PEFT", "peak, base / PEFT"] if options.peer else []
    print(table(columns, rows))


if __name__ == "__main__":
    main()
