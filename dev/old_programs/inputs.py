"""Writes tiny models, tokenizers and data sets that stand in for those of the programs."""

from __future__ import annotations

import importlib.util
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

from bmforge.models import CPM2, GLM, CPM2Config, GLMConfig
from bmforge.tokenizers import CPM2Tokenizer

__all__ = ["write_data", "write_models"]

_TEXT = """
    the film was a great and moving story of people who work in the city of Beijing bad good
    question answer yes no it is not true that he said she asked world sports business science
    capital one two three house wonderful translate English German terrible positive negative
"""
_WORDS = _TEXT.split()
_CHINESE = "今天天气很好我们去学校北京是中国的首都他在看书你问题答案"
_WIDTH = 32


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return random sentences of known words and characters."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(_WORDS, k=12)) for _ in range(count)]
    return lines + ["".join(draw.choices(_CHINESE, k=16)) for _ in range(count // 4)]


def _pieces(path: Path, kind: str = "unigram") -> None:
    """Train a sentencepiece model on random sentences."""
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(400)),
        model_writer=buffer,
        model_type=kind,
        vocab_size=460 if kind == "bpe" else 180,
        pad_id=0 if kind == "unigram" else -1,
        eos_id=1 if kind == "unigram" else 2,
        unk_id=2 if kind == "unigram" else 0,
        bos_id=-1 if kind == "unigram" else 1,
        hard_vocab_limit=False,
        byte_fallback=kind == "bpe",
        minloglevel=2,
    )
    path.write_bytes(buffer.getvalue())


def _word_pieces(folder: Path) -> int:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({c for word in _WORDS for c in word})
    vocabulary = [*special, *_WORDS, *_CHINESE, *letters, *(f"##{c}" for c in letters)]
    vocabulary = list(dict.fromkeys(vocabulary))
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return len(vocabulary)


def _chinese_word_pieces(folder: Path) -> int:
    """Write a BERT vocabulary with T5's masks, which its model calls `extra0`, `extra1`, ..."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"extra{n}" for n in range(100))]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = [
        *special,
        *dict.fromkeys(_CHINESE + "一二三四第句：；，。？"),
        *letters,
        *"0123456789",
    ]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return len(vocabulary)


def _byte_pairs(folder: Path, special: list[str]) -> int:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(sentences(200), vocab_size=400, special_tokens=special)
    tokenizer.save_model(str(folder))
    return int(tokenizer.get_vocab_size())


def _unigrams(folder: Path) -> int:
    _pieces(folder / "spiece.model")
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100}
    config |= {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    return int(model.vocab_size()) + 100


def _llama_pieces(folder: Path) -> int:
    _pieces(folder / "tokenizer.model", "bpe")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return int(model.vocab_size())


_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_BERT = {
    "hidden_size": _WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_T5 = {
    "d_model": _WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_GPT = {"n_embd": _WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 1024}
# Modules that OpenDelta modifies by default in each block of transformers' T5.
_ENCODER_OUTPUTS = ("0.SelfAttention.o", "1.DenseReluDense.wo")
_DECODER_OUTPUTS = ("0.SelfAttention.o", "2.DenseReluDense.wo")
# Name of the model -> class of transformers, its sizes, its tokenizer.
_MODELS: dict[str, tuple[str, dict[str, Any], Callable[[Path], int]]] = {
    "bert": ("BertForPreTraining", {**_BERT, "max_position_embeddings": 1024}, _word_pieces),
    "roberta": (
        "RobertaForMaskedLM",
        {**_BERT, "max_position_embeddings": 1026, "type_vocab_size": 1, "pad_token_id": 1},
        lambda folder: _byte_pairs(folder, _ROBERTA),
    ),
    "longformer": (
        "LongformerForMaskedLM",
        {**_BERT, "attention_window": [32, 32], "max_position_embeddings": 4098},
        _word_pieces,
    ),
    "gpt2": ("GPT2LMHeadModel", _GPT, lambda f: _byte_pairs(f, ["<|endoftext|>"])),
    "gptj": (
        "GPTJForCausalLM",
        {**_GPT, "rotary_dim": 8},
        lambda f: _byte_pairs(f, ["<|endoftext|>"]),
    ),
    "opt": (
        "OPTForCausalLM",
        {
            "hidden_size": _WIDTH,
            "word_embed_proj_dim": _WIDTH,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 1024,
        },
        lambda f: _byte_pairs(f, _ROBERTA),
    ),
    "llama": (
        "LlamaForCausalLM",
        {**_BERT, "num_key_value_heads": 4, "max_position_embeddings": 1024},
        _llama_pieces,
    ),
    "t5": ("T5ForConditionalGeneration", _T5, _unigrams),
    "t5-v1_1": (
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        _unigrams,
    ),
    "uer-t5": (
        "MT5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        _chinese_word_pieces,
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "d_model": _WIDTH,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 256,
        },
        lambda f: _byte_pairs(f, _ROBERTA),
    ),
    "vit": ("ViTForImageClassification", {**_BERT, "num_labels": 1000}, lambda _: 0),
}


def write_models(target: Path) -> None:
    """Write a folder per model: config, weights (fp32) and vocabulary."""
    for name, (kind, sizes, write_vocabulary) in _MODELS.items():
        folder = target / name
        folder.mkdir(parents=True)
        count = write_vocabulary(folder)
        model_class = getattr(transformers, kind)
        more = {"vocab_size": 21128 if name == "longformer" else count} if count else {}
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**sizes, **more))
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(folder)
    _write_glm(target / "glm")


def _write_glm(folder: Path) -> None:
    """Write a GLM with the vocabulary size of glm-10b-zh, whose ids ModelCenter's test contains."""
    buffer, names = io.BytesIO(), ["<|endoftext|>", "[SEP]", "[CLS]", "[MASK]", "[UNK]", ""]
    names += ["<|startofpiece|>", "<|endofpiece|>", "[sMASK]", "[gMASK]"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b"]),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=50_000,
        user_defined_symbols=[f"<{number}>" for number in range(49_994)],
        minloglevel=2,
    )
    ids = {name: 50_000 + number for number, name in enumerate(names) if name}
    config = GLMConfig(
        vocab_size=50_048,
        hidden_size=_WIDTH,
        intermediate_size=4 * _WIDTH,
        num_layers=2,
        num_heads=4,
        max_seq_len=1024,
        sop_token_id=ids["<|startofpiece|>"],
        mask_token_id=ids["[sMASK]"],
    )
    GLM.from_config(config, seed=0).save_pretrained(folder)
    (folder / "cog-pretrain.model").write_bytes(buffer.getvalue())
    (folder / "added_tokens.json").write_text(json.dumps(ids), "utf-8")


def _superglue_rows(name: str, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Return random rows of one of SuperGLUE's tasks."""

    def text() -> str:
        return " ".join(draw.choices(_WORDS, k=6))

    def row(number: int) -> dict[str, Any]:
        answer = bool(number % 2)
        if name == "BoolQ":
            return {"passage": text(), "question": text(), "label": answer}
        if name == "COPA":
            choices = {
                "choice1": text(),
                "choice2": text(),
                "question": ("cause", "effect")[answer],
            }
            return {"premise": text(), **choices, "label": int(answer)}
        if name == "WiC":
            pair = {"word": "city", "sentence1": f"city {text()}", "sentence2": f"city {text()}"}
            return {**pair, "start1": 0, "end1": 4, "start2": 0, "end2": 4, "label": answer}
        if name == "WSC":
            target = {"span1_index": 0, "span1_text": "people", "span2_index": 1}
            return {
                "text": f"people they {text()}",
                "target": {**target, "span2_text": "they"},
                "label": answer,
            }
        labels = {
            "CB": ("contradiction", "entailment", "neutral"),
            "RTE": ("entailment", "not_entailment"),
        }[name]
        return {"premise": text(), "hypothesis": text(), "label": labels[number % len(labels)]}

    return [{**row(number), "idx": number} for number in range(count)]


def write_data(target: Path) -> None:
    """Write small data sets in the form of the originals."""
    draw = random.Random(0)
    for name in ("BoolQ", "CB", "COPA", "RTE", "WiC", "WSC"):
        for folder in (target / "down_data/superglue" / name, target / "huggingface" / name):
            folder.mkdir(parents=True)
            for split in ("train", "dev", "val", "test"):
                lines = [json.dumps(row) for row in _superglue_rows(name, 8, draw)]
                (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    news = target / "agnews/datasets/TextClassification/agnews"
    news.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [f'"{n % 4 + 1}","{text}","{text}"' for n, text in enumerate(sentences(240))]
        (news / f"{split}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    reviews = target / "agnews/datasets/TextClassification/SST-2/16-shot/16-13"
    reviews.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        rows = [f"{text}\t{n % 2}" for n, text in enumerate(sentences(16))]
        (reviews / f"{split}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    _write_indexed(target / "indexed")
    _write_bee(target / "bee")
    _write_generation(target / "openprompt/datasets", draw)
    _write_cpm2(target / "openprompt/cpm2.1-new")
    _write_low_rank_adapter(target / "opendelta/low_rank_adapter")
    if importlib.util.find_spec("datasets"):
        from datasets import Dataset, DatasetDict

        rows = [
            {**row, "label": number % 3}
            for number, row in enumerate(_superglue_rows("CB", 9, draw))
        ]
        splits = {name: Dataset.from_list(rows) for name in ("train", "validation", "test")}
        DatasetDict(splits).save_to_disk(target / "super_glue.cb")
        rows = _superglue_rows("BoolQ", 16, draw)
        splits = {name: Dataset.from_list(rows) for name in ("train", "validation", "test")}
        DatasetDict(splits).save_to_disk(target / "super_glue.boolq")


def _write_generation(folder: Path, draw: random.Random) -> None:
    """Write WebNLG, CommonsenseQA, UltraChat and CCPM in the form of the originals."""
    texts = sentences(64, seed=2)
    for name in ("CondGen/webnlg_2017", "Reasoning/csqa", "CCPM", "ZH/ChnSentiCorp"):
        (folder / name).mkdir(parents=True)
    for split in ("train", "dev", "test"):
        entries = [
            {
                str(number + 1): {
                    "modifiedtripleset": [{"subject": "city", "property": "is", "object": word}],
                    "lexicalisations": [{"lex": texts[number], "comment": "good"}],
                }
            }
            for number, word in enumerate(draw.choices(_WORDS, k=6))
        ]
        file = folder / f"CondGen/webnlg_2017/{split}.json"
        file.write_text(json.dumps({"entries": entries}))
    choices = [{"label": "ABCDE"[n], "text": draw.choice(_WORDS)} for n in range(5)]
    question = {"stem": texts[0], "choices": choices}
    lines = [json.dumps({"question": question, "answerKey": "A"}) for _ in range(8)]
    (folder / "Reasoning/csqa/train_rand_split.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"id": str(n), "data": texts[n : n + 4]}) for n in range(12)]
    (folder / "ultrachat.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
    poem = {"translation": "今天天气很好。", "choices": list(_CHINESE[:4]), "answer": 1}
    for split in ("train", "dev"):
        rows = [{"text_a": "天气很好", "label": str(n % 2)} for n in range(16)]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / f"ZH/ChnSentiCorp/{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    for split in ("train", "valid"):
        lines = [json.dumps({**poem, "answer": n % 4}, ensure_ascii=False) for n in range(16)]
        (folder / f"CCPM/{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_cpm2(folder: Path) -> None:
    """Write a tiny CPM-2 under the name of BMInf's last version, in which BMInf looks for it."""
    special = ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<eod>", "▂", "▁"]
    letters = dict.fromkeys(_CHINESE + "文本：上述所表达情感积极还消。？")
    vocabulary = [*special, *letters, *(f"<s_{number}>" for number in range(190))]
    tokenizer = CPM2Tokenizer("\n".join(vocabulary).encode(), Path("vocab.txt"))
    sizes = {"hidden_size": _WIDTH, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
    config = CPM2Config(vocab_size=len(tokenizer), head_dim=8, eos_token_id=7, **sizes)
    CPM2.from_config(config, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_low_rank_adapter(folder: Path) -> None:
    """Write a low-rank adapter for the model `t5` in OpenDelta's format, with random values."""
    folder.mkdir(parents=True)
    reduction = 8
    outputs = [f"encoder.block.{n}.layer.{o}" for n in range(2) for o in _ENCODER_OUTPUTS]
    outputs += [f"decoder.block.{n}.layer.{o}" for n in range(2) for o in _DECODER_OUTPUTS]
    narrow, tensors = _WIDTH // reduction, {}
    for name in outputs:
        for side, rows, columns in (("down", _WIDTH, narrow), ("up", narrow, _WIDTH)):
            prefix = f"{name}.low_rank_adapter.{side}_sampler"
            tensors[f"{prefix}.W_left"] = torch.randn(rows, 1)
            tensors[f"{prefix}.W_right"] = torch.randn(1, columns)
            tensors[f"{prefix}.b"] = torch.zeros(columns)
    torch.save(tensors, folder / "pytorch_model.bin")
    fields = {"delta_type": "low_rank_adapter", "reduction_factor": reduction, "low_rank_rank": 1}
    fields |= {"non_linearity": "gelu_new", "modified_modules": ["attn@.proj@", "ff@.w2@"]}
    fields |= {"common_structure": True, "backbone_class": "T5ForConditionalGeneration"}
    (folder / "config.json").write_text(json.dumps(fields))


def _write_bee(folder: Path) -> None:
    """Write documents, model configs and a list of data sets for CPM-Bee and CPM-Ant."""
    (folder / "documents").mkdir(parents=True)
    rows = [
        {"input": text, "options": {"<option_0>": "好", "<option_1>": "坏"}, "<ans>": "<option_0>"}
        for text in sentences(40)
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "documents/poems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sizes = {"vocab_size": 86583, "dim_model": 32, "dim_ff": 64, "num_layers": 2, "num_heads": 4}
    more = {"dim_head": 8, "position_bias_num_buckets": 32, "position_bias_max_distance": 128}
    for name, half in (("model", False), ("model_half", True)):
        (folder / f"{name}.json").write_text(json.dumps({**sizes, **more, "half": half}))
    (folder / "ant.json").write_text(json.dumps({**sizes, **more, "vocab_size": 512}))
    entry = {"dataset_name": "poems", "task_name": "poems", "weight": 1.0}
    transforms = [{"input": "$input", "options": "$options", "<ans>": "$<ans>"}]
    for name in ("CPM-Bee", "CPM-Live"):
        path = {"path": str((folder / f"binary-{name}/poems").absolute())}
        config = [{**entry, **path, "transforms": transforms, "incontext_weight": [1.0]}]
        (folder / f"datasets-{name}.json").write_text(json.dumps(config))


def _write_indexed(folder: Path) -> None:
    """Write token sequences as memory-mapped files, for BMCook's GPT-2 and T5."""
    from bmforge.compat.model_center.tools.indexed_dataset import make_builder

    folder.mkdir()
    draw = random.Random(1)
    for name in ("text", "text_context", "text_target"):
        builder = make_builder(str(folder / f"{name}.bin"), impl="mmap")
        for _ in range(16):
            builder.add_item(torch.tensor(draw.choices(range(5, 90), k=20)))
            builder.end_document()
        builder.finalize(str(folder / f"{name}.idx"))
