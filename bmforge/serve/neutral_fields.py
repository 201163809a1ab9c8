"""Table of request fields that are accepted only with values that have no effect.

Clients of OpenAI, vLLM and llama.cpp send such fields with their defaults. Any other value would
change the answer in a way that this server does not support, so it is refused with the reason.
Sources: openai 3.57 (`types`), vLLM (`entrypoints/openai/*/protocol.py`), llama.cpp
(`tools/server/server-task.cpp`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = [
    "CHAT_FIELDS",
    "COMPLETION_FIELDS",
    "MESSAGES_FIELDS",
    "POOLING_FIELDS",
    "RERANK_FIELDS",
    "RESPONSES_FIELDS",
    "SCORE_FIELDS",
    "TOKENIZE_FIELDS",
    "TOOL_FIELDS",
    "WRITING_FIELDS",
    "NeutralField",
    "NeutralFields",
]


class NeutralField(NamedTuple):
    """Field that is accepted only with a value that has no effect.

    Attributes:
        reason: clause that says why other values are refused, with advice.
        values: accepted values; null is always accepted.
        idle_values: further values, which are accepted in requests without penalties.
        is_hint: True if every value is accepted, because none can change the response.
    """

    reason: str
    values: tuple[Any, ...] = ()
    idle_values: tuple[Any, ...] = ()
    is_hint: bool = False

    def accepts(self, value: Any, body: Mapping[str, Any]) -> bool:
        """Return True if the value has no effect; true and false are distinct from 1 and 0.

        Args:
            value: value of the field.
            body: all fields of the request.
        """
        is_idle = all(body.get(name) in (None, off) for name, off in _PENALTIES_OFF.items())
        values = (*self.values, *(self.idle_values if is_idle else ()))
        return (
            self.is_hint
            or value is None
            or any(v == value and isinstance(v, bool) == isinstance(value, bool) for v in values)
        )

    @property
    def allowed(self) -> str:
        """Accepted values as JSON, such as ``false or null``."""
        allowed = " or ".join(json.dumps(value) for value in (*self.values, None))
        idle = " or ".join(json.dumps(value) for value in self.idle_values)
        return f"{allowed}, or {idle} without penalties" if idle else allowed


NeutralFields = Mapping[str, NeutralField]
_PENALTIES_OFF = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


def _hints(reason: str, *names: str) -> dict[str, NeutralField]:
    """Return, for each name, a `NeutralField` that accepts every value, with the given reason."""
    return {name: NeutralField(reason, is_hint=True) for name in names}


_SAMPLERS = "the samplers are temperature, top_k, top_p and min_p. Use one of these"
_PENALTIES = "repetition is penalized by repetition_penalty, presence_penalty and frequency_penalty"
_CONSTRAINT = "constraints have other names. Use response_format or structured_outputs"
_TIMINGS = "timings are reported for the whole server, in /metrics"
_TOKEN_IDS = "answers contain texts. Use /tokenize to get token ids"
_CONTEXT = "a prompt is never cut or shifted. Send a shorter prompt"
_LIMIT = "the length of an answer is limited by another field. Use max_tokens"
_TRANSFER = "KV caches are not transferred between servers"
_IMAGES = "the model's own processor settings are used for images"
_EXPERTS = "the experts of a token are not returned"
_RENDERING = "it applies only to vLLM's endpoints that render prompts"
_BUDGET = "the length of the reasoning is limited by another field. Use thinking_token_budget"
_SPLITTING = "reasoning is returned separately for models with reasoning. Use include_reasoning"
_UNSTORED = "responses are not stored. Send the whole conversation in each request"

# Fields of chat and text completions.
WRITING_FIELDS: dict[str, NeutralField] = {
    # vLLM
    "priority": NeutralField("requests run in the order of their arrival", (0,)),
    "detokenize": NeutralField(_TOKEN_IDS, (True,)),
    "include_stop_str_in_output": NeutralField("stop strings are removed from answers", (False,)),
    "spaces_between_special_tokens": NeutralField(
        "the tokenizer decides where spaces are", (True,)
    ),
    "use_beam_search": NeutralField("answers are sampled, without beam search", (False,)),
    "length_penalty": NeutralField("it applies only to beam search", is_hint=True),
    "early_stopping": NeutralField("it applies only to beam search", is_hint=True),
    "truncate_prompt_tokens": NeutralField(_CONTEXT),
    "truncation_side": NeutralField(_CONTEXT),
    "allowed_token_ids": NeutralField("the vocabulary is not restricted. Use logit_bias"),
    "logprob_token_ids": NeutralField(
        "log probabilities are those of the most probable tokens. Use top_logprobs or logprobs"
    ),
    "logits_processors": NeutralField("code of clients is never executed", ([],)),
    "watermarking": NeutralField("answers have no watermark", (False,)),
    "repetition_detection": NeutralField(_PENALTIES),
    "return_token_ids": NeutralField(_TOKEN_IDS, (False,)),
    "return_tokens_as_token_ids": NeutralField(_TOKEN_IDS, (False,)),
    "return_token_offsets": NeutralField(_RENDERING, (False,)),
    "return_mm_kwargs": NeutralField(_RENDERING, (True,)),
    "routed_experts_prompt_start": NeutralField(_EXPERTS, (0,)),
    "stream_interval": NeutralField("every new token is streamed immediately", (1,)),
    "kv_transfer_params": NeutralField(_TRANSFER),
    "ec_transfer_params": NeutralField(_TRANSFER),
    "guided_whitespace_pattern": NeutralField("the whitespace of JSON answers is fixed"),
    "vllm_xargs": NeutralField("vLLM's plugins are not available", ({},)),
    # llama.cpp
    "n_predict": NeutralField(_LIMIT, (-1,)),
    "n_cmpl": NeutralField("the number of answers is another field. Use n", (1,)),
    "n_probs": NeutralField("log probabilities are requested by another field. Use logprobs", (0,)),
    "n_keep": NeutralField(_CONTEXT, (0,)),
    "n_discard": NeutralField(_CONTEXT, (0,)),
    "n_indent": NeutralField("it applies only to code infilling", (0,)),
    "n_cache_reuse": NeutralField("only equal prefixes of prompts are taken from the cache", (0,)),
    "id_slot": NeutralField("requests are not assigned to slots", (-1,)),
    "t_max_prompt_ms": NeutralField(_LIMIT, (-1,)),
    "t_max_predict_ms": NeutralField(_LIMIT, (-1,)),
    "timings_per_token": NeutralField(_TIMINGS, (False,)),
    "return_progress": NeutralField("the progress of a prompt is not reported", (False,)),
    "return_tokens": NeutralField(_TOKEN_IDS, (False,)),
    "response_fields": NeutralField("an answer has all its fields", ([],)),
    "post_sampling_probs": NeutralField(
        "log probabilities are those before sampling. Use logprobs", (False,)
    ),
    "backend_sampling": NeutralField("the engine decides where tokens are sampled", (False,)),
    "samplers": NeutralField("the order of samplers is temperature, top_k, top_p, min_p"),
    "min_keep": NeutralField(_SAMPLERS, (0,)),
    "typical_p": NeutralField(_SAMPLERS, (1,)),
    "typ_p": NeutralField(_SAMPLERS, (1,)),
    "top_n_sigma": NeutralField(_SAMPLERS, (-1,)),
    "xtc_probability": NeutralField(_SAMPLERS, (0,)),
    "dynatemp_range": NeutralField(_SAMPLERS, (0,)),
    "mirostat": NeutralField(_SAMPLERS, (0,)),
    "repeat_penalty": NeutralField(_PENALTIES, (1,)),
    "repeat_last_n": NeutralField(
        "penalties apply to all tokens, not only to the last ones", (-1,), (0, 64)
    ),
    "dry_multiplier": NeutralField(_PENALTIES, (0,)),
    "adaptive_target": NeutralField(_SAMPLERS, (-1,)),
    "grammar": NeutralField(_CONSTRAINT, ("",)),
    "grammar_lazy": NeutralField(_CONSTRAINT, (False,)),
    "grammar_triggers": NeutralField(_CONSTRAINT, ([],)),
    "preserved_tokens": NeutralField("set skip_special_tokens=false to see all tokens", ([],)),
    "json_schema": NeutralField(_CONSTRAINT),
    "lora": NeutralField("an adapter is selected by its name in the field model", ([],)),
    "reasoning_budget_tokens": NeutralField(_BUDGET, (-1,)),
    **_hints("mirostat is off", "mirostat_tau", "mirostat_eta"),
    **_hints("xtc_probability is 0", "xtc_threshold"),
    **_hints("dynatemp_range is 0", "dynatemp_exponent"),
    **_hints("adaptive_target is off", "adaptive_decay"),
    **_hints(
        "dry_multiplier is 0",
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    ),
    **_hints(
        "speculative decoding does not change answers",
        *(f"speculative.{name}" for name in ("n_min", "n_max", "p_min", "type")),
        *(f"speculative.ngram_{name}" for name in ("size_n", "size_m", "m_hits")),
    ),
    **_hints(
        "reasoning_budget_tokens is off",
        *(f"reasoning_budget_{name}" for name in ("start_tag", "end_tag", "message")),
        "reasoning_budget_arm_immediately",
    ),
}

CHAT_FIELDS: dict[str, NeutralField] = {
    **WRITING_FIELDS,
    # OpenAI
    "modalities": NeutralField("answers are texts", (["text"],)),
    "verbosity": NeutralField("chat templates have no verbosity", ("medium",)),
    "audio": NeutralField("answers are texts"),
    "function_call": NeutralField("it is deprecated. Use tool_choice"),
    "functions": NeutralField("it is deprecated. Use tools"),
    "web_search_options": NeutralField("the server does not search the web"),
    "moderation": NeutralField("answers are not moderated"),
    # vLLM
    "echo": NeutralField("an answer does not repeat the last message", (False,)),
    "add_special_tokens": NeutralField("the chat template adds the special tokens", (False,)),
    "prompt_logprobs": NeutralField("prompts are scored only by /v1/completions"),
    "return_prompt_text": NeutralField(
        "the prompt is not returned. Use /tokenize to get its tokens", (False,)
    ),
    "documents": NeutralField("documents are not inserted. Write them into a message", ([],)),
    "chat_template": NeutralField("templates of clients are not executed"),
    "media_io_kwargs": NeutralField(_IMAGES),
    "mm_processor_kwargs": NeutralField(_IMAGES),
    # llama.cpp
    "reasoning_format": NeutralField(_SPLITTING, ("auto",)),
    "reasoning_in_content": NeutralField(_SPLITTING, (False,)),
    "thinking_forced_open": NeutralField("the chat template opens the reasoning", (False,)),
    "reasoning_control": NeutralField("running requests cannot be changed", (False,)),
    "thinking_budget_tokens": NeutralField(_BUDGET, (-1,)),
    "chat_format": NeutralField("the chat template determines the format of tool calls"),
    "chat_parser": NeutralField("the chat template determines the format of tool calls"),
    "parse_tool_calls": NeutralField("tool calls are parsed if tools are given", (True,)),
}

COMPLETION_FIELDS: dict[str, NeutralField] = {
    **WRITING_FIELDS,
    "best_of": NeutralField("all answers are returned. Use n", (1,)),
    "suffix": NeutralField("text is only appended to a prompt"),
    "prompt_embeds": NeutralField("a prompt is a text or a list of token ids"),
    "thinking_token_budget": NeutralField("reasoning is limited in /v1/chat/completions", (-1,)),
}

RESPONSES_FIELDS: dict[str, NeutralField] = {
    # OpenAI
    "previous_response_id": NeutralField(_UNSTORED),
    "conversation": NeutralField(_UNSTORED),
    "background": NeutralField(_UNSTORED, (False,)),
    "background_options": NeutralField(_UNSTORED),
    "truncation": NeutralField(_CONTEXT, ("disabled",)),
    "context_management": NeutralField(_CONTEXT, ([],)),
    "top_logprobs": NeutralField("responses have no log probabilities. Use chat completions", (0,)),
    "max_tool_calls": NeutralField("the client executes the tools"),
    "prompt": NeutralField("prompts are not stored. Use instructions and input"),
    "moderation": NeutralField("answers are not moderated"),
    "image": NeutralField("answers are texts"),
    "access_programs": NeutralField("the server has no access programs"),
    # vLLM
    **{
        name: WRITING_FIELDS[name]
        for name in ("priority", "include_stop_str_in_output", "vllm_xargs")
    },
    "mm_processor_kwargs": NeutralField(_IMAGES),
    "enable_response_messages": NeutralField("the messages are not returned", (False,)),
    "previous_input_messages": NeutralField(_UNSTORED),
    "previous_response": NeutralField(_UNSTORED),
}

# Fields of embeddings, scores and rankings.
POOLING_FIELDS: dict[str, NeutralField] = {
    # vLLM
    "truncate_prompt_tokens": NeutralField(_CONTEXT),
    "truncation_side": NeutralField(_CONTEXT),
    "padding": NeutralField("texts are not padded", ("do_not_pad",)),
    "use_activation": NeutralField(
        "embeddings are normalized, and scores of cross-encoders are between 0 and 1", (True,)
    ),
    "add_special_tokens": NeutralField("the model family determines the special tokens", (True,)),
    "normalize": NeutralField("embeddings have an Euclidean norm of 1", (True,)),
    "embed_dtype": NeutralField("base64 contains numbers of 32 bits", ("float32",)),
    "endianness": NeutralField("base64 contains little-endian numbers", ("little", "native")),
    "priority": WRITING_FIELDS["priority"],
    "mm_processor_kwargs": NeutralField(_IMAGES),
    **_hints("it is an identifier", "request_id"),
    **_hints("embeddings are computed without the prefix cache", "cache_salt"),
    # llama.cpp
    "embd_normalize": NeutralField("embeddings have an Euclidean norm of 1", (2,)),
}

SCORE_FIELDS: dict[str, NeutralField] = {
    **POOLING_FIELDS,
    # vLLM
    "max_tokens_per_query": NeutralField(_CONTEXT, (0,)),
    "max_tokens_per_doc": NeutralField(_CONTEXT, (0,)),
    "softmax": POOLING_FIELDS["use_activation"],
    "activation": POOLING_FIELDS["use_activation"],
}

RERANK_FIELDS: dict[str, NeutralField] = {
    **SCORE_FIELDS,
    # Cohere
    "max_chunks_per_doc": NeutralField(_CONTEXT),
    "rank_fields": NeutralField("documents are ranked by their text", (["text"],)),
    # Jina
    "truncation": NeutralField(_CONTEXT, (False,)),
    "return_embeddings": NeutralField("only scores are returned. Use /v1/embeddings", (False,)),
}

TOKENIZE_FIELDS: dict[str, NeutralField] = {
    name: CHAT_FIELDS[name] for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
}

# Fields of Anthropic's messages.
MESSAGES_FIELDS: dict[str, NeutralField] = {
    "container": NeutralField("the client executes the tools"),
    "mcp_servers": NeutralField("the client executes the tools", ([],)),
    "context_management": NeutralField(_CONTEXT),
    "compaction": NeutralField(_CONTEXT),
    "diagnostics": NeutralField("metrics are reported for the whole server, in /metrics"),
    "inference_geo": NeutralField("the server has one location"),
    "speed": NeutralField("all requests run at the same speed", ("standard",)),
    **_hints("it is an identifier", "user_profile_id", "workspace_id"),
}

# Fields of the tools of Anthropic's messages.
TOOL_FIELDS: dict[str, NeutralField] = {
    "allowed_callers": NeutralField("tools are called only by the model", (["direct"],)),
    "defer_loading": NeutralField("all tools are part of the prompt", (False,)),
    "input_examples": NeutralField("examples are not inserted. Write them into a message", ([],)),
    **_hints("arguments are always streamed as they are generated", "eager_input_streaming"),
}
