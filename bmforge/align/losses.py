"""Losses of preference optimization, as functions of summed log-probabilities.

Notation of the formulas: h is the log-ratio of policy and reference for an answer, summed over its
tokens; the index w is the chosen and l the rejected answer; |y| is the number of scored tokens; s
is the logistic sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import ConfigError, suggest

__all__ = [
    "METHODS",
    "LossMethod",
    "MethodOptions",
    "PairScores",
    "kto_loss",
    "log1mexp",
    "log_ratio",
    "odds_ratio",
    "preference_loss",
    "reward_loss",
]

# log1p(-exp(a)) is accurate below this value, log(-expm1(a)) above it. Source: Maechler,
# "Accurately computing log(1 - exp(-|a|))" (2012).
_LOG_HALF = -0.6931471805599453


def log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return log(p / q) from the logarithms of two probabilities, where 0 / 0 is 1.

    Both are -inf if both models exclude a token of an answer, for example padding of the vocabulary
    with logits of -inf. Then the ratio, like 0 log(0 / 0) in a KL divergence, adds nothing to the
    loss and has no gradient. If only one of them is -inf, the result is infinite.
    """
    return (log_p - log_q).masked_fill((log_p == -torch.inf) & (log_q == -torch.inf), 0)


class PairScores(NamedTuple):
    """Log-probabilities of the two answers in each pair.

    Args:
        chosen, rejected: summed log-probability of the answer's tokens under the policy.
        reference_chosen, reference_rejected: the same values under the reference model; 0
            without a reference model.
        chosen_length, rejected_length: number of scored tokens.

    Shape:
        all (B,)
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    def ratios(self) -> tuple[Tensor, Tensor]:
        """Return the log-ratio of policy and reference for both answers."""
        chosen = log_ratio(self.chosen, self.reference_chosen)
        return chosen, log_ratio(self.rejected, self.reference_rejected)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the mean log-probability per token of both answers under the policy."""
        return self.chosen / self.chosen_length, self.rejected / self.rejected_length


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Coefficients of the losses; each method uses those that `METHODS` names.

    Args:
        beta: strength of the preference term.
        label_smoothing: assumed fraction of wrong preferences, from 0 to below 0.5.
        simpo_gamma: reward margin of SimPO.
        nll_weight: factor on the chosen answer's mean negative log-likelihood per token
            (`rpo_alpha` of DPO, `cpo_alpha` of CPO).
        desirable_weight, undesirable_weight: factors on good and bad answers in KTO.
    """

    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    nll_weight: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


PairLoss = Callable[[PairScores, MethodOptions], Tensor]


@dataclass(frozen=True)
class LossMethod:
    """Description of one preference optimization method.

    Args:
        loss: loss of every pair, before the NLL term is added; None for unpaired answers.
        about: name of the method, and publication that defines it.
        beta: default of `beta`.
        needs_reference: True if the loss compares with a reference model.
        options: further fields of `MethodOptions` that have an effect.
        nll_weight: default factor on the negative log-likelihood.
    """

    loss: PairLoss | None
    about: str
    beta: float = 0.1
    needs_reference: bool = True
    options: tuple[str, ...] = ("nll_weight",)
    nll_weight: float = 0.0


def _dpo(scores: PairScores, options: MethodOptions) -> Tensor:
    """DPO loss: -(1 - e) log s(beta d) - e log s(-beta d), with d = h_w - h_l.

    s is the sigmoid, h the log-ratio of policy and reference, and e the label smoothing; e > 0 is
    conservative DPO.
    """
    chosen, rejected = scores.ratios()
    return _smoothed(options.beta * log_ratio(chosen, rejected), options.label_smoothing)


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    loss = -F.logsigmoid(margin)
    return (1 - smoothing) * loss - smoothing * F.logsigmoid(-margin) if smoothing else loss


def _robust(scores: PairScores, options: MethodOptions) -> Tensor:
    """Robust DPO loss: [-(1 - e) log s(beta d) + e log s(-beta d)] / (1 - 2 e); see `_dpo`."""
    chosen, rejected = scores.ratios()
    margin, smoothing = options.beta * log_ratio(chosen, rejected), options.label_smoothing
    # The same sum as in conservative DPO, with the smoothing -e / (1 - 2 e).
    return _smoothed(margin, -smoothing / (1 - 2 * smoothing))


def _hinge(scores: PairScores, options: MethodOptions) -> Tensor:
    """Hinge loss: max(0, 1 - beta d), where d is the difference of the log-ratios (see `_dpo`)."""
    chosen, rejected = scores.ratios()
    return torch.relu(1 - options.beta * log_ratio(chosen, rejected))


def _normalized_margin(scores: PairScores) -> Tensor:
    chosen, rejected = scores.ratios()
    return log_ratio(chosen / scores.chosen_length, rejected / scores.rejected_length)


def _ipo(scores: PairScores, options: MethodOptions) -> Tensor:
    """IPO loss: (h_w / |y_w| - h_l / |y_l| - 1 / (2 beta))^2; h as in `_dpo`, |y| in tokens."""
    return (_normalized_margin(scores) - 1 / (2 * options.beta)) ** 2


def _normalized_dpo(scores: PairScores, options: MethodOptions) -> Tensor:
    """Length-normalized DPO: -log s(beta (h_w / |y_w| - h_l / |y_l|)); symbols as in `_dpo`."""
    return _smoothed(options.beta * _normalized_margin(scores), options.label_smoothing)


def _simpo(scores: PairScores, options: MethodOptions) -> Tensor:
    """SimPO loss: -log sigmoid(beta (S_w / |y_w| - S_l / |y_l|) - gamma).

    S is an answer's summed log-probability and |y| its length in tokens.
    """
    chosen, rejected = scores.means()
    margin = options.beta * log_ratio(chosen, rejected) - options.simpo_gamma
    return _smoothed(margin, options.label_smoothing)


def _cpo(scores: PairScores, options: MethodOptions) -> Tensor:
    """CPO loss: -log sigmoid(beta (S_w - S_l)), where S is an answer's summed log-probability."""
    margin = options.beta * log_ratio(scores.chosen, scores.rejected)
    return _smoothed(margin, options.label_smoothing)


def _orpo(scores: PairScores, options: MethodOptions) -> Tensor:
    """ORPO loss: -beta log sigmoid(log odds ratio); see `odds_ratio`."""
    return -options.beta * F.logsigmoid(odds_ratio(scores))


def odds_ratio(scores: PairScores) -> Tensor:
    """Return ORPO's log odds ratio of the two answers' mean probabilities per token."""
    chosen, rejected = scores.means()
    return log_ratio(chosen, rejected) - (log1mexp(chosen) - log1mexp(rejected))


def log1mexp(a: Tensor) -> Tensor:
    """Return log(1 - exp(a)) for a <= 0, accurate near 0 and far from it.

    For a = 0, a probability that rounds to 1, the result is finite and without gradient.
    """
    a = a.clamp(max=-torch.finfo(a.dtype).tiny)
    near = a > _LOG_HALF
    # `where` evaluates both branches, so the unused one gets an input with a finite gradient.
    close = torch.log(-torch.expm1(a.where(near, _LOG_HALF)))
    far = torch.log1p(-torch.exp(a.where(~near, _LOG_HALF)))
    return close.where(near, far)


METHODS: Mapping[str, LossMethod] = {
    "dpo": LossMethod(
        _dpo,
        "DPO (Rafailov et al. 2023); conservative with label smoothing",
        options=("label_smoothing", "nll_weight"),
    ),
    "robust": LossMethod(
        _robust,
        "robust DPO (Chowdhury et al. 2024)",
        options=("label_smoothing", "nll_weight"),
    ),
    "hinge": LossMethod(_hinge, "hinge loss (SLiC, Zhao et al. 2023)"),
    "ipo": LossMethod(_ipo, "IPO (Azar et al. 2023), with means per token"),
    "sigmoid_norm": LossMethod(
        _normalized_dpo,
        "length-normalized DPO (Lambert et al. 2024)",
        options=("label_smoothing", "nll_weight"),
    ),
    "simpo": LossMethod(
        _simpo,
        "SimPO (Meng et al. 2024)",
        beta=2.0,
        needs_reference=False,
        options=("label_smoothing", "nll_weight", "simpo_gamma"),
    ),
    "orpo": LossMethod(
        _orpo, "ORPO (Hong et al. 2024)", needs_reference=False, options=(), nll_weight=1.0
    ),
    "cpo": LossMethod(
        _cpo,
        "CPO (Xu et al. 2024)",
        needs_reference=False,
        options=("label_smoothing", "nll_weight"),
        nll_weight=1.0,
    ),
    "kto": LossMethod(
        None,
        "KTO (Ethayarajh et al. 2024), for answers marked good or bad",
        options=("desirable_weight", "undesirable_weight"),
    ),
}


def preference_loss(name: str, scores: PairScores, options: MethodOptions) -> Tensor:
    """Return the preference loss of every pair, without the NLL term on the chosen answer.

    Args:
        name: pairwise method, a key of `METHODS`.
        scores: log-probabilities of the chosen and rejected answers.
        options: coefficients.

    Raises:
        ConfigError: the method is unknown, or is for unpaired answers.
    """
    method = METHODS.get(name)
    if method is None or method.loss is None:
        names = [key for key, other in METHODS.items() if other.loss is not None]
        raise ConfigError(
            f"method={name!r} has no loss for preference pairs (supported: "
            f"{', '.join(names)}).{suggest(name, names)}"
        )
    return method.loss(scores, options)


def kto_loss(ratio: Tensor, is_good: Tensor, kl: Tensor, options: MethodOptions) -> Tensor:
    """Return KTO's loss of every answer.

    The loss is w_D (1 - s(beta (h - z))) for good answers, and w_U (1 - s(beta (z - h))) for bad
    answers, with the weights w_D and w_U of `options`.

    Args:
        ratio: log-ratio h of policy and reference.
        is_good: True for answers rated good.
        kl: estimate z of the KL divergence of policy and reference, at least 0, without gradient.
        options: coefficients.

    Shape:
        ratio, is_good: (B,); kl: scalar
    """
    margin = options.beta * (ratio - kl)
    good = options.desirable_weight * (1 - torch.sigmoid(margin))
    bad = options.undesirable_weight * (1 - torch.sigmoid(-margin))
    return torch.where(is_good, good, bad)


def reward_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor, center_coefficient: float = 0.0
) -> Tensor:
    """Return the Bradley-Terry loss of every pair: -log s(r_w - r_l - margin) + c (r_w + r_l)^2.

    Args:
        chosen, rejected: rewards of the answers.
        margin: difference of rewards at which the loss of a pair is log 2.
        center_coefficient: factor c on the term that keeps rewards near 0 (Eisenstein et al. 2023).

    Shape:
        all (B,)
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + center_coefficient * (chosen + rejected) ** 2
