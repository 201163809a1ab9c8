"""Transcription of audio files: samples as they are stored, tokens of transformers' generate."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speech_models import write_audio, write_speech_model

from bmforge.errors import BmforgeError, ConfigError, DataError
from bmforge.infer.speech import Transcriber, read_audio
from bmforge.models import AutoModel, Llama, LlamaConfig

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech_model(tmp_path_factory.mktemp("whisper"))


def generate_plain(directory: Path, file: Path, **options: Any) -> torch.Tensor:
    """Return the tokens of transformers for a WAV file of 16-bit samples."""
    with wave.open(str(file), "rb") as opened:
        data = np.frombuffer(opened.readframes(opened.getnframes()), "<i2") / 32768
        data = data.reshape(-1, opened.getnchannels()).mean(1).astype(np.float32)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(directory)
    long = {"truncation": False, "padding": "longest"} if len(data) > extractor.n_samples else {}
    features = extractor(
        data, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True, **long
    )
    model = transformers.WhisperForConditionalGeneration.from_pretrained(directory).eval()
    return model.generate(**features, **options)


@pytest.mark.parametrize(
    ("seconds", "channels", "options"),
    [
        (0.7, 1, {}),
        (0.7, 2, {"language": "de", "task": "translate"}),
        (1.0, 1, {"language": "en", "num_beams": 3}),
        (0.5, 1, {"language": "en", "max_new_tokens": 5}),
    ],
)
def test_tokens_are_those_of_transformers(
    directory: Path, tmp_path: Path, seconds: float, channels: int, options: dict[str, Any]
) -> None:
    file = write_audio(tmp_path / "a.wav", seconds, channels=channels)
    model = AutoModel.from_pretrained(directory).eval()
    ours = Transcriber(directory).generate(model, file, **options)
    assert [list(row) for row in ours] == generate_plain(directory, file, **options).tolist()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(tmp_path: Path, width: int) -> None:
    """Full scale is 1; a sample is the mean of its channels."""
    top = 2 ** (8 * width - 1)
    values = [-top, 0, top // 2, top - 1, 17 * top // 32, top // 4]
    offset = top if width == 1 else 0
    data = b"".join((v + offset).to_bytes(width, "little", signed=width > 1) for v in values)
    file = tmp_path / "a.wav"
    with wave.open(str(file), "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(width)
        out.setframerate(8000)
        out.writeframes(data)
    samples, rate = read_audio(file)
    assert rate == 8000
    wanted = (np.array(values).reshape(-1, 2) / top).mean(1)
    np.testing.assert_allclose(samples, wanted, atol=1e-6)


def test_what_is_refused(directory: Path, tmp_path: Path) -> None:
    file, slow = write_audio(tmp_path / "a.wav", 0.5), write_audio(tmp_path / "b.wav", 0.5, 8000)
    (tmp_path / "c.wav").write_bytes(b"no audio")
    model, transcriber = AutoModel.from_pretrained(directory).eval(), Transcriber(directory)
    text = Llama.from_config(LlamaConfig(vocab_size=40, hidden_size=16, num_layers=1, num_heads=2))
    for arguments, options, problem in (
        ((model, slow), {}, "8000 Hz, but the model needs 16000 Hz"),
        ((model, tmp_path / "none.wav"), {}, "cannot read the audio file"),
        ((model, tmp_path / "c.wav"), {}, "is not a WAV file"),
        ((model, file), {"stop_strings": ("a",)}, "do not support stop_strings"),
        ((model, file), {"language": "klingon"}, "klingon"),
        ((text, file), {}, "does not transcribe audio"),
    ):
        with pytest.raises(BmforgeError, match=problem):
            transcriber.generate(*arguments, **options)
    with pytest.raises(DataError, match="has no samples"):
        read_audio(write_audio(tmp_path / "d.wav", 0.0))
    text.save_pretrained(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"processor"):
        Transcriber(tmp_path / "text")
