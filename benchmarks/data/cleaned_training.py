"""Held-out loss of a small model that is trained on a polluted corpus, cleaned or not.

    python -m benchmarks.data.cleaned_training DATA [--tokens 3000000] [--seeds 3]
        [--languages en zh]

News (English) and poems (Chinese) are polluted with menus, wrongly decoded copies, near copies,
gibberish and repeated lines, and prepared with and without cleaning, with one tokenizer. A GPT-2
trains on each corpus for the same number of tokens. The loss is measured on held-out clean texts.
DATA is described in `texts.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.data.texts import read_texts
from benchmarks.data.web_pages import ADS, COMMENTS, FOOTERS, MENUS
from benchmarks.harness import make_parser
from bmforge.data import PrepareConfig, prepare
from bmforge.models.gpt2 import GPT2Config
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig

SEQ_LEN, ROWS = 128, 16
CLEANED = {"text_repairs": ("repair", "invisible", "boilerplate"), "near_duplicates": 0.7}
RULES = {"en": "english", "zh": "chinese"}


def make_texts(language: str, data: Path, generator: random.Random) -> tuple[list[str], list[str]]:
    """Return training texts of several news items or poems each, and held-out texts."""
    english, chinese = read_texts(data)
    parts = [text for text in (english if language == "en" else chinese) if len(text) > 40]
    generator.shuffle(parts)
    size = 4 if language == "en" else 8
    texts = ["\n".join(parts[at : at + size]) for at in range(0, len(parts) - size, size)]
    return texts[len(texts) // 10 :], texts[: len(texts) // 10]


def pollute(texts: list[str], language: str, generator: random.Random) -> list[str]:
    """Return the texts and as many polluted texts, shuffled."""
    mixed = list(texts)
    for text in texts:
        kind = generator.randrange(5)
        if kind == 0:  # repeated menus and notices of a page
            lines = [*MENUS[language], ADS[language], *COMMENTS[language], FOOTERS[language]]
            mixed.append("\n".join(generator.choices(lines, k=40)))
        elif kind == 1:  # wrong encoding that cannot be repaired
            raw = text.encode()
            mixed.append(raw.decode("latin-1") if language == "zh" else raw.hex())
        elif kind == 2:  # a near copy of any text
            words = generator.choice(texts)
            at = generator.randrange(max(len(words) - 20, 1))
            mixed.append(words[:at] + words[at + 10 :])
        elif kind == 3:
            letters = "abcdefghijklmnopqrstuvwxyz0123456789" if language == "en" else text
            mixed.append("".join(generator.choices(letters, k=len(text))))
        else:
            line = generator.choice(text.split("\n"))
            mixed.append("\n".join([line] * max(len(text) // max(len(line), 1), 2)))
    generator.shuffle(mixed)
    return mixed


def write(path: Path, texts: list[str]) -> Path:
    """Write a JSON Lines file; return its path."""
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), "utf-8")
    return path


def train(corpus: Path, held_out: Path, run_dir: Path, tokens: int, seed: int) -> float:
    """Train for a number of tokens; return the held-out loss in nats per token."""
    vocab_size = 2048
    sizes = GPT2Config(
        vocab_size=vocab_size, hidden_size=128, num_layers=4, num_heads=4, max_seq_len=SEQ_LEN
    )
    steps = tokens // (SEQ_LEN * ROWS)
    result = pretrain(
        GPT2PretrainConfig(
            run_dir=run_dir,
            model=sizes,
            seed=seed,
            export=False,
            data=CorpusConfig(
                paths=(str(corpus),),
                validation=str(held_out / "train" / "tokens"),
                seq_len=SEQ_LEN,
                global_batch_size=ROWS,
                micro_batch_size=ROWS,
                seed=seed,
            ),
            train=TrainConfig(
                steps=steps,
                save_every_steps=None,
                optim=OptimConfig(lr=2e-3),
                schedule=ScheduleConfig(warmup_steps=min(50, steps // 4)),
            ),
        )
    )
    assert result.evaluation is not None
    return result.evaluation.loss


def compare(language: str, arguments: argparse.Namespace, folder: Path) -> None:
    """Print a line for each seed of a language."""
    generator = random.Random(0)
    clean, held_out = make_texts(language, arguments.data, generator)
    polluted = pollute(clean, language, generator)
    base = PrepareConfig(vocab_size=2048, validation_fraction=0.0)
    # One tokenizer, trained on clean text, for both corpora.
    prepare(write(folder / "held_out.jsonl", held_out), folder / "first", base)
    shared = replace(base, tokenizer=str(folder / "first" / "tokenizer"))
    prepare(folder / "held_out.jsonl", folder / "held_out", shared)
    path = write(folder / "polluted.jsonl", polluted)
    cleaned = replace(shared, rules=RULES[language], languages=(language,), **CLEANED)
    reports = {
        "raw": prepare(path, folder / "raw", shared),
        "cleaned": prepare(path, folder / "cleaned", cleaned),
    }
    tokens = {name: report.train.tokens for name, report in reports.items()}
    print(
        f"{language}: {len(polluted)} documents; tokens {tokens}, {arguments.tokens} for training"
    )
    for seed in range(arguments.seeds):
        losses = {
            name: train(
                folder / name,
                folder / "held_out",
                folder / f"{name}-{seed}",
                arguments.tokens,
                seed,
            )
            for name in reports
        }
        better = "cleaned" if losses["cleaned"] < losses["raw"] else "raw"
        print(
            f"{language}, seed {seed}: held-out loss raw {losses['raw']:.4f}, cleaned "
            f"{losses['cleaned']:.4f}: {better} is better",
            flush=True,
        )


def main() -> None:
    """Compare the corpora of each language."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--languages", nargs="+", default=["en", "zh"], choices=["en", "zh"])
    arguments = parser.parse_args()
    for language in arguments.languages:
        with tempfile.TemporaryDirectory() as folder:
            compare(language, arguments, Path(folder))


if __name__ == "__main__":
    main()
