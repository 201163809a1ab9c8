"""Routers of split MLPs: initialized from the experts' rows and trained on feature activity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.compress.moefy.config import MoEfyConfig
from bmforge.nn.router import RouterKind, TwoLayerRouter, build_router

__all__ = ["captured_share", "make_router", "train_router_"]


def make_router(rows: Tensor, groups: Tensor, config: MoEfyConfig) -> nn.Module:
    """Create a router that compares tokens with the mean direction of each expert's rows.

    Args:
        rows: rows of the MLP's first projection.
        groups: expert index of each row; -1 for a row of no expert.
        config: MoEfication settings, including the router type.

    Shape:
        rows: (F, D); groups: (F,)
    """
    groups = groups.to(rows.device)
    unit, inside = F.normalize(rows.detach().float(), dim=-1), groups >= 0
    sums = unit.new_zeros(config.num_experts, rows.shape[1])
    sums.index_add_(0, groups[inside], unit[inside])
    centers = sums / torch.bincount(groups[inside], minlength=config.num_experts)[:, None]
    kind: RouterKind = "two_layer" if config.router == "two_layer" else "linear"
    router = build_router(kind, rows.shape[1], config.num_experts).to(rows.device)
    with torch.no_grad():
        if isinstance(router, TwoLayerRouter):
            router.first.weight.copy_(centers)
            router.second.weight.copy_(torch.eye(config.num_experts))
        else:
            router.weight.copy_(centers)  # type: ignore[operator,union-attr]
    return router


def train_router_(
    router: nn.Module, tokens: Tensor, activity: Tensor, config: MoEfyConfig, per_token: int
) -> float:
    """Train a router to predict active experts; return the best epoch's captured activity.

    Args:
        router: router made by `make_router`.
        tokens: inputs of the MLP.
        activity: activity of every expert on every token.
        config: training settings.
        per_token: number of active experts per token, used to select the best epoch.

    Shape:
        tokens: (M, D); activity: (M, E)

    Source: Zhang et al., "MoEfication" (2022), and BMCook: binary cross-entropy, Adam, the best
    epoch on a held-out tenth. They normalize the target by the largest activity of a batch; this
    implementation normalizes per token, so that all tokens have the same weight.
    """
    generator = torch.Generator().manual_seed(config.seed)
    tokens = tokens.float()
    target = activity / activity.amax(1, keepdim=True).clamp(min=1e-30)
    order = torch.randperm(len(tokens), generator=generator).to(tokens.device)
    num_test = max(1, len(tokens) // 10)
    test, train = order[:num_test], order[num_test:] if len(tokens) > num_test else order
    best = captured_share(router(tokens[test]), activity[test], per_token)
    best_values = {name: p.detach().clone() for name, p in router.named_parameters()}
    if config.router == "similarity":
        return best
    with torch.enable_grad():
        optimizer = torch.optim.Adam(router.parameters(), lr=config.lr)
        for _ in range(config.epochs):
            shuffled = train[torch.randperm(len(train), generator=generator).to(train.device)]
            for index in shuffled.split(config.batch_size):
                logits = router(tokens[index])
                loss = F.binary_cross_entropy_with_logits(logits, target[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                now = captured_share(router(tokens[test]), activity[test], per_token)
            if now > best:
                best = now
                best_values = {name: p.detach().clone() for name, p in router.named_parameters()}
    with torch.no_grad():
        for name, parameter in router.named_parameters():
            parameter.copy_(best_values[name])
    return best


@torch.no_grad()
def captured_share(scores: Tensor, activity: Tensor, per_token: int) -> float:
    """Return the fraction of the total activity that belongs to the top-scoring experts.

    Shape:
        scores, activity: (M, E)
    """
    chosen = scores.topk(per_token, dim=1).indices
    return float(activity.gather(1, chosen).sum() / activity.sum().clamp(min=1e-30))
