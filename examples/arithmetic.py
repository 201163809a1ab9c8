"""A model that learns additions: files for supervised tuning, preferences and rewards, and a test.

    python examples/arithmetic.py write sums --seed 0
    python examples/arithmetic.py check runs/rl/export --data sums

`write` makes a small Llama with random weights, and problems in four files without overlap:
`solved.jsonl` with answers, `pairs.jsonl` with a right and a wrong answer, `problems.jsonl` for
rewards, and `held_out.jsonl`, on which `check` measures greedy answers. Operands have two digits,
and sums are written with the last digit first: "27+59=" is answered by "68".
`--hidden-size 448 --layers 8` makes a model of 21 million parameters instead of 0.3 million.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import tokenizers
import torch

from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.tokenizers import AutoTokenizer

MARKS, LETTERS = ["<pad>", "</s>", "<unk>"], "0123456789+="
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
)


def write_model(folder: Path, seed: int, hidden_size: int = 96, layers: int = 3) -> None:
    """Write a model with random weights, and a tokenizer of single characters."""
    vocabulary = {token: number for number, token in enumerate([*MARKS, *LETTERS])}
    heads = max(4, hidden_size // 64)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        max_seq_len=16,
    )
    Llama.from_config(config, seed=seed).save_pretrained(folder)
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    every = tokenizers.Regex(r"[\s\S]")
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(every, "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens(MARKS)
    fast.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    roles["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def write_problems(folder: Path, seed: int) -> None:
    """Divide all problems at random, and write the four files."""
    draw = random.Random(seed)
    problems = [(a, b) for a in range(100) for b in range(100)]
    draw.shuffle(problems)
    parts = {"solved": 1500, "pairs": 1000, "problems": 6000, "held_out": 1000}
    for name, count in parts.items():
        rows = []
        for a, b in problems[:count]:
            row: dict[str, Any] = {"prompt": [{"role": "user", "content": f"{a:02}+{b:02}="}]}
            right, wrong = (
                [{"role": "assistant", "content": str(number)[::-1]}]
                for number in (a + b, a + b + draw.choice([-10, -1, 1, 10]))
            )
            if name == "solved":
                row["completion"] = right
            elif name == "pairs":
                row |= {"chosen": right, "rejected": wrong}
            else:
                row["answer"] = right[0]["content"]
            rows.append(json.dumps(row) + "\n")
        del problems[:count]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


@torch.no_grad()
def check(model_dir: Path, data: Path) -> float:
    """Return the share of held-out problems that the greedy answer solves."""
    lines = (data / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer, model = (
        AutoTokenizer.from_pretrained(model_dir),
        AutoModel.from_pretrained(model_dir),
    )
    model.eval()
    prompts = [tokenizer.encode(row["prompt"][0]["content"]) for row in rows]
    ids = torch.tensor(prompts)
    for _ in range(4):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    right = 0
    for row, found in zip(rows, ids[:, len(prompts[0]) :].tolist(), strict=True):
        wanted = [*tokenizer.encode(row["answer"]), tokenizer.eos_id]
        right += found[: len(wanted)] == wanted
    return right / len(rows)


def main() -> None:
    """Write the model and the problems, or print the accuracy of a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("write", "check"))
    parser.add_argument("directory", type=Path, help="directory to write, or model to check")
    parser.add_argument("--data", type=Path, default=Path("sums"), help="directory of the problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    options = parser.parse_args()
    if options.task == "check":
        print(f"held-out problems solved: {check(options.directory, options.data):.1%}")
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    write_model(options.directory / "start", options.seed, options.hidden_size, options.layers)
    write_problems(options.directory, options.seed)


if __name__ == "__main__":
    main()
