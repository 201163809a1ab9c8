"""Time a step of learning by a prompt: only the masks go through the head, or all tokens do.

    python benchmarks/prompt_step.py [--rows 8] [--tokens 128] [--hidden 768 --layers 12]

"all" is OpenPrompt's way: the logits of all tokens, of which those at the mask are picked; as
"transformers" on that library's model, which is what it runs. Each in a process of its own, in
turns. The memory is the largest resident set of a step above what stands before and after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import MIB, Contender, header, paired_ratio, run_in_turns, table  # noqa: E402


def build(way: str, rows: int, tokens: int, hidden: int, layers: int) -> Callable[[], float]:
    """Return one step of a BERT with a class's loss at one mask of every row."""
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
        model.zero_grad(
            set_to_none=True
        )  # as programs do: no gradient is there in the next forward
        return float(loss.detach())

    return step


def build_peer(rows: int, tokens: int, hidden: int, layers: int) -> Callable[[], float]:
    """Return the same step of transformers' model, called as OpenPrompt calls it."""
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
    """Print the ratio of seconds and both peaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=300)
    given = parser.parse_args()
    threads = torch.get_num_threads()
    print(header("python benchmarks/prompt_step.py " + " ".join(sys.argv[1:]), threads, ["torch"]))
    sizes = given.rows, given.tokens, given.hidden, given.layers
    contenders = {
        way: Contender(build, threads, way, *sizes, tuned=way != "transformers")
        for way in ("masks", "all", "transformers")
    }
    losses = {way: round(one.step().loss, 6) for way, one in contenders.items()}
    peaks = {way: one.step(measure_memory=True).peak_bytes for way, one in contenders.items()}
    steps = run_in_turns(contenders, given.rounds, given.budget_s)
    for one in contenders.values():
        one.close()
    seconds = {way: [step.seconds for step in found] for way, found in steps.items()}
    rows = [
        [way, f"{statistics.median(seconds[way]):.3f}", f"{peaks[way] / MIB:.0f}"]
        for way in contenders
    ]
    print(table(["logits of", "s a step", "MiB of a step"], rows))
    for peer in ("all", "transformers"):
        ratio, low, high = paired_ratio(seconds["masks"], seconds[peer])
        share = peaks["masks"] / peaks[peer]
        print(
            f"\nspeed of masks against {peer}: {ratio:.2f} ({low:.2f} to {high:.2f}), target 1.15"
        )
        print(f"memory of masks against {peer}: {share:.2f}, target 0.8")
    print(f"losses {losses}")


if __name__ == "__main__":
    main()
