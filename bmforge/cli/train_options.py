"""Generated tables of config fields and of models; see `dev/train_options.py`."""

from __future__ import annotations

__all__ = ["FIELDS", "KINDS", "MODELS"]

# Kind of the values -> fields. "" stands for other kinds, and for fields whose kind differs.
_KINDS = {
    "": """
adapter.activation adapter.exclude-modules adapter.kind adapter.merge adapter.modules-to-save
adapter.target-modules adapter.use-dora adapter.use-rslora behind changes compile cut
data.dev-split data.fields data.ignore data.labels data.language data.mirror data.paths
data.prefix-sharing data.reset-at-documents data.skip-bad data.split data.task data.tokenizer
data.train-split data.validation data.weights data.where export family freeze-base init-from
join layout.pp-cut layout.pp-schedule layout.sequence-parallel license method model-changes
model.activation model.add-pooling-layer model.attn-bias model.attn-scale model.balance-experts
model.bias model.changes model.classifier-dropout model.classifier-pooling model.dense-layers
model.embed-dropout model.feed-forward model.folded model.head model.head-activation
model.head-bias model.layer-types model.mask-modules model.mlp-bias model.model-type
model.new-decoder-architecture model.norm-affine model.norm-bias model.norm-first
model.normalize-weights model.out-bias model.output-router-logits model.pad-token-id
model.parallel-attn model.parallel-norms model.parallel-residual model.pooler-activation
model.problem-type model.prompts-in-vocabulary model.qkv-bias model.raw model.remove-final-norm
model.rope-interleaved model.rope-scaling model.rotated-layers model.scale-head
model.tie-word-embeddings model.uses-qk-norm model.window-layers model.windows new-head
nll-on-prompt offload.activations offload.directory offload.weights override push-to-hub
recompute reference-offload reward rl.kl-importance rollout.exact-logprobs
rollout.mask-truncated-completions rollout.tools run-dir search.kinds search.places search.sizes
step-separator target-len teacher template template-class train.disable-dropout
train.load-best-model-at-end train.master-weights train.optim.betas train.optim.groups
train.optim.name train.schedule.decay-kind train.schedule.kind value.init-from verbalizer
verbalizer-class wandb-project zero-shot
""",
    "0|2|3": "layout.zero",
    "adapter|copy|precomputed|None": "reference",
    "all|last": "data.answers",
    "auto|leave|stay": "offload.gradients",
    "float": """
center-rewards-coefficient data.mean data.smallest-crop data.std data.validation-fraction
distill-temperature jsd-beta label-smoothing long-ratio loss-scale.init-scale
loss-scale.min-scale mask-ratio mean-span-length mlm-ratio model.attn-dropout model.depth-scale
model.dropout model.embed-scale model.init-std model.layer-drop model.local-rope-theta
model.logit-divisor model.logit-scale model.norm-eps model.query-size model.residual-scale
model.rope-theta model.rotary-part model.router-aux-loss-coef model.sum-scale model.swiglu-limit
model.weight-scale noise-density reward-timeout-s rollout.temperature rollout.tool-timeout-s
timeout-s train.early-stopping-threshold train.optim.eps train.optim.lr train.optim.weight-decay
train.schedule.min-lr-ratio value.cliprange value.lr
""",
    "float|None": """
adapter.alpha adapter.dropout adapter.lr-ratio adapter.scale adapter.std beta desirable-weight
epochs loss-scale.fixed model.attn-softcap model.logit-softcap nll-weight rl.beta rl.clip-dual
rl.clip-high rl.clip-low rl.correction-cap rl.entropy-bonus rl.gamma rl.lam simpo-gamma
train.grad-clip train.optim.momentum train.optim.muon-lr train.spike-sigmas undesirable-weight
""",
    "float|auto": "offload.fraction",
    "flops|parameters": "layout.pp-balance",
    "fp32|bf16|8bit": "offload.states",
    "fp32|bf16|fp16": "train.precision",
    "fp32|bf16|fp16|None": "export-dtype",
    "fp32|bf16|fp16|int8|int4|None": "base-dtype",
    "gather|ring|ulysses": "layout.cp-method",
    "group|batch|mean|leave_one_out|whitened|gae|None": "rl.advantage",
    "host|disk": "offload.target",
    "int": """
calibrate choice data.global-batch-size data.micro-batch-size data.prefetch-steps data.seed
data.seeds data.seq-len data.shots distill-top-k layout.cp layout.dp-replicate layout.ep
layout.pp layout.tp loss-scale.growth-interval-steps loss-scale.hysteresis max-new-tokens
model.base-hidden-size model.decoder-start-token-id model.embed-size model.eos-token-id
model.expert-groups model.expert-size model.experts-per-token model.head-dim model.hidden-size
model.image-size model.intermediate-size model.kv-rank model.local-attention model.max-distance
model.max-seq-len model.num-buckets model.num-channels model.num-decoder-layers model.num-dense
model.num-experts model.num-heads model.num-kv-heads model.num-labels model.num-layers
model.num-relations model.num-segments model.num-shared model.original-seq-len model.patch-size
model.plain-dim model.pooler-size model.prompt-length model.prompt-types model.q-rank
model.rope-dim model.rotary-dim model.segment-types model.sep-token-id model.shared-size
model.sparse-step model.task-id model.top-groups model.unrotated-every model.value-dim
model.vocab-size model.window prefetch rollout.log-completions rollout.max-new-tokens
rollout.max-num-seqs rollout.max-turns rollout.num-generations rollout.num-iterations
rollout.overlong-tokens rollout.steps-per-generation search.keep-ratio search.max-trained seed
shortest soft-front train.keep-last train.log-every-steps train.num-epochs train.profile-steps
train.schedule.warmup-steps train.seed train.steps
""",
    "int8|int4|None": "reference-dtype",
    "int|None": """
adapter.division adapter.inner adapter.length adapter.rank adapter.reduction adapter.width
data.eos-id data.grad-accum-steps data.validation-batches layout.pp-stages-per-rank
model.mask-token-id model.sop-token-id train.early-stopping-patience train.eval-every-steps
train.keep-every-steps train.optim.ns-steps train.save-every-steps train.schedule.decay-steps
train.schedule.total-steps
""",
    "k1|k2|k3|None": "rl.kl",
    "loss|reward|None": "rl.kl-in",
    "min|product|mean|last|None": "step-aggregation",
    "none|truncate|mask|None": "rl.correction",
    "outcome|process": "supervision",
    "ppo|cispo|none|None": "rl.clip",
    "sequence|token|fixed|sum|None": "rl.normalize",
    "token|sequence|sequence_token|sequence_sum|None": "rl.ratio",
}
FIELDS = frozenset(name for names in _KINDS.values() for name in names.split())
# Field -> kind of its values: int, float, None or names, separated by |.
KINDS = {name: kind for kind, names in _KINDS.items() if kind for name in names.split()}
# Names of presets and families, and short names of models on the hub.
_MODELS = """
aya-23-8b bert bert-base-cased bert-base-chinese bert-base-multilingual-cased bert-base-uncased
bert-large-cased bert-large-uncased bloom bloom-1b1 bloom-1b7 bloom-3b bloom-560m bloom-7b1
chinese-roberta-wwm cohere cohere2 command-a-111b command-r-35b command-r7b cpm-ant-10b
cpm-ant-1b cpm-ant-300m cpm-ant-3b cpm-ant-7b cpm-ant-plus-10b cpm-bee-10b cpm-bee-1b cpm-bee-2b
cpm-bee-3b cpm-bee-5b cpm1 cpm1-large cpm1-medium cpm1-small cpm2 cpm2-2.0 cpm2-2.1
cpm2-moe-198b cpm_ant cpm_bee cpmant cpmbee deepseek-v2 deepseek-v2-lite deepseek-v3 deepseek_v2
deepseek_v3 deepseekv2 deepseekv3 eva eva1.0 eva2.0-base eva2.0-large eva2.0-xlarge falcon
falcon-11b falcon-40b falcon-7b flan-t5-base flan-t5-large flan-t5-small flan-t5-xl flan-t5-xxl
gemma gemma-2-27b gemma-2-2b gemma-2-9b gemma-2b gemma-3-1b gemma-3-270m gemma-7b gemma2 gemma3
gemma3_text glm glm-10b glm-10b-zh glm-2b glm-4-32b-0414 glm-4-9b glm-4-9b-0414 glm-4.5
glm-4.5-air glm-4.6 glm-515m glm-large-zh glm4 glm4_moe glm4moe gpt-neox-20b gpt-oss-120b
gpt-oss-20b gpt2 gpt2-base gpt2-large gpt2-medium gpt2-small gpt2-xl gpt_neox gpt_oss gptj
gptj-6b gptneox gptoss granite granite-3-2b granite-3-8b internlm3 internlm3-8b kimi-k2 kv-plm
lawformer llama llama-13b llama-2-13b llama-2-70b llama-2-7b llama-3-70b llama-3-8b
llama-3.1-405b llama-3.1-70b llama-3.1-8b llama-3.2-1b llama-3.2-3b llama-30b llama-65b llama-7b
longformer longformer-base-4096 longformer-large-4096 mengzi-t5-base minicpm minicpm-1b
minicpm-2b minicpm3 minicpm3-4b minicpm4-0.5b minicpm4-8b mistral mistral-7b-v0.1
mistral-7b-v0.3 mistral-nemo-12b mistral-small-24b mixtral mixtral-8x22b mixtral-8x7b modernbert
modernbert-base modernbert-large moonlight-16b-a3b mt5-base mt5-large mt5-small mt5-xl mt5-xxl
olmo-2-13b olmo-2-1b olmo-2-32b olmo-2-7b olmo-3-7b olmo2 olmo3 opt opt-1.3b opt-125m opt-13b
opt-2.7b opt-30b opt-350m opt-6.7b opt-66b phi phi-1 phi-1.5 phi-2 phi-3-medium-4k phi-3-mini-4k
phi-4 phi3 pythia-1.4b pythia-12b pythia-160m pythia-1b pythia-2.8b pythia-410m pythia-6.9b
pythia-70m qwen qwen1.5-moe-a2.7b qwen2 qwen2-0.5b qwen2-1.5b qwen2-72b qwen2-7b qwen2.5-0.5b
qwen2.5-1.5b qwen2.5-14b qwen2.5-32b qwen2.5-3b qwen2.5-72b qwen2.5-7b qwen2_moe qwen2moe
qwen3-0.6b qwen3-1.7b qwen3-14b qwen3-235b-a22b qwen3-30b-a3b qwen3-32b qwen3-4b qwen3-8b
qwen3_moe qwen3moe roberta roberta-base roberta-large seed-oss-36b seed_oss seedoss smollm3
smollm3-3b stablelm stablelm-2-1.6b stablelm-3b starcoder2 starcoder2-15b starcoder2-3b
starcoder2-7b t5 t5-11b t5-3b t5-base t5-large t5-small t5-v1_1-base t5-v1_1-large t5-v1_1-small
t5-v1_1-xl t5-v1_1-xxl vit vit-base-patch16-224 vit-base-patch16-224-in21k vit-base_patch16_224
vit-large-patch16-224 vit-large-patch16-224-in21k wenzhong-gpt2-3.5b xlm-roberta
xlm-roberta-base xlm-roberta-large xlmroberta
"""
MODELS = tuple(_MODELS.split())
