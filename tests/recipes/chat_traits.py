"""Minimal chat templates, one per trait of published ones, and a tokenizer that has their tokens.

Each was written for these tests; the names say in which models' templates the trait occurs.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

_CALLS = (
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + "
    "'</tool_call>' }}{%- endfor %}"
)
_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for t in tools %}"
    "{{- t | tojson(ensure_ascii=False) + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
)
_LAST_USER = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
_SPLIT = (
    "{%- set thought = m.reasoning_content or '' %}{%- set answer = m.content %}"
    "{%- if '</think>' in answer %}"
    "{%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set answer = answer.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
)
_ASKS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"


def _chatml(assistant: str, before: str = "", asks: str = _ASKS) -> str:
    return (
        before + "{%- for m in messages %}{%- if m.role == 'assistant' %}" + assistant + "{%- else "
        "%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
        "{%- endfor %}" + asks
    )


_SAID = "{{- '<|im_start|>assistant\n' + m.content }}" + _CALLS + "{{- '<|im_end|>\n' }}"
TEMPLATES = {
    # Qwen1.5, Qwen2, Yi, InternLM2, MiniCPM, SmolLM, Hermes 2, OpenHermes, Dolphin
    "plain ChatML": _chatml(_SAID, _TOOLS),
    # Qwen3 (hybrid), Qwen3.5, GLM-4.5, GLM-4.6, Hunyuan-A13B, MiniCPM4.1
    "thoughts of the last answer alone": _chatml(
        _SPLIT
        + "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last %}"
        + "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{- answer }}"
        + _CALLS
        + "{{- '<|im_end|>\n' }}",
        _LAST_USER + _TOOLS,
        _ASKS
        + "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is "
        "false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
    ),
    # DeepSeek-R1, R1-Distill-Qwen, R1-Distill-Llama, DeepSeek-V3.1
    "thoughts stripped, prompt opens one": _chatml(
        "{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1] }}"
        + _CALLS
        + "{{- '<|im_end|>\n' }}",
        _TOOLS,
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}",
    ),
    # QwQ-32B, Qwen3-Thinking-2507, MiniMax-M2
    "thoughts kept, prompt opens one": _chatml(
        _SPLIT
        + "{{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + answer }}"
        + _CALLS
        + "{{- '<|im_end|>\n' }}",
        _TOOLS,
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}",
    ),
    # Llama 3, 3.1, 3.2, 3.3, Nemotron
    "headers, trimmed content": (
        "{{- bos_token }}{%- for m in messages %}{{- '<|im_start|>' + m.role + '<|im_sep|>\n\n' + "
        "m.content | trim }}" + _CALLS + "{{- '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>\n\n' }}{%- endif %}"
    ),
    # Mistral 7B, Mixtral, Zephyr-like: no generation prompt, the answer follows at once
    "no generation prompt": (
        "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
        "{{- ' ' + m.content }}" + _CALLS + "{{- eos_token }}"
        "{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}{%- endfor %}"
    ),
    # Gemma 2, Gemma 3: the system message is written into the first user message
    "system in the first turn": (
        "{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
        "{{- bos_token }}{%- for m in messages %}{%- if m.role != 'system' %}"
        "{{- '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{%- if loop.index0 == (1 if system else 0) %}{{- system }}{%- endif %}"
        "{{- m.content | trim }}" + _CALLS + "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>model\n' }}{%- endif %}"
    ),
    # SmolLM3, Granite 3, gpt-oss: a default system message is always written
    "default system message": _chatml(
        _SAID,
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
        "{%- endif %}" + _TOOLS,
    ),
    # GLM-4, ChatGLM3, Phi-3, Phi-4, Falcon 3: nothing after an answer but the next role
    "no end mark": (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
        + _CALLS
        + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    # OLMo 2, Tulu 3: the end token after the last answer alone; others end with a newline
    "end token of the last answer alone": (
        "{{- bos_token }}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
        + _CALLS
        + "{%- if loop.last and m.role == 'assistant' %}{{- eos_token }}{%- else %}{{- '\n' }}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    # TRL's training templates, SmolLM3: answers between {% generation %} tags
    "generation tags": _chatml("{% generation %}" + _SAID + "{% endgeneration %}", _TOOLS),
}
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<think>", "</think>"]


def write_bpe(folder: Path, template: str | None = None, vocab_size: int = 400) -> Path:
    """Train a byte-level BPE tokenizer with the templates' special tokens; return its folder."""
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*list(pydoc_data.topics.topics.values())[:8], "你好，世界。北京" * 20]
    fast.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
