"""ModelCenter's example programs in our own words: their calls, in their order, few steps."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch.utils.data import DataLoader

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.dataset import (
    CPM1_Dataset_Merge,
    CPM2_Dataset,
    DistributedDataLoader,
    MMapIndexedDataset,
)
from bmforge.compat.model_center.generation.t5 import T5BeamSearch
from bmforge.compat.model_center.utils import print_inspect


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


def learn(model, dataset, loss_of, step, args, batch_size=2):
    """All epochs in the rows' order; the losses."""
    losses = []
    for _epoch in range(args["epochs"]):
        model.train()
        for data in DistributedDataLoader(dataset, batch_size=batch_size, shuffle=False):
            losses.append(step(loss_of(data)))
    return losses


def evaluate(model, dataset, answers, labels="labels"):
    """What is found for the other split on all processes, and what is right."""
    model.eval()
    found, wanted = [], []
    with torch.no_grad():
        for data in DistributedDataLoader(dataset, batch_size=2, shuffle=False):
            found += answers(data).argmax(dim=-1).cpu().tolist()
            wanted += data[labels].cpu().tolist()
    gathered = (bmt.gather_result(torch.tensor(each).int()) for each in (found, wanted))
    return tuple(each.cpu().tolist() for each in gathered)


def pick(logits, data, verbalizer):
    """The answers' words, where they are asked for."""
    logits = logits.index_select(dim=-1, index=verbalizer)
    return logits[torch.where(data["index"] == 1)]


def finetune_llama(model, dataset, verbalizer, args):
    """finetune_llama.py: words of the answers, out of logits nobody asked for by name."""
    loss_func, step = start(model, args)

    def answers(data):
        logits = model(data["input_ids"], data["input_length"]).logits
        return pick(logits, data, verbalizer)

    def loss_of(data):
        return loss_func(answers(data), data["labels"])

    losses = learn(model, dataset["train"], loss_of, step, args)
    return losses, *evaluate(model, dataset["dev"], answers)


def finetune_gpt2(model, dataset, verbalizer, args):
    """finetune_gpt2.py: the text and the answer's word."""
    loss_func, step = start(model, args)

    def loss_of(data):
        logits = model(data["input_ids"], data["input_length"], output_logits=True).logits
        loss = loss_func(logits.view(-1, logits.shape[-1]), data["targets"].view(-1))
        return loss + loss_func(pick(logits, data, verbalizer), data["labels"])

    return learn(model, dataset["train"], loss_of, step, args)


def finetune_gptj(model, dataset, verbalizer, args):
    """finetune_gptj.py: the answer's word alone, and what is found in the other split."""
    loss_func, step = start(model, args)

    def answers(data):
        logits = model(data["input_ids"], data["input_length"], output_logits=True).logits
        return pick(logits, data, verbalizer)

    def loss_of(data):
        return loss_func(answers(data), data["labels"])

    losses = learn(model, dataset["train"], loss_of, step, args)
    return losses, *evaluate(model, dataset["dev"], answers)


def finetune_t5(model, dataset, verbalizer, args):
    """finetune_t5_superglue.py, finetune_t5-v1_1.py and finetune_mt5.py, which are one program."""
    loss_func, step = start(model, args)

    def answers(data):
        inputs = (data["enc_input"], data["enc_length"], data["dec_input"], data["dec_length"])
        return pick(model(*inputs, output_logits=True).logits, data, verbalizer)

    def loss_of(data):
        return loss_func(answers(data), data["targets"])

    losses = learn(model, dataset["train"], loss_of, step, args)
    return losses, *evaluate(model, dataset["dev"], answers, "targets")


def finetune_t5_squad(model, tokenizer, dataset, args):
    """finetune_t5_squad.py: answers are learned by name, and written by a search."""
    loss_func, step = start(model, args)

    def loss_of(data):
        logits = model(
            input_ids=data["input_ids"],
            attention_mask=data["attention_mask"],
            decoder_input_ids=data["decoder_input_ids"],
            decoder_attention_mask=data["decoder_attention_mask"],
        ).logits
        return loss_func(logits.view(-1, logits.shape[-1]), data["targets"].view(-1))

    def collate_fn(data):
        return {"inputs": [d["inputs"] for d in data], "targets": [d["targets"] for d in data]}

    losses = learn(model, dataset["train"], loss_of, step, args, batch_size=1)
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

    def loss_of(data):
        names = ("input_tokens", "input_length", "input_context", "input_span")
        logits = model(*(data[name] for name in names))
        return loss_func(pick(logits, data, verbalizer), data["targets"])

    return learn(model, dataset, loss_of, step, args)


def finetune_cpm2(model, dataset, verbalizer, args):
    """finetune_cpm2.py: likewise."""
    loss_func, step = start(model, args)

    def loss_of(data):
        names = ("enc_input", "enc_length", "dec_input", "dec_length")
        logits = model(*(data[name] for name in names))
        return loss_func(pick(logits, data, verbalizer), data["targets"])

    return learn(model, dataset, loss_of, step, args)


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


class ShuffleDataset(torch.utils.data.IterableDataset):
    """pretrain_cpm2.py's own: pairs in a shuffled order, every process its part of each stride."""

    def __init__(self, dataset, rank, world_size, shuffle_idx, st=0):
        self.rank, self.world_size = rank, world_size
        self.shuffle_idx, self.dataset = shuffle_idx, dataset
        self.st, self.end = st, len(shuffle_idx)

    def __iter__(self):
        while self.st < self.end:
            it = self.dataset[int(self.shuffle_idx[self.st + self.rank])]
            if it is not None:
                yield it
            self.st += self.world_size


def pretrain_cpm2(model, folder, shuf_idx, args):
    """pretrain_cpm2.py: a corpus of sources and one of targets; logits come by position."""
    loss_func, step = start(model, args)
    dataset = CPM2_Dataset(
        MMapIndexedDataset(f"{folder}/document_context"),
        MMapIndexedDataset(f"{folder}/document_target"),
        max_source_length=args["max_encoder_length"],
        max_target_length=args["max_decoder_length"],
    )
    shuf_data = ShuffleDataset(dataset, bmt.rank(), bmt.world_size(), shuf_idx)
    losses = []
    for data in DataLoader(shuf_data, batch_size=args["batch_size"]):
        assert len(data["ctx"]) == args["batch_size"]
        enc_input, enc_length = data["ctx"].int(), data["len_ctx"].int()
        dec_input = torch.clamp(data["tgt"].int()[:, :-1], 0)
        targets, dec_length = data["tgt"].long()[:, 1:], data["len_tgt"].int()
        logits = model(enc_input, enc_length, dec_input, dec_length)
        batch, seq_len, vocab_out_size = logits.size()
        logits = logits.view(batch * seq_len, vocab_out_size)
        losses.append(step(loss_func(logits, targets.reshape(batch * seq_len))))
        print_inspect(model, "*")
    bmt.save(model, os.path.join(args["save"], args["save_name"] + ".pt"))
    return losses
