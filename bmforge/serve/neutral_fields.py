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
    "RESPONSES_FIELDS",
    "WRITING_FIELDS",
    "NeutralField",
    "NeutralFields",
]


class NeutralField(NamedTuple):
    """Field that is accepted only with a value that has no effect.

    Attributes:
        reason: clause that says why other values are refused, with advice.
        values: accepted values; null is always accepted.
    """

    reason: str
    values: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Return True if the value has no effect; true and false are not the numbers 1 and 0."""
        return value is None or any(
            value == item and isinstance(value, bool) == isinstance(item, bool)
            for item in self.values
        )

    @property
    def allowed(self) -> str:
        """Accepted values as JSON, such as ``false or null``."""
        return " or ".join(json.dumps(value) for value in (*self.values, None))


NeutralFields = Mapping[str, NeutralField]

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
    "length_penalty": NeutralField("it applies only to beam search", (1,)),
    "early_stopping": NeutralField("it applies only to beam search", (False,)),
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
    "xtc_threshold": NeutralField(_SAMPLERS, (0.1,)),
    "dynatemp_range": NeutralField(_SAMPLERS, (0,)),
    "dynatemp_exponent": NeutralField(_SAMPLERS, (1,)),
    "mirostat": NeutralField(_SAMPLERS, (0,)),
    "mirostat_tau": NeutralField(_SAMPLERS, (5,)),
    "mirostat_eta": NeutralField(_SAMPLERS, (0.1,)),
    "repeat_penalty": NeutralField(_PENALTIES, (1,)),
    "repeat_last_n": NeutralField(
        "penalties apply to all tokens, not only to the last ones", (-1,)
    ),
    "dry_multiplier": NeutralField(_PENALTIES, (0,)),
    "dry_base": NeutralField(_PENALTIES, (1.75,)),
    "dry_allowed_length": NeutralField(_PENALTIES, (2,)),
    "dry_penalty_last_n": NeutralField(_PENALTIES, (-1,)),
    "dry_sequence_breakers": NeutralField(_PENALTIES, (["\n", ":", '"', "*"],)),
    "grammar": NeutralField(_CONSTRAINT, ("",)),
    "json_schema": NeutralField(_CONSTRAINT),
    "lora": NeutralField("an adapter is selected by its name in the field model", ([],)),
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
