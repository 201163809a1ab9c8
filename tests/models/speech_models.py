"""Directory of a tiny Whisper with random weights, and audio files, for tests."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers

__all__ = ["write_audio", "write_speech_model"]

MARKS = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
    *(f"<|{number * 0.02:.2f}|>" for number in range(51)),
]  # fmt: skip


def write_speech_model(folder: Path) -> Path:
    """Write a Whisper with a window of one second, its processor and its generation config."""
    import transformers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: id for id, token in enumerate([*alphabet, *MARKS])}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(MARKS[:10])
    fast.add_tokens(MARKS[10:])
    end = MARKS[0]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token=end, eos_token=end, unk_token=end, pad_token=end
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    settings_file = folder / "tokenizer_config.json"
    kind = {"tokenizer_class": "WhisperTokenizer"}
    settings = {**json.loads(settings_file.read_text(encoding="utf-8")), **kind}
    settings_file.write_text(json.dumps(settings), encoding="utf-8")
    transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    start, end_id = ids["<|startoftranscript|>"], ids[end]
    config = transformers.WhisperConfig(
        vocab_size=len(ids), num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_source_positions=50, max_target_positions=64,
        decoder_start_token_id=start, bos_token_id=end_id, eos_token_id=end_id,
        pad_token_id=end_id, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = transformers.WhisperForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    more = {
        "lang_to_id": {name: ids[name] for name in ("<|en|>", "<|de|>")},
        "task_to_id": {name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "is_multilingual": True,
        "max_length": 40,
        "decoder_start_token_id": start,
        "suppress_tokens": [5, 6],
        "begin_suppress_tokens": [ids["a"], end_id],
    }
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings.pop("_from_model_config")  # the file would be replaced by fields of config.json
    file.write_text(json.dumps({**settings, **more}), encoding="utf-8")
    return folder


def write_audio(file: Path, seconds: float, rate: int = 16_000, channels: int = 1) -> Path:
    """Write a WAV file of 16-bit noise."""
    count = int(seconds * rate) * channels
    samples = np.random.default_rng(0).integers(-20_000, 20_000, count, dtype=np.int16)
    with wave.open(str(file), "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(samples.tobytes())
    return file
