"""ModelCenter's example programs in our own words: their calls, in their order, few steps."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.dataset import CPM1_Dataset_Merge, DistributedDataLoader
from bmforge.compat.model_center.generation.t5 import T5BeamSearch


def start(model, args):
    """Optimizer, schedule and manager, as every example makes them."""
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=1e-2)
    lr_scheduler = bmt.lr_scheduler.NoDecay(
        optimizer, start_lr=args["lr"], warmup_iter=0, end_iter=-1, num_iter=0
    )
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    optim_manager = bmt.optim.OptimManager(loss_scale=1024, loss_scale_steps=100)
    optim_manager.add_optimizer(optimizer, lr_scheduler)

    def step(loss):
        global_loss = bmt.sum_loss(loss).item()
        optim_manager.zero_grad()
        optim_manager.backward(loss)
        optim_manager.clip_grad_norm(optimizer.param_groups, 1.0, norm_type=2)
        optim_manager.step()
        return global_loss

    return loss_func, step


def finetune_llama(model, dataset, verbalizer, args):
    """finetune_llama.py: words of the answers, out of logits nobody asked for by name."""
    loss_func, step = start(model, args)
    losses = []
    for _epoch in range(args["epochs"]):
        model.train()
        for data in DistributedDataLoader(dataset["train"], batch_size=2, shuffle=False):
            logits = model(data["input_ids"], data["input_length"]).logits
            logits = logits.index_select(dim=-1, index=verbalizer)
            logits = logits[torch.where(data["index"] == 1)]
            losses.append(step(loss_func(logits, data["labels"])))
    model.eval()
    with torch.no_grad():
        found = []
        for data in DistributedDataLoader(dataset["dev"], batch_size=2, shuffle=False):
            logits = model(data["input_ids"], data["input_length"]).logits
            logits = logits.index_select(dim=-1, index=verbalizer)
            found += logits[torch.where(data["index"] == 1)].argmax(dim=-1).tolist()
    return losses, bmt.gather_result(torch.tensor(found).int()).cpu().tolist()


def finetune_gpt2(model, dataset, verbalizer, args):
    """finetune_gpt2.py: the text and the answer's word."""
    loss_func, step = start(model, args)
    losses = []
    for _epoch in range(args["epochs"]):
        for data in DistributedDataLoader(dataset["train"], batch_size=2, shuffle=False):
            logits = model(data["input_ids"], data["input_length"], output_logits=True).logits
            loss = loss_func(logits.view(-1, logits.shape[-1]), data["targets"].view(-1))
            logits = logits.index_select(dim=-1, index=verbalizer)
            logits = logits[torch.where(data["index"] == 1)]
            losses.append(step(loss + loss_func(logits, data["labels"])))
    return losses


def finetune_t5_squad(model, tokenizer, dataset, args):
    """finetune_t5_squad.py: answers are learned by name, and written by a search."""
    loss_func, step = start(model, args)
    losses = []
    for _epoch in range(args["epochs"]):
        model.train()
        for data in DistributedDataLoader(dataset["train"], batch_size=1, shuffle=False):
            logits = model(
                input_ids=data["input_ids"],
                attention_mask=data["attention_mask"],
                decoder_input_ids=data["decoder_input_ids"],
                decoder_attention_mask=data["decoder_attention_mask"],
            ).logits
            targets = data["targets"]
            losses.append(step(loss_func(logits.view(-1, logits.shape[-1]), targets.view(-1))))

    def collate_fn(data):
        return {"inputs": [d["inputs"] for d in data], "targets": [d["targets"] for d in data]}

    model.eval()
    beam_search = T5BeamSearch(model=model, tokenizer=tokenizer)
    written = []
    with torch.no_grad():
        for data in DataLoader(dataset["dev"], batch_size=2, collate_fn=collate_fn):
            written += beam_search.generate(data["inputs"], max_length=args["max_decoder_length"])
    return losses, written


def finetune_cpm1(model, dataset, verbalizer, args):
    """finetune_cpm1.py: by position, and the logits themselves come back."""
    loss_func, step = start(model, args)
    losses = []
    for _epoch in range(args["epochs"]):
        for data in DistributedDataLoader(dataset, batch_size=2, shuffle=False):
            logits = model(
                data["input_tokens"],
                data["input_length"],
                data["input_context"],
                data["input_span"],
            )
            logits = logits.index_select(dim=-1, index=verbalizer)
            logits = logits[torch.where(data["index"] == 1)]
            losses.append(step(loss_func(logits, data["targets"])))
    return losses


def finetune_cpm2(model, dataset, verbalizer, args):
    """finetune_cpm2.py: likewise."""
    loss_func, step = start(model, args)
    losses = []
    for _epoch in range(args["epochs"]):
        for data in DistributedDataLoader(dataset, batch_size=2, shuffle=False):
            inputs = (data["enc_input"], data["enc_length"], data["dec_input"], data["dec_length"])
            logits = model(*inputs).index_select(dim=-1, index=verbalizer)
            logits = logits[torch.where(data["index"] == 1)]
            losses.append(step(loss_func(logits, data["targets"])))
    return losses


def pretrain_cpm1(model, corpus, args):
    """pretrain_cpm1.py: pieces behind one another in a row, each a span with context of its own."""
    loss_func, step = start(model, args)
    dataset, width, losses = CPM1_Dataset_Merge(corpus, args["max_length"]), args["max_length"], []
    for _step in range(args["epochs"]):
        ctx = torch.zeros(1, width, dtype=torch.long)
        tgt = torch.full((1, width), -100)
        context = torch.zeros(1, width, dtype=torch.bool)
        span = torch.zeros(1, width + 1, dtype=torch.long)
        end = 0
        for index in range(len(dataset)):
            ids, target, length, shown = dataset[index]
            ctx[0, end : end + length] = torch.from_numpy(ids.astype("int64"))
            tgt[0, end : end + length] = torch.from_numpy(np.asarray(target).astype("int64"))
            context[0, end : end + length] = torch.from_numpy(shown)
            end += length
            span[0, end] = 1
        span = torch.cumsum(span, dim=-1)[:, :-1]
        logits = model(ctx, torch.tensor([end]), context, span)
        losses.append(step(loss_func(logits.view(-1, logits.size(-1)), tgt.view(-1))))
    return losses
