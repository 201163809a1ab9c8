"""Rows of decoding and prefill: concurrent requests, transformers, and the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.measure import (
    SkippedRowError,
    Values,
    build_model,
    config_of,
    family_of,
    peak_gib,
    seconds_in_turns,
    table_entry,
    time_once,
)
from benchmarks.harness import paired_ratio
from benchmarks.serving.batched_requests import draw_prompt
from bmforge.device import default_device, memory_room_bytes
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, RequestsConfig
from bmforge.surgery import persistent_tensors

__all__ = ["decode", "prompts_of"]

# Decoding is timed from this token on: the prompts of all requests have been read then, and graphs
# are recorded.
_FEW = 16
Write = Callable[[int], None]
"""Generates a number of tokens after new prompts."""


def choose_preset(presets: list[str], length: int, device: torch.device) -> tuple[str, Any]:
    """Return the first model that fits into memory twice in 16 bits."""
    for preset in presets:
        config = config_of(preset, length)
        model = family_of(config).from_config(config, device="meta")
        count = sum(p.numel() for p in model.parameters())
        if device.type == "cpu" or 4.5 * count < memory_room_bytes(device):
            return preset, config
    raise SkippedRowError(f"none of {', '.join(presets)} fits twice in memory")


def weights_read(model: Any) -> int:
    """Return the bytes of the weights that a step reads: all except an untied embedding."""
    tied = model.config.tie_word_embeddings
    tensors = persistent_tensors(model).items()
    return sum(t.nbytes for name, t in tensors if tied or not name.startswith("embed"))


def prompts_of(count: int, length: int, vocab: int, start: int) -> list[list[int]]:
    """Return random prompts that share no prefix with those of another `start`."""
    return [[i % vocab for i in draw_prompt(start + n, length)] for n in range(count)]


def open_bmforge(engine: Engine, count: int, prompt: int) -> Write:
    """Return a function that sends concurrent requests to bmforge's engine."""
    numbers = iter(range(0, 1 << 30, count))
    vocab = engine.model.config.vocab_size

    def write(new: int) -> None:
        config = GenerationConfig(max_new_tokens=new, eos_token_id=())
        prompts = prompts_of(count, prompt, vocab, next(numbers))
        handles = [engine.submit(Request(ids, config)) for ids in prompts]
        for handle in handles:
            handle.wait()

    return write


def open_transformers(config: Any, scheme: str, count: int, prompt: int) -> Write:
    """Return a function that generates with transformers; torchao packs int8 and int4."""
    import transformers

    names = ("vocab_size", "hidden_size", "intermediate_size")
    sizes = {name: getattr(config, name) for name in names}
    peer_config = transformers.LlamaConfig(
        **sizes,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_seq_len,
    )
    device = default_device()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(peer_config)
    half = torch.bfloat16 if scheme == "int4" else torch.float16  # torchao's int4 requires bf16
    model = model.to(torch.float32 if device.type == "cpu" else half)
    model = model.to_empty(device=device).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(peer_config).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if scheme != "fp16":
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
        from torchao.quantization import quantize_ as pack

        # The other packings of int4 require the package mslk.
        int4 = partial(Int4WeightOnlyConfig, group_size=32, int4_packing_format="tile_packed_to_4d")
        pack(model, Int8WeightOnlyConfig() if scheme == "int8" else int4())
    numbers = iter(range(0, 1 << 30, count))

    @torch.no_grad()
    def write(new: int) -> None:
        prompts = prompts_of(count, prompt, config.vocab_size, next(numbers))
        ids = torch.tensor(prompts, device=device)
        mask = torch.ones_like(ids)
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **options)

    return write


def decode(
    presets: list[str], scheme: str, count: int, prompt: int, new: int, rounds: int
) -> Values:
    """Time the first token, and `new` tokens after the first ones, of `count` requests."""
    device = default_device()
    preset, config = choose_preset(presets, prompt + _FEW + new, device)
    yield {"model": preset, "weights": scheme, "requests": count}
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    model = build_model(config, dtype, None if scheme == "fp16" else scheme).eval()
    read_bytes = weights_read(model)
    length = prompt + _FEW + new + 16
    requests = RequestsConfig(
        max_num_seqs=count, total_tokens=(count + 1) * length, max_num_batched_tokens=2048
    )
    config_of_engine = EngineConfig(max_tokens=length, requests=requests)
    with Engine(model, config=config_of_engine) as engine:
        write = open_bmforge(engine, count, prompt)
        write(_FEW)
        firsts, starts, totals = (
            statistics.median(time_once(partial(write, tokens)) for _ in range(rounds))
            for tokens in (1, _FEW, _FEW + new)
        )
        speed = count * new / (totals - starts) if totals > starts else None
        entry = table_entry(device)
        roofline = None if entry is None else count * 1e9 * entry.memory_gb_s / read_bytes
        yield {
            "decode tokens/s": speed,
            "roofline share": speed / roofline if speed and roofline else None,
            "prefill tokens/s": round(count * prompt / firsts, 1),
            "peak GiB": peak_gib(device),
        }
        yield compare_with_peer(write, config, (scheme, count, prompt, new), rounds)


def compare_with_peer(
    write: Write, config: Any, options: tuple[str, int, int, int], rounds: int
) -> dict[str, Any]:
    """Return the ratios to transformers, or the reason for their absence."""
    scheme, count, prompt, new = options
    try:
        sides = {"bmforge": write, "transformers": open_transformers(config, scheme, count, prompt)}
        prefill, start, total = (
            seconds_in_turns({name: partial(side, n) for name, side in sides.items()}, rounds)
            for n in (1, _FEW, _FEW + new)
        )
    except Exception as error:  # the row keeps bmforge's figures, whatever the peer raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        return {"transformers": f"failed: {reason}"}
    starts = {name: statistics.median(seconds) for name, seconds in start.items()}
    decode = {name: [s - starts[name] for s in seconds] for name, seconds in total.items()}
    values = {}
    for task, seconds in (("decode", decode), ("prefill", prefill)):
        ratio = "too short to measure"
        if min(map(min, seconds.values())) > 0:
            ratio = f"{paired_ratio(seconds, *sides):.2f}"
        values[f"{task} speed, bmforge / transformers"] = ratio
    return values
