"""A small model on a polluted corpus as it is, and cleaned: the same tokens, held-out loss of each.

``python benchmarks/cleaned_or_raw.py DATA [--tokens 3000000] [--seeds 3]`` pollutes news (English)
and poems (Chinese) with menus, wrongly decoded copies, near copies, gibberish and repeated lines,
prepares them raw and cleaned with one tokenizer, trains a GPT-2 on each for the same number of
tokens, and prints bits per byte on held-out sound texts. DATA is as in `prepare_speed.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from prepare_speed import ADS, COMMENTS, FOOTERS, MENUS, read_texts

from bmforge.data import PrepareConfig, prepare
from bmforge.models.gpt2 import GPT2Config
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig

SEQ_LEN, ROWS = 128, 16
CLEANED = {"tidy": ("repair", "invisible", "boilerplate"), "near_duplicates": 0.7}
RULES = {"en": "english", "zh": "chinese"}


def make_texts(language: str, data: Path, draw: random.Random) -> tuple[list[str], list[str]]:
    """Return sound texts to learn from, several news items or poems each, and held-out ones."""
    english, chinese = read_texts(data)
    parts = [text for text in (english if language == "en" else chinese) if len(text) > 40]
    draw.shuffle(parts)
    size = 4 if language == "en" else 8
    texts = ["\n".join(parts[at : at + size]) for at in range(0, len(parts) - size, size)]
    return texts[len(texts) // 10 :], texts[: len(texts) // 10]


def pollute(texts: list[str], language: str, draw: random.Random) -> list[str]:
    """Return the texts with as much again of what crawls are full of between them."""
    found = list(texts)
    for text in texts:
        kind = draw.randrange(5)
        if kind == 0:  # a page's menus and notices, many times
            lines = [*MENUS[language], ADS[language], *COMMENTS[language], FOOTERS[language]]
            found.append("\n".join(draw.choices(lines, k=40)))
        elif kind == 1:  # read in a wrong encoding, beyond repair
            raw = text.encode()
            found.append(raw.decode("latin-1") if language == "zh" else raw.hex())
        elif kind == 2:  # a near copy, of another text too
            words = draw.choice(texts)
            at = draw.randrange(max(len(words) - 20, 1))
            found.append(words[:at] + words[at + 10 :])
        elif kind == 3:
            letters = "abcdefghijklmnopqrstuvwxyz0123456789" if language == "en" else text
            found.append("".join(draw.choices(letters, k=len(text))))
        else:
            line = draw.choice(text.split("\n"))
            found.append("\n".join([line] * max(len(text) // max(len(line), 1), 2)))
    draw.shuffle(found)
    return found


def write(path: Path, texts: list[str]) -> Path:
    """Write lines of JSON."""
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), "utf-8")
    return path


def train(corpus: Path, held_out: Path, run_dir: Path, tokens: int, seed: int) -> float:
    """Return the loss on held-out texts, in nats a token, after so many tokens."""
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
    """Print one line for each seed of a language."""
    draw = random.Random(0)
    sound, apart = make_texts(language, arguments.data, draw)
    polluted = pollute(sound, language, draw)
    base = PrepareConfig(vocab_size=2048, validation_fraction=0.0)
    # One tokenizer, of sound text: it favours neither.
    prepare(write(folder / "held_out.jsonl", apart), folder / "first", base)
    with_it = replace(base, tokenizer=str(folder / "first" / "tokenizer"))
    prepare(folder / "held_out.jsonl", folder / "held_out", with_it)
    path = write(folder / "polluted.jsonl", polluted)
    cleaned = replace(with_it, rules=RULES[language], languages=(language,), **CLEANED)
    reports = {
        "raw": prepare(path, folder / "raw", with_it),
        "cleaned": prepare(path, folder / "cleaned", cleaned),
    }
    kept = {name: report.train.tokens for name, report in reports.items()}
    print(f"{language}: {len(polluted)} documents; tokens {kept}, {arguments.tokens} are learned")
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
    """Compare in both languages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
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
