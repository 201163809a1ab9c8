"""Charts: figures of docs/results and of the runs that figures.toml names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from canvas import Canvas

ROOT = Path(__file__).resolve().parents[2]
FIGURES = tomllib.loads((Path(__file__).parent / "figures.toml").read_text("utf-8"))


def bars(groups: list[dict[str, Any]], title: str) -> Canvas:
    """Draw horizontal bars; each group has a scale of its own."""
    rows = sum(len(group["values"]) for group in groups)
    c = Canvas(760, 26 * rows + 34 * len(groups) + 20, title)
    y = 8.0
    for group in groups:
        c.text(16, y + 16, group["name"], "name", at="start")
        y += 26
        most = max(group["values"].values())
        for label, value in group["values"].items():
            kind = "blue" if label.startswith(group.get("own", "bmforge")) else "gray"
            c.text(250, y + 15, label, at="end")
            c.rect(260, y, 380 * value / most, 20, kind, 3)
            c.text(268 + 380 * value / most, y + 15, f"{value:g} {group['unit']}", "value", "start")
            y += 26
        y += 8
    return c


def decoding() -> Canvas:
    """Tokens a second next to llama.cpp."""
    return bars(
        FIGURES["decoding"]["groups"],
        "Decoding a 1.1B model on one CPU thread: bmforge 38.0 and 23.1 tokens per second in Q4_0 "
        "and Q8_0, llama.cpp 30.4 and 18.5; prefill of 512 tokens 139.9 and 136.0 against 65.9 "
        "and 51.7",
    )


def training_step() -> Canvas:
    """Tokens a second of a training step, and memory of a LoRA step."""
    return bars(
        FIGURES["training_step"]["groups"],
        "Training step of GPT-2 124M in bf16: bmforge 746 tokens per second, transformers 554 as "
        "used and 683 tuned; LoRA on all linear layers peaks at 527 MiB, PEFT at 1018 MiB",
    )


def eleven_billion() -> Canvas:
    """An 11B model in 6 GiB."""
    return bars(
        FIGURES["eleven_billion"]["groups"],
        "An 11B Llama in int8 within an enforced 6 GiB: bmforge 0.240 tokens per second with a "
        "peak of 5.79 GiB, llama.cpp 0.187 with 6.12 GiB",
    )


def memory() -> Canvas:
    """Memory of full tuning, offloading, LoRA and QLoRA: the 8B row of docs/reference/memory.md."""
    table = (ROOT / "docs" / "reference" / "memory.md").read_text("utf-8").splitlines()
    head, row = (
        [cell.strip() for cell in next(line for line in table if mark in line).split("|")[2:-1]]
        for mark in ("| model |", "`llama-3.1-8b`")
    )
    values = dict(zip(head, map(float, row), strict=True))
    name = "Llama 8B, one row of 2,048 tokens, bf16, with recompute"
    return bars(
        [{"name": name, "unit": "GiB", "own": "QLoRA", "values": values}],
        "Planned GPU memory for tuning an 8B Llama on one row of 2,048 tokens: "
        + ", ".join(f"{method} {value:g} GiB" for method, value in values.items()),
    )


def funnel() -> Canvas:
    """Documents that are left after each step of a preparation."""
    figures = FIGURES["funnel"]
    steps: dict[str, int] = figures["left"]
    c = Canvas(
        760,
        44 * len(steps) + 20,
        "Documents left after each step of preparing a corpus: "
        + ", ".join(f"{name} {count:,}" for name, count in steps.items()),
    )
    most = max(steps.values())
    for number, (name, count) in enumerate(steps.items()):
        width, y = 420 * count / most, 12 + 44 * number
        c.rect(420 - width / 2, y, width, 34, "green" if number == len(steps) - 1 else "blue", 4)
        c.text(190, y + 22, name, at="end")
        c.text(740, y + 22, f"{count:,}", "value", "end")
    return c


def compression() -> Canvas:
    """Size against accuracy of compressed models."""
    points: dict[str, list[float]] = FIGURES["compression"]["points"]
    c = Canvas(
        760,
        330,
        "Accuracy against size of a compressed 22M encoder on AG News, in percent of the whole "
        "model's accuracy: "
        + ", ".join(f"{name} {size:g} MB {share:g} %" for name, (size, share) in points.items()),
    )
    left, bottom, wide, high = 70, 280, 640, 240

    def place(size: float, share: float) -> tuple[float, float]:
        return left + wide * size / 100, bottom - high * (share - 95) / 6

    c.line([(left, bottom - high), (left, bottom), (left + wide, bottom)])
    for size in range(0, 101, 20):
        c.text(place(size, 95)[0], bottom + 18, f"{size} MB")
    for share in range(95, 102):
        x, y = place(0, share)
        c.text(x - 8, y + 4, f"{share} %", at="end")
        c.line([(left, y), (left + wide, y)])
    above: dict[str, float] = FIGURES["compression"]["shift"]
    for number, (name, (size, share)) in enumerate(points.items()):
        x, y = place(size, share)
        c.dot(x, y, ("blue", "green", "orange", "purple")[number % 4])
        c.text(x, y + above.get(name, -10), name, "value")
    c.text(left + wide / 2, bottom + 40, "size of the model file")
    return c


def loss() -> Canvas:
    """The loss of the quickstart's run."""
    run = FIGURES["loss"]
    train, validation = run["train"], run["validation"]
    top, low = run["top"], run["low"]
    last = train[-1][0]
    c = Canvas(
        760,
        300,
        f"Loss of the quickstart over {last} steps: from {train[0][1]:.2f} to {train[-1][1]:.2f}; "
        f"validation loss at the end {validation[-1][1]:.2f}",
    )
    left, bottom, wide, high = 60, 250, 670, 220

    def place(step: float, value: float) -> tuple[float, float]:
        return left + wide * step / last, bottom - high * (value - low) / (top - low)

    c.line([(left, bottom - high), (left, bottom), (left + wide, bottom)])
    for value in range(int(low), int(top) + 1):
        c.text(left - 8, place(0, value)[1] + 4, str(value), at="end")
        c.line([place(0, value), place(last, value)])
    for part in range(5):
        c.text(place(last * part / 4, low)[0], bottom + 18, f"{last * part // 4}")
    c.line([place(*point) for point in train], "blue-line")
    for point in validation:
        c.dot(*place(*point), "orange")
    c.text(
        left + wide / 2,
        bottom + 40,
        "steps; loss in nats per token: line training, points validation",
    )
    return c


def recipe_losses() -> Canvas:
    """Training losses of a pretraining, of LoRA on chats and of a prompt, side by side."""
    runs: list[dict[str, Any]] = FIGURES["recipe_losses"]["runs"]
    c = Canvas(
        760,
        250,
        "Training loss of three runs: "
        + "; ".join(
            f"{r['name']}, from {r['loss'][0][1]:.2f} to {r['loss'][-1][1]:.2f}" for r in runs
        ),
    )
    wide, high, bottom = 190, 150, 195
    for number, run in enumerate(runs):
        left, points = 45 + 250 * number, run["loss"]
        most, last = max(value for _, value in points), points[-1][0]
        c.text(left, 22, run["name"], "name", "start")
        c.line([(left, bottom - high), (left, bottom), (left + wide, bottom)])
        c.text(left - 8, bottom - high + 4, f"{most:.1f}", at="end")
        c.text(left - 8, bottom + 4, "0", at="end")
        c.text(left + wide, bottom + 18, f"{last} steps", at="end")
        c.line(
            [(left + wide * step / last, bottom - high * value / most) for step, value in points],
            "blue-line",
        )
    c.text(380, 240, "training loss in nats")
    return c


CHARTS = {
    "decoding": decoding,
    "training_step": training_step,
    "eleven_billion": eleven_billion,
    "memory": memory,
    "corpus_funnel": funnel,
    "compression": compression,
    "loss": loss,
    "recipe_losses": recipe_losses,
}
