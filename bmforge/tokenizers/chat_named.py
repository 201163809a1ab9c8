"""Named chat templates for base models without one (`--template chatml`).

Each template renders system, user and assistant messages in the published format of the same name.
Special tokens that the tokenizer's vocabulary lacks are encoded as ordinary text.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NAMED_TEMPLATES"]

_CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\nCall functions as <tool_call>{"name": ..., "arguments": ...}</tool_call>.' }}
    {{- '\\n\\n<tools>\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\\n' if message['content'] or not loop.first }}
            {{- '<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_GEMMA = """\
{{- bos_token }}
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in messages %}
    {%- if message['role'] != 'system' %}
        {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
        {{- '<start_of_turn>' + role + '\\n' }}
        {{- system if loop.index0 == (1 if system else 0) }}
        {{- message['content'] | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' }}
        {{- system if loop.index0 == (1 if system else 0) }}
        {{- message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

_PHI3 = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""

_ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""

_VICUNA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- message['content'] + '\\n\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- 'ASSISTANT: ' + message['content'] + eos_token + '\\n' }}
    {%- else %}
        {{- 'USER: ' + message['content'] + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{% endif %}"""

_ALPACA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- message['content'] + '\\n\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}
    {%- else %}
        {{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{% endif %}"""

NAMED_TEMPLATES: Mapping[str, str] = {
    "chatml": _CHATML,
    "llama3": _LLAMA3,
    "gemma": _GEMMA,
    "mistral": _MISTRAL,
    "phi3": _PHI3,
    "zephyr": _ZEPHYR,
    "vicuna": _VICUNA,
    "alpaca": _ALPACA,
}
