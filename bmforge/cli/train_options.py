"""Generated table of the config fields of each task; see `dev/train_options.py`."""

from __future__ import annotations

__all__ = ["FIELDS"]

_NAMES = """
adapter.activation adapter.alpha adapter.division adapter.dropout adapter.exclude-modules
adapter.inner adapter.kind adapter.length adapter.lr-ratio adapter.merge adapter.modules-to-save
adapter.rank adapter.reduction adapter.scale adapter.std adapter.target-modules adapter.use-dora
adapter.use-rslora adapter.width base-dtype behind beta calibrate center-rewards-coefficient
changes choice compile cut data.answers data.dev-split data.eos-id data.fields
data.global-batch-size data.grad-accum-steps data.ignore data.labels data.language data.mean
data.micro-batch-size data.mirror data.paths data.prefetch-steps data.prefix-sharing
data.reset-at-documents data.seed data.seeds data.seq-len data.shots data.skip-bad
data.smallest-crop data.split data.std data.task data.tokenizer data.train-split data.validation
data.validation-batches data.validation-fraction data.weights data.where desirable-weight
distill-temperature distill-top-k epochs export export-dtype family freeze-base init-from join
jsd-beta label-smoothing layout.cp layout.cp-method layout.dp-replicate layout.ep layout.pp
layout.pp-balance layout.pp-cut layout.pp-schedule layout.pp-stages-per-rank
layout.sequence-parallel layout.tp layout.zero license long-ratio loss-scale.fixed
loss-scale.growth-interval-steps loss-scale.hysteresis loss-scale.init-scale
loss-scale.min-scale mask-ratio max-new-tokens mean-span-length method mlm-ratio model-changes
model.activation model.add-pooling-layer model.attn-bias model.attn-dropout model.attn-scale
model.attn-softcap model.balance-experts model.base-hidden-size model.bias model.changes
model.classifier-dropout model.classifier-pooling model.decoder-start-token-id
model.dense-layers model.depth-scale model.dropout model.embed-dropout model.embed-scale
model.embed-size model.eos-token-id model.expert-groups model.expert-size
model.experts-per-token model.feed-forward model.folded model.head model.head-activation
model.head-bias model.head-dim model.hidden-size model.image-size model.init-std
model.intermediate-size model.kv-rank model.layer-drop model.layer-types model.local-attention
model.local-rope-theta model.logit-divisor model.logit-scale model.logit-softcap
model.mask-modules model.mask-token-id model.max-distance model.max-seq-len model.mlp-bias
model.model-type model.new-decoder-architecture model.norm-affine model.norm-bias model.norm-eps
model.norm-first model.normalize-weights model.num-buckets model.num-channels
model.num-decoder-layers model.num-dense model.num-experts model.num-heads model.num-kv-heads
model.num-labels model.num-layers model.num-relations model.num-segments model.num-shared
model.original-seq-len model.out-bias model.output-router-logits model.pad-token-id
model.parallel-attn model.parallel-norms model.parallel-residual model.patch-size
model.plain-dim model.pooler-activation model.pooler-size model.problem-type model.prompt-length
model.prompt-types model.prompts-in-vocabulary model.q-rank model.qkv-bias model.query-size
model.raw model.remove-final-norm model.residual-scale model.rope-dim model.rope-interleaved
model.rope-scaling model.rope-theta model.rotary-dim model.rotary-part model.rotated-layers
model.router-aux-loss-coef model.scale-head model.segment-types model.sep-token-id
model.shared-size model.sop-token-id model.sparse-step model.sum-scale model.swiglu-limit
model.task-id model.tie-word-embeddings model.top-groups model.unrotated-every
model.uses-qk-norm model.value-dim model.vocab-size model.weight-scale model.window
model.window-layers model.windows new-head nll-on-prompt nll-weight noise-density
offload.activations offload.directory offload.fraction offload.gradients offload.states
offload.target offload.weights override prefetch push-to-hub recompute reference reference-dtype
reference-offload reward reward-timeout-s rl.advantage rl.beta rl.clip rl.clip-dual rl.clip-high
rl.clip-low rl.correction rl.correction-cap rl.entropy-bonus rl.gamma rl.kl rl.kl-importance
rl.kl-in rl.lam rl.normalize rl.ratio rollout.exact-logprobs rollout.log-completions
rollout.mask-truncated-completions rollout.max-new-tokens rollout.max-num-seqs rollout.max-turns
rollout.num-generations rollout.num-iterations rollout.overlong-tokens
rollout.steps-per-generation rollout.temperature rollout.tool-timeout-s rollout.tools run-dir
search.keep-ratio search.kinds search.max-trained search.places search.sizes seed shortest
simpo-gamma soft-front step-aggregation step-separator supervision target-len teacher template
template-class timeout-s train.disable-dropout train.early-stopping-patience
train.early-stopping-threshold train.eval-every-steps train.grad-clip train.keep-every-steps
train.keep-last train.load-best-model-at-end train.log-every-steps train.master-weights
train.num-epochs train.optim.betas train.optim.eps train.optim.groups train.optim.lr
train.optim.momentum train.optim.muon-lr train.optim.name train.optim.ns-steps
train.optim.weight-decay train.precision train.profile-steps train.save-every-steps
train.schedule.decay-kind train.schedule.decay-steps train.schedule.kind
train.schedule.min-lr-ratio train.schedule.total-steps train.schedule.warmup-steps train.seed
train.spike-sigmas train.steps undesirable-weight value.cliprange value.init-from value.lr
verbalizer verbalizer-class wandb-project zero-shot
"""
FIELDS = frozenset(_NAMES.split())
