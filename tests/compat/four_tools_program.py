"""Sentiment by prompts: a ModelCenter Bert with LoRA, trained sharded, read by a verbalizer.

Only its import lines differ from those of the four old packages.
"""

import json
import sys
from pathlib import Path

import torch

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.layer import Linear
from bmforge.compat.model_center.model import Bert, BertConfig
from bmforge.compat.opendelta import AutoDeltaModel, LoraModel
from bmforge.compat.openprompt import PromptDataLoader, PromptForClassification
from bmforge.compat.openprompt.data_utils import InputExample
from bmforge.compat.openprompt.plms import load_plm
from bmforge.compat.openprompt.prompts import ManualTemplate, ManualVerbalizer

classes = ["negative", "positive"]
label_words = {"negative": ["bad"], "positive": ["good", "wonderful", "great"]}


class FeedForward(bmt.DistributedModule):
    """A residual layer in BMTrain's style."""

    def __init__(self, dim):
        super().__init__()
        self.scale = bmt.DistributedParameter(torch.full((dim,), 0.5))
        self.dense = Linear(dim, dim, bias=True)

    def forward(self, x, rate):
        return x + rate * self.scale * torch.tanh(self.dense(x))


class Classifier(bmt.DistributedModule):
    """Prompted logits, corrected by a few wrapped blocks and a bias."""

    def __init__(self, prompt_model):
        super().__init__()
        self.prompt_model = prompt_model
        self.bias = bmt.DistributedParameter(torch.zeros(len(classes)))
        self.blocks = bmt.TransformerBlockList(
            [bmt.Block(FeedForward(len(classes)), zero_level=level) for level in (3, 2)]
        )

    def forward(self, batch):
        return self.blocks(self.prompt_model(batch) + self.bias, 0.1)


def read_examples(path):
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    examples = [
        InputExample(guid=n, text_a=row["text"], label=row["label"]) for n, row in enumerate(rows)
    ]
    return examples[bmt.rank() :: bmt.world_size()]


def build(folder, delta=None):
    """The model, its delta and a function that makes data loaders."""
    _plm, tokenizer, _config, WrapperClass = load_plm("bert", folder + "/hf")
    config = BertConfig.from_json_file(folder + "/mc/config.json")
    bert = Bert(config)
    bmt.init_parameters(bert)
    bmt.load(bert, folder + "/mc/pytorch_model.pt")
    if delta is None:
        delta_model = LoraModel(
            bert, modified_modules=["project_q", "project_v"], lora_r=4, backend="bmt"
        )
    else:
        delta_model = AutoDeltaModel.from_finetuned(delta, backbone_model=bert, backend="bmt")
    template = ManualTemplate(text='{"placeholder":"text_a"} It was {"mask"}', tokenizer=tokenizer)
    verbalizer = ManualVerbalizer(classes=classes, label_words=label_words, tokenizer=tokenizer)
    model = Classifier(PromptForClassification(template=template, plm=bert, verbalizer=verbalizer))
    bmt.init_parameters(model.blocks)

    def loader(split, batch_size):
        return PromptDataLoader(
            dataset=read_examples(f"{folder}/{split}.jsonl"),
            tokenizer=tokenizer,
            template=template,
            tokenizer_wrapper_class=WrapperClass,
            batch_size=batch_size,
            max_seq_length=32,
        )

    return model, delta_model, loader


def evaluate(model, data):
    model.eval()
    pd, gt = [], []
    with torch.no_grad():
        for batch in data:
            pd.extend(model(batch).argmax(dim=-1).cpu().tolist())
            gt.extend(batch["label"].tolist())
    pd = bmt.gather_result(torch.tensor(pd).int()).cpu()
    gt = bmt.gather_result(torch.tensor(gt).int()).cpu()
    return (pd == gt).float().mean().item()


def main(folder, batch_size=8, epochs=3):
    bmt.init_distributed(seed=0)
    model, delta_model, loader = build(folder)
    delta_model.freeze_module(exclude=["deltas"], set_state_dict=True)
    delta_model.save_finetuned(folder + "/start")
    bmt.save(model.blocks, folder + "/blocks.pt")
    deltas = [p for p in model.prompt_model.plm.parameters() if p.requires_grad]
    heads = [p for n, p in model.named_parameters() if not n.startswith("prompt_model")]
    adam = bmt.optim.AdamOffloadOptimizer(deltas, weight_decay=1e-2)
    sgd = torch.optim.SGD(heads, lr=0.1)
    schedule = bmt.lr_scheduler.Noam(adam, start_lr=2e-2, warmup_iter=4, end_iter=-1)
    manager = bmt.optim.OptimManager(loss_scale=1024)
    manager.add_optimizer(adam, schedule)
    manager.add_optimizer(sgd)
    loss_func = torch.nn.CrossEntropyLoss(ignore_index=-100)
    losses, norms = [], []
    for epoch in range(epochs):
        model.train()
        for batch in loader("train", batch_size // bmt.world_size()):
            loss = loss_func(model(batch), batch["label"])
            losses.append(bmt.sum_loss(loss).item())
            manager.zero_grad()
            manager.backward(loss)
            norms.append(manager.clip_grad_norm(adam.param_groups, max_norm=1.0).item())
            manager.step()
        bmt.print_rank(f"epoch {epoch} | loss {losses[-1]:.4f} | norm {norms[-1]:.4f}")
    before = evaluate(model, loader("dev", 4))
    delta_model.save_finetuned(folder + "/delta")
    bmt.save(model, folder + "/model.pt")
    reloaded, _, loader = build(folder, folder + "/delta")
    bmt.load(reloaded, folder + "/model.pt", strict=False)
    after = evaluate(reloaded, loader("dev", 4))
    return losses, norms, before, after


if __name__ == "__main__":
    bmt.print_rank(json.dumps(main(sys.argv[1])))
