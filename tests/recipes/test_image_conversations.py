"""Training on conversations with images: batches and losses equal those of transformers."""

from __future__ import annotations

import base64
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_models import KINDS, make_image, write_vision_model

from bmforge.cli import main
from bmforge.data.sources.conversations import read_conversations
from bmforge.errors import ConfigError, DataError
from bmforge.infer.processor import find_processor
from bmforge.models import AutoModel
from bmforge.parallel import Layout
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.inputs.conversation_rows import render_conversation
from bmforge.recipes.inputs.image_conversations import ImageConversations, check_image_layout
from bmforge.recipes.sft import ConversationsConfig
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, find_template
from bmforge.train import read_metrics

transformers = pytest.importorskip("transformers")


def uri(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": content}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


IMAGES = [make_image(40, 30, 1), make_image(31, 62, 2)]
FIRST = {"type": "image", "image": "images/first.png"}
SECOND = {"type": "image_url", "image_url": {"url": uri(IMAGES[1])}}
CHATS: list[list[dict[str, Any]]] = [
    [user(FIRST, "What?"), assistant("Noise."), user("Sure?"), assistant("Yes, noise.")],
    [user("Compare ", FIRST, " and ", SECOND), assistant("They differ.")],
    [user("No image"), assistant("Right.")],
    [user(FIRST, "One"), assistant("1"), user(SECOND, "Two"), assistant("2")],
]


def write_chats(folder: Path, chats: list[list[dict[str, Any]]]) -> Path:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    IMAGES[0].save(folder / "images" / "first.png")
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp(request.param), request.param)


def open_rows(directory: Path, file: Path, seq_len: int = 256) -> ImageConversations:
    tokenizer, processor = AutoTokenizer.from_pretrained(directory), find_processor(directory)
    assert processor is not None
    template = ChatTemplate(find_template(directory), tokenizer)
    chats = read_conversations(file, images=True)
    return ImageConversations(
        chats, lambda chat: render_conversation(chat, template), tokenizer, processor, seq_len
    )


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as transformers' templates receive it."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    image = {"type": "image"}
    return {**message, "content": [p if p["type"] == "text" else image for p in parts]}


def reference(directory: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """Return transformers' inputs for the conversations, and the tokens of their answers.

    The last conversation is two rows, because an image comes between its answers.
    """
    found = find_processor(directory)
    assert found is not None
    processor = found._processor
    rows = [*CHATS[:3], CHATS[3][:2], CHATS[3]]
    images = [IMAGES[:1], IMAGES, [], IMAGES[:1], IMAGES]
    answers = [["Noise.", "Yes, noise."], ["They differ."], ["Right."], ["1"], ["2"]]
    texts = [
        processor.apply_chat_template(
            [shown(m) for m in chat], chat_template=find_template(directory)
        )
        for chat in rows
    ]
    inputs = processor(
        text=texts, images=images, padding=True, padding_side="right", return_tensors="pt",
        **({"add_special_tokens": False} if texts[0].startswith("<s>") else {}),
    )  # fmt: skip
    ids = [[i for a in row for i in processor.tokenizer(f"{a}<|im_end|>\n").input_ids]
           for row in answers]  # fmt: skip
    return dict(inputs), ids


def test_batches_losses_and_gradients_equal_those_of_transformers(
    directory: Path, tmp_path: Path
) -> None:
    rows = open_rows(directory, write_chats(tmp_path, CHATS))
    assert len(rows) == 5
    batch = dict(rows.collate([rows.make(n, ()) for n in range(5)]))
    labels = batch.pop("labels")
    wanted, answers = reference(directory)
    assert batch.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(batch[name], value), name
    for row, own, answer in zip(labels, batch["input_ids"], answers, strict=True):
        assert row[row != -100].tolist() == answer
        assert torch.equal(row[row != -100], own[row != -100])
    plain = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    ours = AutoModel.from_pretrained(directory).eval()
    loss = ours(**batch, labels=labels).loss
    other = plain(**wanted, labels=labels).loss
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-6)
    loss.backward()
    other.backward()
    theirs = {n: p.grad for n, p in plain.named_parameters()}
    compared = 0
    for name, parameter in ours.named_parameters():
        if parameter.grad is None or theirs[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            assert theirs[name] is None or not theirs[name].any(), name
            continue
        compared += "vision" in name or "visual" in name
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-3, atol=1e-5, msg=name)
    assert compared > 4


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        ([user({"type": "image", "image": "none.png"}), assistant("a")], "does not exist"),
        ([user({"type": "image"}), assistant("a")], "without a source"),
        ([user({"type": "image", "image": "https://a/b.png"}), assistant("a")], "not fetched"),
        ([user("a"), {**user(FIRST), "role": "assistant"}], "of the role 'assistant'"),
        ([user(FIRST, "<image> <|image_pad|> <start_of_image>"), assistant("a")], "image token"),
        (
            [user(FIRST), assistant("<image> <|image_pad|> <image_soft_token>")],
            "contains an image token",
        ),
        (
            [user(FIRST, "a" * 300), assistant("a")],
            "tokens of text and images before the first answer",
        ),
        ([user({"type": "video", "video": "a.mp4"}, FIRST), assistant("a")], "type 'video'"),
    ],
)
def test_conversations_that_are_refused(
    directory: Path, tmp_path: Path, chat: list[dict[str, Any]], problem: str
) -> None:
    file = write_chats(tmp_path, [chat])

    def read() -> None:
        rows = open_rows(directory, file)
        rows.collate([rows.make(0, ())])

    with pytest.raises(DataError, match=problem):
        read()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_damaged_images_are_found_before_training(
    directory: Path, tmp_path: Path, form: str
) -> None:
    """The error names the first conversation and counts the images."""
    files = [tmp_path / name for name in ("whole", "cut", "text")]
    IMAGES[1].save(files[0], form)
    files[1].write_bytes(files[0].read_bytes()[:-40])
    files[2].write_text("no image")
    chats = [[user({"type": "image", "image": f.as_uri()}, "a"), assistant("b")] for f in files]
    assert len(open_rows(directory, write_chats(tmp_path, chats[:1]))) == 1
    data = write_chats(tmp_path, chats)
    with pytest.raises(DataError, match=r"line 2: .*cannot be read as an.*2 of 3 images"):
        open_rows(directory, data)


LISTED: list[dict[str, Any]] = [
    {
        "image": "images/first.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat?"},
            {"from": "gpt", "value": "Noise."},
        ],
    },
    {
        "images": ["images/first.png", uri(IMAGES[1])],
        "messages": [user({"type": "image"}, {"type": "image"}, "Same?"), assistant("No.")],
    },
    {"messages": [user("What is <image>?"), assistant("A mark.")]},
]


def test_images_beside_the_messages(tmp_path: Path) -> None:
    """LLaVA's and TRL's forms have the images in a field of the record."""
    file = write_chats(tmp_path, [])
    file.write_text("".join(json.dumps(row) + "\n" for row in LISTED))
    llava, trl, text = (chat.messages[0]["content"] for chat in read_conversations(file, True))
    first = {"type": "image", "image": str(tmp_path / "images" / "first.png")}
    assert llava == [first, {"type": "text", "text": "\nWhat?"}]
    assert trl == [
        first, {"type": "image", "image": uri(IMAGES[1])}, {"type": "text", "text": "Same?"},
    ]  # fmt: skip
    assert text == "What is <image>?"
    row = {**LISTED[0], "image": ["images/first.png"] * 2}
    file.write_text(json.dumps(row))
    with pytest.raises(DataError, match="has 2 images, but its messages use 1"):
        read_conversations(file, images=True)


def test_a_model_of_text_refuses_conversations_with_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="supported: a string"):
        read_conversations(write_chats(tmp_path, CHATS))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layout": Layout(pp=2)}, "pp=2 is not supported for conversations with images"),
        ({"layout": Layout(cp=2)}, "cp=2 is not supported for conversations with images"),
        ({"adapter": AdapterConfig(kind="soft-prompt")}, "moves the positions of the images"),
    ],
)
def test_options_that_images_exclude(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_image_layout(ConversationsConfig(**options))


def test_a_run_trains_an_adapter_that_generates(directory: Path, tmp_path: Path) -> None:
    file, run = write_chats(tmp_path, CHATS), tmp_path / "run"
    command = f"""
        train conversations --model {directory} --data.paths {file} --run-dir {run}
        --adapter.kind lora --adapter.rank 4 --train.steps 12 --train.optim.lr 0.02
        --train.schedule.kind constant --data.seq-len 256 --data.global-batch-size 5
        --data.micro-batch-size 2 --train.save-every-steps 6
    """
    with redirect_stdout(io.StringIO()):
        assert main(command.split()) == 0
    losses = [row["loss"] for row in read_metrics(run / "metrics.jsonl")]
    assert losses[-1] < 0.8 * losses[0], losses
    merged, packed = str(tmp_path / "merged"), str(tmp_path / "int8")
    with redirect_stdout(io.StringIO()):
        assert main(["merge", str(run), "--out", merged]) == 0
        assert main(["quantize", merged, packed, "--scheme", "int8"]) == 0

    def answer(model: str) -> str:
        ask = ["generate", model, "--image", str(tmp_path / "images" / "first.png")]
        with redirect_stdout(io.StringIO()) as out:
            assert main([*ask, "--prompt", "What?", "--max-new-tokens", "3"]) == 0
        return out.getvalue().strip()

    assert answer(str(run))
    assert answer(merged) == answer(str(run))
    assert answer(packed)
    template = find_template(directory)
    assert template is not None
    assert find_template(Path(packed)) == template
