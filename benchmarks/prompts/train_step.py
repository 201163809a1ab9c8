"""Training step of prompt learning with the LM head on the masks only, or on all tokens.

    python -m benchmarks.prompts.train_step [--rows 8] [--tokens 128] [--hidden 768] [--layers 12]
        [--rounds 7] [--budget-s 300]

The model is a BERT with one mask per row. "masks" computes the logits of the masks. "all" computes
the logits of all tokens and selects the masks, as OpenPrompt does; "transformers" does so with
transformers' model. Each side runs in its own process; the steps alternate. The memory is the peak
resident memory of a step above the resident memory after it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

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


def build(way: str, rows: int, tokens: int, hidden: int, layers: int) -> Callable[[], float]:
    """Return one step with a classification loss at one mask of every row."""
    if way == "transformers":
        return build_peer(rows, tokens, hidden, layers)
    from bmforge.models import Bert, BertConfig

    config = BertConfig(
        vocab_size=30_522, hidden_size=hidden, num_layers=layers, num_heads=hidden // 64,
        intermediate_size=4 * hidden, max_seq_len=512, head="masked_lm", dropout=0.0,
        attn_dropout=0.0,
    )  # fmt: skip
    model = Bert.from_config(config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20_000, (rows, tokens), generator=generator)
    places = torch.randint(1, tokens, (rows, 1), generator=generator)
    labels = torch.randint(0, 4, (rows,), generator=generator)
    words = torch.tensor([2088, 2998, 2449, 2974])

    def step() -> float:
        if way == "masks":
            logits = model(input_ids=ids, logits_at=places).logits[:, 0]
        else:
            logits = model(input_ids=ids).logits[torch.arange(rows), places[:, 0]]
        loss = torch.nn.functional.cross_entropy(logits[:, words], labels)
        loss.backward()
        model.zero_grad(set_to_none=True)  # as training programs do, before the next forward pass
        return float(loss.detach())

    return step


def build_peer(rows: int, tokens: int, hidden: int, layers: int) -> Callable[[], float]:
    """Return the same step of transformers' model, with the arguments of OpenPrompt."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=30_522, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, intermediate_size=4 * hidden, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20_000, (rows, tokens), generator=generator)
    places = torch.randint(1, tokens, (rows, 1), generator=generator)[:, 0]
    labels = torch.randint(0, 4, (rows,), generator=generator)
    words = torch.tensor([2088, 2998, 2449, 2974])

    def step() -> float:
        out = model(input_ids=ids, output_hidden_states=True)
        logits = out.logits[torch.arange(rows), places]
        loss = torch.nn.functional.cross_entropy(logits[:, words], labels)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def main() -> None:
    """Print the times, the peaks and the ratios."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=300)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    print(header(threads, ["torch"]))
    sizes = options.rows, options.tokens, options.hidden, options.layers
    contenders = {
        way: Contender(build, threads, way, *sizes, tuned=way != "transformers")
        for way in ("masks", "all", "transformers")
    }
    losses = {way: round(contender.step().loss, 6) for way, contender in contenders.items()}
    peaks = {
        way: contender.step(measure_memory=True).peak_bytes for way, contender in contenders.items()
    }
    steps = run_in_turns(contenders, options.rounds, options.budget_s)
    for contender in contenders.values():
        contender.close()
    seconds = {way: [step.seconds for step in timed] for way, timed in steps.items()}
    rows = [
        [way, f"{statistics.median(seconds[way]):.3f}", f"{peaks[way] / MIB:.0f}"]
        for way in contenders
    ]
    print(table(["logits of", "s/step", "peak, MiB"], rows))
    for peer in ("all", "transformers"):
        ratio = paired_ratio(seconds, "masks", peer)
        print(f"\n{ratio}, target 1.15")
        print(f"peak, {ratio.sides}: {peaks['masks'] / peaks[peer]:.2f}, target 0.8")
    print(f"losses {losses}")


if __name__ == "__main__":
    main()
