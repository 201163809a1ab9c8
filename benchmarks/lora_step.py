"""Compare a LoRA training step with PEFT on transformers, and with full fine-tuning in bmforge.

    python benchmarks/lora_step.py [--targets qv all] [--base-dtype bf16|int8|int4] [--rounds 20]

All contenders open the same randomly initialized Llama, each in a process of its own, and step in
turns (forward, backward, AdamW). With `--base-dtype bf16`, the base weights and the computation
are in bf16, and PEFT runs in three ways: adapters in bf16, adapters in fp32 (PEFT's default), and
the latter under `torch.autocast`; compare with the fastest. All contenders use the thread and
allocator settings of `bmforge.host_tuning`, except "PEFT, untuned", which keeps torch's.
Memory is the peak resident set during a step minus the resident set before it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import MIB, Contender, header, paired_ratio, run_in_turns, table  # noqa: E402

OURS = {
    "qv": ["attn.q_proj", "attn.v_proj"],
    "all": [
        *("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ],
}
# How PEFT computes with base weights in bf16: (dtype of the adapters, torch.autocast on or off).
IN_BF16 = {
    "PEFT, bf16 adapters": (torch.bfloat16, False),
    "PEFT, fp32 adapters": (torch.float32, False),
    "PEFT, autocast": (torch.float32, True),
}
THEIRS = {kind: [name.rpartition(".")[2] for name in names] for kind, names in OURS.items()}


def make_batch(vocab: int, tokens: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab, (rows, tokens // rows), generator=generator)


def build_ours(
    folder: str, kind: str, rank: int, tokens: int, rows: int, base: str = "fp32"
) -> Callable[[], float]:
    """Return a step of bmforge; kind "full" tunes all weights.

    `base` "int8" or "int4" quantizes the linear layers of the blocks, as ``--base-dtype`` does;
    "bf16" stores the frozen weights in bf16 and computes in bf16.
    """
    from bmforge.models import AutoModel
    from bmforge.models.pack import quantize_
    from bmforge.parallel import parallelize
    from bmforge.recipes.base_weights import find_base_layers
    from bmforge.train.optim.build import OptimConfig, build_optimizers
    from bmforge.tune.delta import Lora

    model: Any = AutoModel.from_pretrained(folder)
    if base in ("int8", "int4"):
        spec, names = find_base_layers(model, base)
        model = quantize_(model, spec, where=names)
    model.train()
    if kind != "full":
        Lora(model, OURS[kind], rank=rank, alpha=2.0 * rank)
    if base == "bf16":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        parallelize(model, precision="bf16")
    (optimizer,) = build_optimizers(model, OptimConfig(lr=1e-4, weight_decay=0.0))
    ids = make_batch(model.config.vocab_size, tokens, rows)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def build_theirs(
    folder: str,
    kind: str,
    rank: int,
    tokens: int,
    rows: int,
    base_dtype: str = "fp32",
    adapters: torch.dtype = torch.float32,
    autocast: bool = False,
) -> Callable[[], float]:
    """Return a step of PEFT on transformers; torchao stores the blocks in int8 or NF4 ("int4")."""
    import peft
    import transformers

    dtype = torch.bfloat16 if base_dtype == "bf16" else torch.float32
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if base_dtype == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(base.model.layers, Int8WeightOnlyConfig())
    elif base_dtype == "int4":
        store_nf4_(base.model.layers)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=THEIRS[kind])
    model = peft.get_peft_model(
        base, config, autocast_adapter_dtype=adapters == torch.float32
    ).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    ids = make_batch(base.config.vocab_size, tokens, rows)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def store_nf4_(blocks: torch.nn.Module) -> None:
    """Store the linear layers in NF4; torchao's int4 weights have no backward pass on a CPU."""
    from torchao.quantization import to_nf4

    for module in blocks.modules():
        if isinstance(module, torch.nn.Linear):
            weight = to_nf4(module.weight.detach(), block_size=64, scaler_block_size=256)
            module.weight = torch.nn.Parameter(weight, requires_grad=False)


def write_base(folder: str, options: argparse.Namespace) -> None:
    """Write the model that all open."""
    from bmforge.models import Llama, LlamaConfig

    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.heads,
        max_seq_len=2048,
    )
    Llama.from_config(config).save_pretrained(folder)


def trained_bytes(folder: str, kind: str, rank: int) -> int:
    """Return the bytes of gradients and AdamW's two states, in fp32."""
    from bmforge.models import AutoModel
    from bmforge.tune.delta import Lora

    model: Any = AutoModel.from_pretrained(folder)
    if kind != "full":
        Lora(model, OURS[kind], rank=rank)
    return 3 * 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)


def main() -> None:
    """Print seconds, ratios and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--base-dtype", choices=("fp32", "bf16", "int8", "int4"), default="fp32")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1376)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=20, help="0 measures memory alone")
    parser.add_argument("--budget-s", type=float, default=400)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    packages = ("torch", "transformers", "peft")
    print(header("python benchmarks/lora_step.py " + " ".join(sys.argv[1:]), threads, packages))
    with tempfile.TemporaryDirectory() as folder:
        write_base(folder, options)
        for kind in options.targets:
            compare(folder, kind, options, threads)


def compare(folder: str, kind: str, options: argparse.Namespace, threads: int) -> None:
    """Run one choice of targets and print it; without rounds, its memory alone."""
    given = options.rank, options.tokens, options.rows, options.base_dtype
    full = (*given[:3], "bf16" if options.base_dtype == "bf16" else "fp32")
    contenders = {"ours": Contender(build_ours, threads, folder, kind, *given, tuned=True)}
    ways = IN_BF16 if options.base_dtype == "bf16" else {"PEFT": (torch.float32, False)}
    for name, way in ways.items():
        contenders[name] = Contender(build_theirs, threads, folder, kind, *given, *way, tuned=True)
    untuned = Contender(build_theirs, threads, folder, kind, *given, *ways[name])
    contenders["PEFT, untuned"] = untuned
    if options.rounds:
        contenders["ours, full"] = Contender(build_ours, threads, folder, "full", *full, tuned=True)
    losses = {name: one.step().loss for name, one in contenders.items()}
    # Both round to 8 or 4 bits, in groups of different sizes and with other steps.
    near = {"fp32": 1e-4, "bf16": 1e-3, "int8": 0.05, "int4": 0.2}[options.base_dtype]
    assert all(abs(losses["ours"] - loss) < near for loss in losses.values()), losses
    peaks = {name: one.step(measure_memory=True).peak_bytes for name, one in contenders.items()}
    seconds: dict[str, list[float]] = {}
    if options.rounds:
        for one in contenders.values():
            one.step()
        steps = run_in_turns(contenders, options.rounds, options.budget_s)
        seconds = {name: [step.seconds for step in timed] for name, timed in steps.items()}
    for one in contenders.values():
        one.close()
    print(f"\n{kind}, base in {options.base_dtype}: {len(seconds.get('ours', []))} rounds\n")
    show(folder, kind, options.rank, peaks, seconds)


def show(
    folder: str, kind: str, rank: int, peaks: dict[str, int], seconds: dict[str, list[float]]
) -> None:
    """Print the table of one choice of targets; `seconds` is empty if no time was measured."""
    states = {"full": trained_bytes(folder, "full", 0)}
    states[kind] = trained_bytes(folder, kind, rank)
    rows = []
    for name, peak in peaks.items():
        cells, ratio = ["not timed"], "not timed"
        if seconds:
            cells = [f"{statistics.median(seconds[name]):.3f}"]
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(
                *paired_ratio(seconds["ours"], seconds[name])
            )
        kept = states["full" if "full" in name else kind]
        cells += [f"{peak / MIB:.0f}", f"{kept / MIB:.1f}"]
        rows.append([name, *cells, ratio, f"{peaks['ours'] / peak:.2f}"])
    columns = ["step", "s", "peak MiB above", "gradients and states, MiB"]
    print(table([*columns, "its time / ours", "our peak / its"], rows))


if __name__ == "__main__":
    main()
