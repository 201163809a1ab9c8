"""Transcription of audio files: samples as they are stored, tokens of transformers' generate."""

from __future__ import annotations

import importlib.util
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from speech_models import write_audio, write_speech_model

from bmforge.cli import main
from bmforge.errors import BmforgeError, ConfigError, DataError, install_command
from bmforge.infer.audio import check_audio, measure_audio, read_audio
from bmforge.infer.speech import Transcriber, format_subtitles
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
    if prompt := options.pop("prompt", None):
        processor = transformers.WhisperProcessor.from_pretrained(directory)
        options["prompt_ids"] = processor.get_prompt_ids(prompt, return_tensors="pt")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(directory).eval()
    return model.generate(**features, **options)


@pytest.mark.parametrize(
    ("seconds", "channels", "options"),
    [
        (0.7, 1, {}),
        (0.7, 2, {"language": "de", "task": "translate"}),
        (1.0, 1, {"language": "en", "num_beams": 3}),
        (0.5, 1, {"language": "en", "max_new_tokens": 5}),
        (0.5, 1, {"language": "en", "prompt": "Zoe and Yu"}),
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
    samples = read_audio(file, 8000)
    assert measure_audio(file) == (3, 8000)
    wanted = (np.array(values).reshape(-1, 2) / top).mean(1)
    np.testing.assert_allclose(samples, wanted, atol=1e-6)


def write_sine(file: Path, rate: int, seconds: float = 0.5) -> Path:
    """Write a tone of 440 Hz with half of the full scale, as WAV or FLAC."""
    values = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    soundfile.write(file, values, rate, subtype="PCM_16")
    return file


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 48_000])
@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_files_are_resampled(tmp_path: Path, rate: int, kind: str) -> None:
    """A tone sampled at one rate is the same tone at another, except near the ends of the file."""
    file = write_sine(tmp_path / f"a.{kind}", rate)
    assert measure_audio(file) == (rate // 2, rate)
    samples = read_audio(file, 16_000)
    assert (samples.dtype, samples.shape) == (np.float32, (8000,))
    wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16_000)
    np.testing.assert_allclose(samples[800:-800], wanted[800:-800], atol=1e-4)


@pytest.mark.parametrize("package", ["soxr", "soundfile"])
def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    file = write_sine(tmp_path / f"a.{'wav' if package == 'soxr' else 'flac'}", 8000)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "soxr" else find_spec(n, *a)
    )
    monkeypatch.setitem(sys.modules, "soundfile", None)
    problem = "8000 Hz, but the model needs 16000" if package == "soxr" else "not a WAV file"
    with pytest.raises(DataError, match=problem) as caught:
        read_audio(file, 16_000)
    assert install_command("speech") in str(caught.value)


def test_short_files_with_many_samples_are_refused(tmp_path: Path) -> None:
    """One byte at 1 Hz is 16,000 samples at 16 kHz."""
    file = tmp_path / "a.wav"
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(1)
        out.setframerate(1)
        out.writeframes(bytes(20_000))
    with pytest.raises(DataError, match=r"lasts 5.6 h \(allowed: at most 4.7 h\)"):
        read_audio(file, 16_000)
    silence = np.zeros((1 << 28) // 16 + 1, np.int16)
    soundfile.write(tmp_path / "b.flac", silence, 1000, subtype="PCM_16")
    assert (tmp_path / "b.flac").stat().st_size < 100_000
    with pytest.raises(DataError, match=r"allowed: at most 4\.7 h"):
        read_audio(tmp_path / "b.flac", 16_000)
    with pytest.raises(DataError, match="has no sampling rate"):
        check_audio("a.wav", 5, 0, 16_000)


def test_a_truncated_file_is_read_to_its_last_sample(tmp_path: Path) -> None:
    file = write_audio(tmp_path / "a.wav", 0.5, channels=2)
    whole = read_audio(file, 16_000)
    file.write_bytes(file.read_bytes()[:-4003])
    np.testing.assert_array_equal(read_audio(file, 16_000), whole[:-1001])


def test_subtitles() -> None:
    segments = [
        {"start": 0.0, "end": 1.5, "text": " Good morning."},
        {"start": 3661.042, "end": 36_000.9996, "text": "a --> b"},
    ]
    assert format_subtitles(segments, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nGood morning.\n\n"
        "2\n01:01:01,042 --> 10:00:01,000\na -> b\n"
    )
    assert format_subtitles(segments, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nGood morning.\n\n"
        "01:01:01.042 --> 10:00:01.000\na -> b\n"
    )
    assert format_subtitles([], "srt") == ""


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_the_command_prints_subtitles(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file = write_audio(tmp_path / "a.wav", 0.7)
    command = ["generate", str(directory), "--audio", str(file), "--language", "en"]
    assert main([*command, "--transcript-format", kind]) == 0
    model, transcriber = AutoModel.from_pretrained(directory).eval(), Transcriber(directory)
    segments, _ = transcriber.segments(model, file, language="en")
    assert segments
    assert capsys.readouterr().out == format_subtitles(segments, kind)
    assert main(["generate", str(directory), "--prompt", "a", "--transcript-format", kind]) != 0
    assert "--transcript-format" in capsys.readouterr().err


def test_what_is_refused(directory: Path, tmp_path: Path) -> None:
    file = write_audio(tmp_path / "a.wav", 0.5)
    (tmp_path / "c.wav").write_bytes(b"no audio")
    model, transcriber = AutoModel.from_pretrained(directory).eval(), Transcriber(directory)
    text = Llama.from_config(LlamaConfig(vocab_size=40, hidden_size=16, num_layers=1, num_heads=2))
    for arguments, options, problem in (
        ((model, tmp_path / "none.wav"), {}, "cannot read the audio file"),
        ((model, tmp_path / "c.wav"), {}, "cannot read the audio file"),
        ((model, file), {"stop_strings": ("a",)}, "do not support stop_strings"),
        ((model, file), {"language": "klingon"}, "klingon"),
        ((text, file), {}, "does not transcribe audio"),
    ):
        with pytest.raises(BmforgeError, match=problem):
            transcriber.generate(*arguments, **options)
    with pytest.raises(DataError, match="has no samples"):
        read_audio(write_audio(tmp_path / "d.wav", 0.0), 16_000)
    text.save_pretrained(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"processor"):
        Transcriber(tmp_path / "text")
