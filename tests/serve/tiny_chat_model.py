"""Writes a tiny chat model with a tokenizer of bytes, for the tests of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from bmforge.models import Llama, LlamaConfig

MARKS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
# ChatML with Qwen's form of calls.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>...</tool_call><|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, **sizes: Any) -> Path:
    """A Llama with random weights over 256 bytes and ChatML's marks; returns its directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*MARKS, *alphabet])}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(MARKS)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {**roles, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_layers": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), **{"max_seq_len": 2048, **shape, **sizes})
    Llama.from_config(config, seed=1).save_pretrained(folder)
    return folder
