"""Training step with LoRA compared with PEFT on transformers, and with full fine-tuning.

    python -m benchmarks.adapters.lora_step [--targets qv all] [--base-dtype bf16|int8|int4]
        [--rounds 20] [--rank 8] [--tokens 1024] [--layers 8] [--answers 0.5] [--budget-s 400]

All sides open the same Llama with random weights. Each runs in its own process; the steps alternate
and include AdamW. The memory is the peak resident memory of a step above the resident memory after
it. The bytes of gradients and optimizer states are computed. `--rounds 0` measures memory alone.
`--answers` is the fraction of tokens with labels: in a chat, these are the tokens of the answers.

With `--base-dtype bf16`, base weights and computation are in bf16, and PEFT runs in three ways:
with adapters in bf16, with adapters in fp32 (its default), and with `torch.autocast`. All sides use
the thread and allocator settings of `bmforge.host_tuning`; only "PEFT, untuned" keeps torch's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import (
    MIB,
    Contender,
    header,
    make_parser,
    paired_ratio,
    run_in_turns,
    table,
)

TARGETS = {
    "qv": ["attn.q_proj", "attn.v_proj"],
    "all": [
        *("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ],
}
# How PEFT computes with base weights in bf16: (dtype of the adapters, torch.autocast on or off).
PEFT_IN_BF16 = {
    "PEFT, bf16 adapters": (torch.bfloat16, False),
    "PEFT, fp32 adapters": (torch.float32, False),
    "PEFT, autocast": (torch.float32, True),
}
PEFT_TARGETS = {
    kind: [name.rpartition(".")[2] for name in names] for kind, names in TARGETS.items()
}


def make_batch(
    vocab: int, tokens: int, rows: int, answers: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens, and labels of a fraction of them: turns of 64 tokens end in answers."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (rows, tokens // rows), generator=generator)
    is_prompt = torch.arange(tokens // rows) % 64 < round(64 * (1 - answers))
    return ids, ids.masked_fill(is_prompt, -100)


def build_bmforge(
    folder: str,
    kind: str,
    rank: int,
    tokens: int,
    rows: int,
    answers: float,
    base: str = "fp32",
    in_bf16: bool = False,
) -> Callable[[], float]:
    """Return a step of bmforge.

    Args:
        folder: directory of the base model.
        kind: key of TARGETS, or "full" for all weights.
        rank: rank of the adapters.
        tokens, rows: tokens and rows of the batch.
        answers: fraction of tokens with labels.
        base: "int8" or "int4" quantizes the linear layers of the blocks; "bf16" stores the
            frozen weights in bf16 and computes in bf16.
        in_bf16: compute in bf16 with any base; frozen weights that are not quantized are in bf16.
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
        Lora(model, TARGETS[kind], rank=rank, alpha=2.0 * rank)
    if base == "bf16" or in_bf16:
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()
        parallelize(model, precision="bf16")
    (optimizer,) = build_optimizers(model, OptimConfig(lr=1e-4, weight_decay=0.0))
    ids, labels = make_batch(model.config.vocab_size, tokens, rows, answers)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def build_peft(
    folder: str,
    kind: str,
    rank: int,
    tokens: int,
    rows: int,
    answers: float,
    base_dtype: str = "fp32",
    adapters: torch.dtype = torch.float32,
    autocast: bool = False,
    in_bf16: bool = False,
) -> Callable[[], float]:
    """Return a step of PEFT on transformers; torchao stores the blocks in int8 or NF4 ("int4").

    With `in_bf16`, the weights that torchao quantizes are in bf16, and so is the computation.
    """
    import peft
    import transformers

    dtype = torch.bfloat16 if base_dtype == "bf16" or in_bf16 else torch.float32
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if base_dtype == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(base.model.layers, Int8WeightOnlyConfig())
    elif base_dtype == "int4":
        store_nf4_(base.model.layers)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PEFT_TARGETS[kind])
    model = peft.get_peft_model(
        base, config, autocast_adapter_dtype=adapters == torch.float32
    ).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    ids, labels = make_batch(base.config.vocab_size, tokens, rows, answers)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
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
    """Write the base model."""
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
        Lora(model, TARGETS[kind], rank=rank)
    return 3 * 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)


def main() -> None:
    """Measure every choice of targets."""
    parser = make_parser(__doc__)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--base-dtype", choices=("fp32", "bf16", "int8", "int4"), default="fp32")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--answers", type=float, default=1.0, help="fraction of labeled tokens")
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
    print(header(threads, packages))
    with tempfile.TemporaryDirectory() as folder:
        write_base(folder, options)
        for kind in options.targets:
            compare(folder, kind, options, threads)


def compare(folder: str, kind: str, options: argparse.Namespace, threads: int) -> None:
    """Measure one choice of targets; without rounds, its memory alone."""
    arguments = options.rank, options.tokens, options.rows, options.answers, options.base_dtype
    given = folder, kind, *arguments
    full = (*arguments[:4], "bf16" if options.base_dtype == "bf16" else "fp32")
    contenders = {"bmforge": Contender(build_bmforge, threads, *given, tuned=True)}
    ways = PEFT_IN_BF16 if options.base_dtype == "bf16" else {"PEFT": (torch.float32, False)}
    for name, way in ways.items():
        contenders[name] = Contender(build_peft, threads, *given, *way, tuned=True)
    untuned = list(ways.values())[-1]
    contenders["PEFT, untuned"] = Contender(build_peft, threads, *given, *untuned)
    if options.rounds:
        contenders["bmforge, full"] = Contender(
            build_bmforge, threads, folder, "full", *full, tuned=True
        )
    losses = {name: contender.step().loss for name, contender in contenders.items()}
    # Both sides quantize, but with different group sizes and levels.
    near = {"fp32": 1e-4, "bf16": 1e-3, "int8": 0.05, "int4": 0.2}[options.base_dtype]
    assert all(abs(losses["bmforge"] - loss) < near for loss in losses.values()), losses
    peaks = {
        name: contender.step(measure_memory=True).peak_bytes
        for name, contender in contenders.items()
    }
    seconds: dict[str, list[float]] = {}
    if options.rounds:
        for contender in contenders.values():
            contender.step()
        steps = run_in_turns(contenders, options.rounds, options.budget_s)
        seconds = {name: [step.seconds for step in timed] for name, timed in steps.items()}
    for contender in contenders.values():
        contender.close()
    print(f"\n{kind}, base in {options.base_dtype}: {len(seconds.get('bmforge', []))} rounds\n")
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
            ratio = f"{paired_ratio(seconds, 'bmforge', name):.2f}"
        states_bytes = states["full" if "full" in name else kind]
        cells += [f"{peak / MIB:.0f}", f"{states_bytes / MIB:.1f}"]
        rows.append([name, *cells, ratio, f"{peaks['bmforge'] / peak:.2f}"])
    columns = ["side", "s", "peak, MiB", "gradients and states, MiB"]
    print(table([*columns, "speed, bmforge / side", "peak, bmforge / side"], rows))


if __name__ == "__main__":
    main()
