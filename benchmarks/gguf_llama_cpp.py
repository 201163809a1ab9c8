"""GGUF files of ours in llama.cpp, and llama.cpp's in ours: ids, logits, tokens, stored values.

    python benchmarks/gguf_llama_cpp.py TEXT --peer PYTHON [--t5 DIRECTORY]

TEXT is a file to learn by heart, PYTHON an interpreter that has llama-cpp-python, DIRECTORY a T5's
tokenizer. Small models of every architecture learn a few hundred tokens, so that what they write
does not hang on the last bit, and are written as F16, Q8_0 and Q4_0. llama.cpp continues 64 tokens
greedily with an fp32 cache, cuts the text's lines into tokens, and quantises the F16 file of a
Qwen2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

_NEW, _PROMPT, _LEARNT = 64, 24, 96
_STEPS, _RATE = 70, 2e-3
_LINES = 400
_KINDS = ("f16", "q8_0", "q4_0")
# llama_ftype of what llama_model_quantize makes
_QUANTIZED = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}


def be_peer(orders: dict[str, Any]) -> dict[str, Any]:
    """Do in llama.cpp what `orders` say, and return what came out."""
    import ctypes

    import llama_cpp as peer
    import numpy as np

    def logits(model: Any) -> Any:
        count = model.n_vocab()
        found = peer.llama_get_logits_ith(model._ctx.ctx, -1)
        return np.ctypeslib.as_array(found, shape=(count,)).copy()

    def feed(model: Any, ids: list[int], run: Any = peer.llama_decode) -> None:
        held = (ctypes.c_int * len(ids))(*ids)
        if run(model._ctx.ctx, peer.llama_batch_get_one(held, len(ids))):
            raise RuntimeError("llama.cpp did not take the tokens")

    def write(order: dict[str, Any]) -> dict[str, Any]:
        options = {"n_ctx": 256, "n_threads": 1, "type_k": 0, "type_v": 0, "verbose": False}
        model = peer.Llama(model_path=order["path"], **options)
        first = order["prompt"]
        if order["start"] is not None:
            feed(model, first, peer.llama_encode)
            first = [order["start"]]
        feed(model, first)
        scores, ids = logits(model), []
        while len(ids) < _NEW:
            ids.append(int(logits(model).argmax()))
            feed(model, ids[-1:])
        return {"ids": ids, "logits": scores.tolist()}

    def cut(order: dict[str, Any]) -> dict[str, Any]:
        model = peer.Llama(model_path=order["path"], vocab_only=True, verbose=False)
        lines = [line.encode() for line in order["lines"]]
        return {"ids": [model.tokenize(line, add_bos=False, special=True) for line in lines]}

    def embed(order: dict[str, Any]) -> dict[str, Any]:
        options = {"embedding": True, "pooling_type": 0, "n_ctx": 256, "verbose": False}
        model = peer.Llama(model_path=order["path"], **options)
        held = (ctypes.c_int * len(order["prompt"]))(*order["prompt"])
        peer.llama_encode(model._ctx.ctx, peer.llama_batch_get_one(held, len(order["prompt"])))
        rows = [
            np.ctypeslib.as_array(
                peer.llama_get_embeddings_ith(model._ctx.ctx, i), shape=(order["width"],)
            ).tolist()
            for i in range(len(order["prompt"]))
        ]
        return {"states": rows}

    def quantize(order: dict[str, Any]) -> dict[str, Any]:
        options = peer.llama_model_quantize_default_params()
        options.ftype, options.nthread = order["ftype"], 1
        source, target = order["path"].encode(), order["target"].encode()
        return {"status": peer.llama_model_quantize(source, target, ctypes.byref(options))}

    does = {"write": write, "cut": cut, "quantize": quantize, "embed": embed}
    return {name: does[order["do"]](order) for name, order in orders.items()}


def ask_peer(python: str, orders: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Have the other interpreter do it."""
    (folder / "orders.json").write_text(json.dumps(orders))
    command = [python, __file__, "--be-peer", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads((folder / "answers.json").read_text())


def learn(config: Any, ids: list[int]) -> Any:
    """Return a model that knows a text by heart."""
    import torch

    from bmforge.models import T5
    from bmforge.models.hub import FAMILIES

    family = next(f for f in FAMILIES.values() if f.config_class is type(config))
    model: Any = family.from_config(config, seed=1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    row = torch.tensor([ids[:_LEARNT]])
    given = {"input_ids": row, "labels": row}
    if isinstance(model, T5):
        given = {"input_ids": row[:, :_PROMPT], "labels": row[:, _PROMPT:]}
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(**given).loss.backward()
        optimizer.step()
    return model.eval()


def write_ours(path: Path, prompt: list[int], start: int | None) -> dict[str, Any]:
    """Open a file of ours and continue greedily, the whole again for every token."""
    import torch

    from bmforge.models import AutoModel

    model: Any = AutoModel.from_pretrained(path)
    ids: list[int] = []
    first = None
    with torch.no_grad():
        while len(ids) < _NEW:
            if start is None:
                out = model(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
            else:
                target = torch.tensor([[start, *ids]])
                out = model(input_ids=torch.tensor([prompt]), decoder_input_ids=target)
                out = out.logits[0, -1]
            first = out if first is None else first
            ids.append(int(out.argmax()))
    return {"ids": ids, "logits": first}


def configs(vocab_size: int) -> dict[str, Any]:
    """Return a config of every architecture that llama.cpp computes."""
    from bmforge.models import (
        GPT2Config,
        LlamaConfig,
        MiniCPMConfig,
        MixtralConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
        QwenConfig,
        T5Config,
    )

    wide: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": 256, "intermediate_size": 512}
    wide |= {"num_layers": 2, "num_heads": 4, "max_seq_len": 256}
    grouped = {**wide, "num_kv_heads": 2}
    experts: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_size": 256}
    llama3 = {"kind": "llama3", "factor": 8.0, "original_seq_len": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"kind": "yarn", "factor": 4.0, "original_seq_len": 64}
    factors = [1.0 + i / 8 for i in range(32)]
    long = {"kind": "longrope", "original_seq_len": 256, "short_factor": factors}
    long["long_factor"] = factors
    return {
        "Llama": LlamaConfig(**grouped),
        "Llama, llama3 scaling, tied": LlamaConfig(
            **grouped, rope_scaling=llama3, tie_word_embeddings=True
        ),
        "Mixtral": MixtralConfig(**grouped, num_experts=4),
        "Qwen2": QwenConfig(**grouped),
        "Qwen2, yarn": QwenConfig(**grouped, rope_scaling=yarn),
        "Qwen3": QwenConfig(**grouped, model_type="qwen3", head_dim=64),
        "Qwen2-MoE": Qwen2MoeConfig(**grouped, **experts, shared_size=256),
        "Qwen3-MoE": Qwen3MoeConfig(**grouped, **experts, normalize_weights=True),
        "MiniCPM": MiniCPMConfig(**grouped, init_std=0.05),
        "MiniCPM4, longrope": MiniCPMConfig(**grouped, init_std=0.05, rope_scaling=long),
        "GPT-2": GPT2Config(**wide),
        "T5": T5Config(**wide, head_dim=64, init_std=0.5),
        "T5 1.1": T5Config(
            **wide,
            head_dim=64,
            init_std=0.5,
            feed_forward="gated-gelu",
            tie_word_embeddings=False,
            scale_head=False,
        ),
    }


def byte_pairs(text: str, name: str) -> Any:
    """Train byte pairs that cut text as `tokenizer.ggml.pre` says."""
    from tokenizers import Regex, Tokenizer, decoders, models, trainers
    from tokenizers import pre_tokenizers as pre

    from bmforge.tokenizers import FastTokenizer
    from bmforge.tokenizers.gguf_read import PRE

    rules = PRE[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=rules.takes_words))
    letters = pre.ByteLevel(add_prefix_space=False, use_regex=rules.expression is None)
    tokenizer.pre_tokenizer = letters
    if rules.expression is not None:
        split = pre.Split(Regex(rules.expression), "isolated")
        tokenizer.pre_tokenizer = pre.Sequence([split, letters])
    if rules.composes:
        from tokenizers import normalizers

        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return FastTokenizer(tokenizer.to_str().encode(), {"bos": "<|end|>", "eos": "<|end|>"})


def sentence_pairs(text: str, folder: Path) -> Any:
    """Train sentencepiece's pairs, and open them as a file has them."""
    import io

    import gguf
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    from bmforge.tokenizers import AutoTokenizer

    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=out,
        vocab_size=1500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    pieces = SentencePieceProcessor(model_proto=out.getvalue())
    every = range(pieces.vocab_size())
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
        for i in every
    ]
    writer = gguf.GGUFWriter(folder / "pieces.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(i) for i in every])
    writer.add_token_scores([pieces.get_score(i) for i in every])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file):
        step()
    writer.write_ti_data_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(folder / "pieces.gguf")


def compare_models(text: str, python: str, folder: Path) -> None:
    """Print what both write after the same tokens, and how far the first logits are apart."""
    import torch

    from bmforge.models.formats.gguf_export import export_gguf

    tokenizer = byte_pairs(text, "gpt-2")
    ids = tokenizer.encode(text)[: 2 * _LEARNT]
    orders: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    for name, config in configs(tokenizer.vocab_size).items():
        model = learn(config, ids)
        start = config.decoder_start_token_id if name.startswith("T5") else None
        for kind in _KINDS:
            path = export_gguf(model, folder / f"{name}-{kind}.gguf", kind, tokenizer=tokenizer)
            key = f"{name} | {kind}"
            mine[key] = write_ours(path, ids[:_PROMPT], start)
            orders[key] = {"do": "write", "path": str(path), "prompt": ids[:_PROMPT]}
            orders[key]["start"] = start
    theirs = ask_peer(python, orders, folder)
    print("| model | type | the same ids of 64 | largest difference of logits / largest logit |")
    print("|---|---|---|---|")
    for key, ours in mine.items():
        same = sum(a == b for a, b in zip(ours["ids"], theirs[key]["ids"], strict=True))
        want = torch.tensor(theirs[key]["logits"])
        if key.startswith("T5 |"):  # whose head llama.cpp does not scale
            want = want * 256**-0.5
        apart = (ours["logits"] - want).abs().max() / want.abs().max()
        print(f"| {key} | {same} | {apart:.1e} |")


def compare_states(text: str, python: str, folder: Path) -> None:
    """Print how far a BERT's last hidden states are apart."""
    import torch

    from bmforge.models import AutoModel, Bert, BertConfig
    from bmforge.models.formats.gguf_export import export_gguf

    config = BertConfig(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
        head="none", activation="gelu",
    )  # fmt: skip
    tokenizer = _word_pieces(text)
    config = config.replace(vocab_size=tokenizer.vocab_size)
    path = export_gguf(Bert.from_config(config), folder / "bert.gguf", "f16", tokenizer=tokenizer)
    prompt = tokenizer.encode(text)[:_PROMPT]
    order = {"do": "embed", "path": str(path), "prompt": prompt, "width": 256}
    found = torch.tensor(ask_peer(python, {"bert": order}, folder)["bert"]["states"])
    model: Any = AutoModel.from_pretrained(path)
    with torch.no_grad():
        ours = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    print(f"\nBERT, hidden states: {(ours - found).abs().max() / found.abs().max():.1e} apart")


def _word_pieces(text: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    from bmforge.tokenizers import FastTokenizer

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    roles = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    trainer = trainers.WordPieceTrainer(
        vocab_size=1500, special_tokens=list(roles.values()), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return FastTokenizer(tokenizer.to_str().encode(), roles)


def compare_tokens(text: str, python: str, folder: Path, t5: str | None) -> None:
    """Print how many lines both cut into the same tokens."""
    from bmforge.models import GPT2, GPT2Config
    from bmforge.models.formats.gguf_export import export_gguf
    from bmforge.tokenizers import AutoTokenizer

    kinds = {f"byte pairs, {name}": byte_pairs(text, name) for name in _PRE_NAMES}
    kinds["sentencepiece pairs"] = sentence_pairs(text, folder)
    kinds["word pieces"] = _word_pieces(text)
    if t5 is not None:
        kinds["T5's unigram model"] = AutoTokenizer.from_pretrained(t5)
    lines = [line for line in text.splitlines() if line][:_LINES]
    lines += ["  two  spaces, 12345 don't", "naïve café 床前明月光"]
    orders: dict[str, Any] = {}
    for name, tokenizer in kinds.items():
        config = GPT2Config(
            vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=1, num_heads=1
        )
        path = export_gguf(
            GPT2.from_config(config), folder / f"{name}.gguf", "f16", tokenizer=tokenizer
        )
        orders[name] = {"do": "cut", "path": str(path), "lines": lines}
    theirs = ask_peer(python, orders, folder)
    print("\n| tokenizer | lines cut alike |\n|---|---|")
    for name, tokenizer in kinds.items():
        ends = {tokenizer.token_to_id(t) for t in ("[CLS]", "[SEP]", "</s>")} - {None}
        found = [[i for i in ids if i not in ends] for ids in theirs[name]["ids"]]
        same = sum(tokenizer.encode(line) == ids for line, ids in zip(lines, found, strict=True))
        print(f"| {name} | {same} of {len(lines)} |")


_PRE_NAMES = ("gpt-2", "llama-bpe", "qwen2")


def compare_values(python: str, folder: Path) -> None:
    """Print whether what llama.cpp quantised has the same values here as in `gguf`."""
    import gguf
    import numpy as np
    import torch

    from bmforge.gguf_header import BLOCKS, read_gguf_header
    from bmforge.models.formats.hf_format import WeightFiles

    source = folder / "Qwen2-f16.gguf"
    targets = {name: folder / f"quantized-{name}.gguf" for name in _QUANTIZED}
    orders = {
        name: {
            "do": "quantize",
            "path": str(source),
            "target": str(path),
            "ftype": _QUANTIZED[name],
        }
        for name, path in targets.items()
    }
    status = ask_peer(python, orders, folder)
    print("\n| made by llama.cpp | kinds in it | values | with other bits than in `gguf` |")
    print("|---|---|---|---|")
    for name, path in targets.items():
        assert status[name]["status"] == 0
        files, data, wrong, total = WeightFiles(path), path.read_bytes(), 0, 0
        header = read_gguf_header(path)
        for tensor, place in header.tensors.items():
            width = place.shape[-1] // BLOCKS[place.kind][0] * BLOCKS[place.kind][1]
            stored = np.frombuffer(data, np.uint8, place.size, place.start).reshape(-1, width)
            want = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[place.kind])
            got = files.read(tensor).float().reshape(want.shape)
            bits = torch.from_numpy(want.view(np.int32).copy())
            wrong += int((got.view(torch.int32) != bits).sum())
            total += bits.numel()
        kinds = sorted({place.kind for place in header.tensors.values()})
        print(f"| {name} | {', '.join(kinds)} | {total:,} | {wrong} |")


def main() -> None:
    """Compare all, with the versions of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--t5")
    parser.add_argument("--be-peer", type=Path)
    given = parser.parse_args()
    if given.be_peer is not None:
        orders = json.loads((given.be_peer / "orders.json").read_text())
        (given.be_peer / "answers.json").write_text(json.dumps(be_peer(orders)))
        return
    text = given.text.read_text("utf-8")[:200_000]
    shown = "from importlib.metadata import version; print(version('llama-cpp-python'))"
    peer = subprocess.run([given.peer, "-c", shown], check=True, capture_output=True, text=True)
    said = {name: version(name) for name in ("torch", "gguf", "tokenizers")}
    print(f"llama-cpp-python {peer.stdout.strip()},", said, sys.version.split()[0], "\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare_models(text, given.peer, folder)
        compare_values(given.peer, folder)
        compare_tokens(text, given.peer, folder, given.t5)
        compare_states(text, given.peer, folder)


if __name__ == "__main__":
    main()
