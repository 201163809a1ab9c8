"""Reads audio files as samples at the sampling rate of a model."""

from __future__ import annotations

import importlib.util
import wave
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bmforge.errors import DataError, install_command

# A few kilobytes of FLAC can decode to gigabytes of silence, and a WAV file at 1 Hz can be
# resampled to as many, so the samples are limited to 1 GiB of floats: 4.7 hours at 16 kHz.
_MAX_SAMPLES = 1 << 28
_BLOCK = 1 << 16
__all__ = ["check_audio", "measure_audio", "name_of_audio", "read_audio"]


def read_audio(path: str | Path | BinaryIO, rate: int) -> NDArray[np.float32]:
    """Read an audio file; return the mean of its channels' samples at a sampling rate.

    WAV files with integer samples are read with the standard library, other files with the package
    soundfile. Files with another sampling rate are resampled with the package soxr.

    Args:
        path: file; an open file is named by its attribute `name`, if any.
        rate: sampling rate of the result in Hz.

    Raises:
        DataError: the file does not exist or cannot be read, or a package is missing.
    """
    try:
        with wave.open(_source_of(path), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            data, own_rate = file.readframes(file.getnframes()), file.getframerate()
        size = len(data) // (width * channels) * width * channels  # of a truncated file
        mono = _to_floats(data[:size], width).reshape(-1, channels).mean(1, dtype=np.float32)
    except (wave.Error, EOFError):  # not a WAV file, or one with float samples
        mono, own_rate = _read_with_soundfile(path, rate)
    except OSError as error:
        raise DataError(
            f"cannot read the audio file {name_of_audio(path)!r} ({error}). Check the path."
        ) from error
    check_audio(path, len(mono), own_rate, rate)
    if own_rate == rate:
        return mono
    import soxr

    resampled: NDArray[np.float32] = soxr.resample(mono, own_rate, rate)
    return resampled


def check_audio(path: str | Path | BinaryIO, count: int, own_rate: int, rate: int) -> None:
    """Check that the samples of a file can be converted to a sampling rate.

    Args:
        path: file, for error messages.
        count: number of samples per channel.
        own_rate: sampling rate of the file in Hz.
        rate: sampling rate of the model in Hz.

    Raises:
        DataError: the file has no samples, no sampling rate or too many samples, or must be
            resampled and soxr is not installed.
    """
    name = repr(name_of_audio(path))
    if not count or own_rate <= 0:
        missing = "samples" if own_rate > 0 else "sampling rate"
        raise DataError(f"the audio file {name} has no {missing}. Use another file.")
    if max(count, count * rate // own_rate) > _MAX_SAMPLES:
        raise DataError(
            f"the audio file {name} lasts {count / own_rate / 3600:.1f} h (allowed: at most "
            f"{_MAX_SAMPLES // max(rate, own_rate) / 3600:.1f} h). Divide it."
        )
    if own_rate != rate and importlib.util.find_spec("soxr") is None:
        raise DataError(
            f"{name} has a sampling rate of {own_rate} Hz, but the model needs {rate} Hz. Install "
            f"the package that resamples audio: {install_command('speech')}; or convert the file "
            f"with: ffmpeg -i FILE -ar {rate} -ac 1 out.wav."
        )


def _source_of(path: str | Path | BinaryIO) -> Any:
    return str(path) if isinstance(path, (str, Path)) else path


def name_of_audio(path: str | Path | BinaryIO) -> str:
    """Return the name of an audio file for error messages."""
    return str(path) if isinstance(path, (str, Path)) else str(getattr(path, "name", "audio"))


def measure_audio(path: str | Path | BinaryIO) -> tuple[int, int]:
    """Return the number of samples per channel and the sampling rate, from a file's header.

    Raises:
        DataError: the file does not exist, cannot be read or is truncated. `check_audio` checks
            the returned numbers.
    """
    try:
        with wave.open(_source_of(path), "rb") as file:
            count, rate = file.getnframes(), file.getframerate()
            size = count * file.getsampwidth() * file.getnchannels()
    except (wave.Error, EOFError):
        with _open_with_soundfile(path) as opened:
            return int(opened.frames), int(opened.samplerate)
    except OSError as error:
        raise DataError(f"cannot read the audio file {name_of_audio(path)!r} ({error}).") from error
    if isinstance(path, (str, Path)) and size > Path(path).stat().st_size:
        raise DataError(f"the audio file {str(path)!r} is truncated. Use another file.")
    return count, rate


def _to_floats(data: bytes, width: int) -> NDArray[np.float32]:
    """Convert little-endian integer samples of `width` bytes to values from -1 to 1."""
    raw = np.frombuffer(data, np.uint8)
    if width == 1:  # 8-bit samples are unsigned
        return ((raw.astype(np.float32) - 128) / 128).astype(np.float32)
    wide = np.zeros((len(raw) // width, 4), np.uint8)
    wide[:, 4 - width :] = raw.reshape(-1, width)
    return (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)


def _read_with_soundfile(path: str | Path | BinaryIO, rate: int) -> tuple[NDArray[np.float32], int]:
    """Return the mean of the channels' samples, and the file's sampling rate."""
    with _open_with_soundfile(path) as file:
        check_audio(path, int(file.frames), int(file.samplerate), rate)
        blocks = file.blocks(_BLOCK, dtype="float32", always_2d=True)
        try:
            mono = [block.mean(1, dtype=np.float32) for block in blocks]
        except RuntimeError as error:
            raise DataError(
                f"cannot read the audio file {name_of_audio(path)!r} ({error}). Convert it to a "
                "WAV file."
            ) from error
        samples = np.concatenate(mono) if mono else np.zeros(0, np.float32)
        return samples, int(file.samplerate)


def _open_with_soundfile(path: str | Path | BinaryIO) -> Any:
    try:
        import soundfile
    except ImportError as error:
        raise DataError(
            f"{name_of_audio(path)!r} is not a WAV file with integer samples. Install the package "
            f"that reads other formats: {install_command('speech')}; or convert the file with: "
            "ffmpeg -i FILE -ar 16000 -ac 1 out.wav."
        ) from error
    if not isinstance(path, (str, Path)):
        path.seek(0)
    try:
        return soundfile.SoundFile(_source_of(path))
    except RuntimeError as error:
        raise DataError(
            f"cannot read the audio file {name_of_audio(path)!r} ({error}). Convert it to a WAV "
            "file."
        ) from error
