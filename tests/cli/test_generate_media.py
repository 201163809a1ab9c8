"""`bmforge generate` and `bmforge chat` with image and audio files."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from speech_models import write_audio, write_speech_model
from vision_models import make_image, write_vision_model

from bmforge.cli import main
from bmforge.infer.image_chat import ImageChat
from bmforge.infer.speech import Transcriber
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.tokenizers import AutoTokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision"), "llava")


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    files = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for number, file in enumerate(files):
        make_image(40, 30 + number, number).save(file)
    return [str(file) for file in files]


def run(*arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main(["generate", *arguments]) == 0
    return out.getvalue().strip()


def test_the_command_answers_about_images(directory: Path, pictures: list[str]) -> None:
    """The printed text has the tokens that transformers generates for the chat."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = ImageChat(directory, tokenizer)
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Compare them"}]
    text, _ = chat.template.encode([{"role": "user", "content": parts}])
    images = [Image.open(file).convert("RGB") for file in pictures]
    batch = chat.processor.encode_batch([text], [images])
    plain = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    out = plain.generate(**batch, max_new_tokens=7, do_sample=False, eos_token_id=[2, 4])
    written = out[0, batch["input_ids"].shape[1] :].tolist()
    shown = tokenizer.decode([id for id in written if id not in (0, 1, 2, 4)])
    ask = ("--image", pictures[0], "--image", pictures[1], "--prompt", "Compare them")
    assert run(str(directory), *ask, "--max-new-tokens", "7") == shown.strip()


def test_a_conversation_with_images(
    directory: Path, pictures: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The answers of `bmforge chat` have the tokens of transformers; a loaded one goes on alike."""
    saved, again = str(tmp_path / "saved.json"), str(tmp_path / "again.json")

    def talk(*lines: str) -> list[dict[str, Any]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        assert main(["chat", str(directory), "--max-new-tokens", "5", "--top-p", "1e-9"]) == 0
        return list(json.loads(Path(again).read_text())["messages"])

    first, second = (f"/image {file}" for file in pictures)
    messages = talk(first, "What is it", f"/save {saved}", second, "And this", f"/save {again}")
    assert talk(f"/load {saved}", second, "And this", f"/save {again}") == messages
    ours, images = ImageChat(directory, AutoTokenizer.from_pretrained(directory)), []
    plain = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    turns: list[dict[str, Any]] = []
    for file, said, answer in zip(pictures, messages[::2], messages[1::2], strict=True):
        assert said["content"][0] == {"type": "image", "image": file}
        images.append(Image.open(file).convert("RGB"))
        turns.append({"role": "user", "content": [{"type": "image"}, said["content"][1]]})
        text = ours.template.render(turns, add_generation_prompt=True)
        batch = ours.processor.encode_batch([text], [images])
        out = plain.generate(**batch, max_new_tokens=5, do_sample=False, eos_token_id=[2, 4])
        written = [
            t for t in out[0, batch["input_ids"].shape[1] :].tolist() if t not in (0, 1, 2, 4)
        ]
        assert answer["content"] == ours.processor._processor.tokenizer.decode(written).strip()
        turns.append(answer)
    lines = ["/image", f"/image {directory / 'config.json'}", "/image /no/such.png"]
    for line, problem in zip(
        lines, ["such as /image cat.jpg", "as an image", "cannot read"], strict=True
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(line))
        assert main(["chat", str(directory)]) == 2
        assert problem in capsys.readouterr().err


def test_the_command_transcribes(tmp_path: Path) -> None:
    directory = write_speech_model(tmp_path / "whisper")
    file = write_audio(tmp_path / "a.wav", 0.6)
    model = AutoModel.from_pretrained(directory)
    text = Transcriber(directory).transcribe(model, file, language="de", num_beams=2)
    arguments = ("--audio", str(file), "--language", "de", "--num-beams", "2")
    assert run(str(directory), *arguments) == text


def test_what_is_refused(directory: Path, pictures: list[str], tmp_path: Path, capsys: Any) -> None:
    plain = tmp_path / "plain"
    (tmp_path / "no.png").write_bytes(b"no image")
    Llama.from_config(
        LlamaConfig(vocab_size=400, hidden_size=16, num_layers=1, num_heads=2)
    ).save_pretrained(plain)
    AutoTokenizer.from_pretrained(directory).save_pretrained(plain)
    audio = write_audio(tmp_path / "a.wav", 0.5)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((plain, "--image", pictures[0], "--prompt", "a"), "has no image processor"),
        ((directory, "--image", tmp_path / "none.png", "--prompt", "a"), "cannot read the image"),
        ((directory, "--image", tmp_path / "no.png", "--prompt", "a"), "cannot be read as an"),
        ((directory, "--image", pictures[0], "--prompt", " "), "the prompt is empty"),
        ((directory, "--image", pictures[0], "--document", "x"), "--image and --document cannot"),
        ((directory, "--audio", audio, "--prompt", "a"), "--audio and --prompt cannot be used"),
        ((directory, "--audio", audio), "has no speech processor"),
        ((directory, "--language", "en", "--prompt", "a"), "has no effect without --audio"),
    ]
    for arguments, problem in cases:
        assert main(["generate", *map(str, arguments)]) != 0
        assert problem in capsys.readouterr().err, arguments
