"""Request fields of vLLM and llama.cpp that clients send, accepted with their neutral values only.

A value that would change the answer is rejected by the name of the field. The numbers are the
values that turn a feature off in these servers.
"""

from __future__ import annotations

from typing import Literal

from bmforge.serve.message_types import Strict

__all__ = ["PeerFields"]


class PeerFields(Strict):
    """Fields of other servers' requests for a chat or a completion."""

    # vLLM: tokens and texts.
    include_stop_str_in_output: Literal[False] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    detokenize: Literal[True] | None = None
    truncate_prompt_tokens: None = None
    allowed_token_ids: None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    # vLLM: search, scheduling and extensions.
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    priority: Literal[0] | None = None
    logits_processors: None = None
    mm_processor_kwargs: None = None
    kv_transfer_params: None = None
    vllm_xargs: None = None
    guided_whitespace_pattern: None = None
    # llama.cpp: sampling.
    repeat_penalty: Literal[1] | None = None
    typical_p: Literal[1] | None = None
    top_n_sigma: Literal[-1] | None = None
    dynatemp_range: Literal[0] | None = None
    mirostat: Literal[0] | None = None
    dry_multiplier: Literal[0] | None = None
    xtc_probability: Literal[0] | None = None
    # llama.cpp: prompts, slots and the form of the answer.
    n_predict: Literal[-1] | None = None
    n_keep: Literal[0] | None = None
    n_probs: Literal[0] | None = None
    id_slot: Literal[-1] | None = None
    t_max_predict_ms: Literal[-1] | None = None
    timings_per_token: Literal[False] | None = None
    post_sampling_probs: Literal[False] | None = None
    return_progress: Literal[False] | None = None
    return_tokens: Literal[False] | None = None
    reasoning_format: Literal["auto"] | None = None
    # Accepted and ignored: an id for logs, and a hint for the prefix cache.
    request_id: str | None = None
    cache_prompt: bool | None = None
