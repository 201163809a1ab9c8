"""Fine-tuning on transcribed audio: batches and losses equal those of transformers."""

from __future__ import annotations

import io
import json
import wave
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speech_models import write_audio, write_speech_model

from bmforge.cli import main
from bmforge.errors import BmforgeError
from bmforge.infer.processor import load_processor
from bmforge.models import AutoModel
from bmforge.recipes.inputs.transcripts import Transcripts, find_prefix, read_transcripts
from bmforge.train import read_metrics

transformers = pytest.importorskip("transformers")

RECORDS: list[dict[str, Any]] = [
    {"audio": "a.wav", "text": "noise"},
    {"file_name": "b.wav", "transcription": "more noise", "language": "german", "id": 7},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech_model(tmp_path_factory.mktemp("whisper"))


def write_records(folder: Path, records: list[dict[str, Any]] = RECORDS) -> Path:
    write_audio(folder / "a.wav", 0.6)
    write_audio(folder / "b.wav", 0.9)
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def open_rows(directory: Path, file: Path, seq_len: int = 60, **options: Any) -> Transcripts:
    prefix = find_prefix(directory, **{"task": "transcribe", "language": "en", **options})
    return Transcripts(read_transcripts([str(file)]), load_processor(directory), prefix, seq_len)


def test_losses_and_gradients_equal_those_of_transformers(directory: Path, tmp_path: Path) -> None:
    """Labels are those of transformers' example: language, task, no timestamps, text, end."""
    rows = open_rows(directory, write_records(tmp_path))
    batch = dict(rows.collate([rows.make(n, ()) for n in range(2)]))
    processor = load_processor(directory)
    texts = [
        "<|en|><|transcribe|><|notimestamps|>noise<|endoftext|>",
        "<|de|><|transcribe|><|notimestamps|>more noise<|endoftext|>",
    ]
    ids = [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    for row, wanted in zip(batch["labels"], ids, strict=True):
        assert row[row != -100].tolist() == wanted
    sounds = []
    for name in ("a.wav", "b.wav"):
        with wave.open(str(tmp_path / name)) as opened:
            data = opened.readframes(opened.getnframes())
        sounds.append((np.frombuffer(data, "<i2") / 32768).astype(np.float32))
    wanted = processor.feature_extractor(sounds, sampling_rate=16_000, return_tensors="pt")
    assert torch.equal(batch["input_features"], wanted["input_features"])
    plain = transformers.WhisperForConditionalGeneration.from_pretrained(directory).eval()
    ours = AutoModel.from_pretrained(directory).eval()
    loss, other = ours(**batch).loss, plain(**wanted, labels=batch["labels"]).loss
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-6)
    loss.backward()
    other.backward()
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-3, atol=1e-5)


def test_the_job_by_commands(directory: Path, tmp_path: Path) -> None:
    """An adapter learns the transcripts; it is evaluated, merged, quantized and used."""
    file, run = write_records(tmp_path, RECORDS[:1]), tmp_path / "run"
    merged, packed = tmp_path / "merged", tmp_path / "int8"
    audio = ["--audio", str(tmp_path / "a.wav"), "--language", "en", "--max-new-tokens", "12"]

    def command(*words: Any) -> str:
        with redirect_stdout(io.StringIO()) as out:
            assert main([str(word) for word in words]) == 0
        return out.getvalue().strip()

    command(
        *("train", "speech", "--model", directory, "--data", file, "--data.validation", file),
        *("--data.language", "en", "--adapter", "lora", "--adapter.rank", 8, "--steps", 60),
        *("--batch-size", 1, "--micro-batch-size", 1, "--lr", 0.01, "--data.seq-len", 60),
        *("--train.schedule.kind", "constant", "--train.eval-every-steps", 60, "--run-dir", run),
    )
    metrics = list(read_metrics(run / "metrics.jsonl"))
    assert metrics[-1]["val_loss"] < 0.1 * metrics[0]["loss"]
    text = command("generate", run, *audio)
    assert text == "noise"
    command("merge", run, "--out", merged)
    assert command("generate", merged, *audio) == text
    command("quantize", merged, packed, "--scheme", "int8")
    assert command("generate", packed, *audio) == text
    plain = transformers.WhisperForConditionalGeneration.from_pretrained(merged).eval()
    processor = load_processor(merged)
    with wave.open(str(tmp_path / "a.wav")) as opened:
        data = np.frombuffer(opened.readframes(opened.getnframes()), "<i2") / 32768
    features = processor.feature_extractor(data, sampling_rate=16_000, return_tensors="pt")
    ids = plain.generate(**features, language="en", max_new_tokens=12)[0]
    assert processor.tokenizer.decode(ids, skip_special_tokens=True).strip() == text


@pytest.mark.parametrize(
    ("record", "options", "problem"),
    [
        ({"text": "a"}, {}, "line 1 has no audio file"),
        ({"audio": "a.wav"}, {}, "no transcript"),
        ({"audio": "none.wav", "text": "a"}, {}, "line 1: cannot read the audio file"),
        ({"audio": "slow.wav", "text": "a"}, {}, "1.2 s, but the model reads at most 1 s"),
        ({"audio": "long.wav", "text": "a"}, {}, "1.5 s, but the model reads at most 1 s"),
        ({"audio": "cut.wav", "text": "a"}, {}, "is truncated"),
        ({"audio": "data.jsonl", "text": "a"}, {}, "cannot read the audio file"),
        ({"audio": "a.wav", "text": "a" * 60}, {}, "a transcript of 64 tokens"),
        ({"audio": "a.wav", "text": "a"}, {"language": None}, "the model is multilingual"),
        ({"audio": "a.wav", "text": "a", "language": "xx"}, {}, "'xx' is not one of"),
    ],
)
def test_records_that_are_refused(
    directory: Path, tmp_path: Path, record: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    write_audio(tmp_path / "slow.wav", 1.2, rate=8000)
    write_audio(tmp_path / "long.wav", 1.5)
    whole = write_audio(tmp_path / "whole.wav", 0.5).read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[:-100])
    file = write_records(tmp_path, [record])
    with pytest.raises(BmforgeError, match=problem):
        open_rows(directory, file, **options)


def test_tasks_of_speech_models(directory: Path, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"messages": []}')
    assert main(["train", "conversations", "--model", str(directory), "--data", str(data)]) == 2
    assert "Tasks of TransformersModel: speech." in capsys.readouterr().err
    assert main(["train", "speech", "--model", "gpt2", "--data", str(data)]) == 2
    assert "GPT2 does not support the task 'speech'" in capsys.readouterr().err
