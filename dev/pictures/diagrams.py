"""Diagrams: how layouts, schedules, checkpoints, adapters and caches work."""

from __future__ import annotations

from canvas import Canvas

COLORS = ("blue", "green", "orange", "purple")
LENGTHS = {"F": 1, "B": 2}  # a backward takes twice as long as a forward


def workflow() -> Canvas:
    """The way from raw text, or a published model, to a server."""
    c = Canvas(
        860,
        250,
        "From raw text or a published model to a server: prepare, pretrain, tune, compress, serve",
    )
    c.box(10, 20, 150, 58, "raw text", "web, PDF, JSONL", "file")
    c.box(200, 20, 170, 58, "prepare", "clean, dedup, tokenize")
    c.box(410, 20, 170, 58, "pretrain", "ZeRO, TP, PP, CP, EP")
    c.box(10, 170, 150, 58, "published model", "Hugging Face, GGUF", "file")
    c.box(200, 170, 170, 58, "your chats", "OpenAI, ShareGPT", "file")
    c.box(205, 96, 160, 58, "tune", "LoRA, QLoRA, full", "blue")
    c.box(410, 96, 170, 58, "compress", "int8, int4, pruning", "blue")
    c.box(620, 96, 220, 58, "run and serve", "from disk, OpenAI's API", "blue")
    c.arrow((160, 49), (198, 49))
    c.arrow((370, 49), (408, 49))
    c.arrow((410, 72), (366, 104))
    c.arrow((120, 170), (203, 136))
    c.arrow((285, 170), (285, 156))
    c.arrow((365, 125), (408, 125))
    c.arrow((580, 125), (618, 125))
    return c


def mesh() -> Canvas:
    """Eight processes: pipeline stages, tensor parallel pairs and ZeRO shards."""
    c = Canvas(
        760,
        330,
        "Eight processes with pp=2, tp=2 and ZeRO over two: each stage has half of the layers, "
        "each tensor parallel pair half of every matrix, each ZeRO shard half of that",
    )
    for stage in range(2):
        x = 20 + stage * 370
        c.rect(x, 40, 350, 250, "file")
        c.text(
            x + 175, 30, f"pipeline stage {stage}: layers {12 * stage}-{12 * stage + 11}", "name"
        )
        for shard in range(2):
            for tp in range(2):
                rank = 4 * stage + 2 * shard + tp
                left, top = x + 15 + tp * 165, 85 + shard * 100
                c.box(left, top, 155, 80, f"rank {rank}", f"shard {shard} of half {tp}", COLORS[tp])
        c.text(x + 92, 72, "tp: columns 0")
        c.text(x + 257, 72, "tp: columns 1")
    c.text(380, 315, "Rows of boxes: different rows of the batch, parameters sharded by ZeRO")
    c.arrow((370, 165), (390, 165))
    return c


def zero() -> Canvas:
    """What each process holds with ZeRO 0, 2 and 3."""
    c = Canvas(
        760,
        270,
        "Memory of four processes: replicated holds everything, ZeRO-2 shards gradients and "
        "optimizer state in a step, ZeRO-3 parameters too",
    )
    parts = (("parameters", "blue"), ("gradients", "green"), ("optimizer state", "orange"))
    shares = {
        "replicated (zero 0)": (1, 1, 1),
        "ZeRO-2, in a step": (1, 0.25, 0.25),
        "ZeRO-3": (0.25, 0.25, 0.25),
    }
    for column, (name, share) in enumerate(shares.items()):
        x = 30 + column * 245
        c.text(x + 105, 24, name, "name")
        for rank in range(4):
            y = 200.0
            for (_, kind), part, height in zip(parts, share, (40, 40, 80), strict=True):
                c.rect(x + rank * 54, y - height * part, 46, height * part, kind, 2)
                y -= height * part
            c.text(x + rank * 54 + 23, 218, f"rank {rank}")
    for number, (name, kind) in enumerate(parts):
        c.rect(190 + number * 140, 236, 14, 14, kind, 2)
        c.text(210 + number * 140, 248, name, at="start")
    return c


def pipeline() -> Canvas:
    """The 1F1B schedule of four stages and six micro-batches."""
    stages, batches, unit = 4, 6, 22
    c = Canvas(
        760,
        250,
        "1F1B schedule of four stages and six micro-batches over time: after the warm-up each "
        "stage alternates a forward and a backward, which takes twice as long",
    )
    for stage in range(stages):
        c.text(16, 52 + stage * 44, f"stage {stage}", at="start")
    for (kind, stage, batch), begin in _begin_times(stages, batches).items():
        x, y, length = 80 + begin * unit, 30 + stage * 44, LENGTHS[kind]
        c.rect(x, y, length * unit - 1, 34, "blue" if kind == "F" else "green", 3)
        c.text(x + length * unit / 2, y + 22, str(batch))
    c.arrow((80, 214), (740, 214))
    c.text(740, 232, "time", at="end")
    for x, kind, name in ((80, "blue", "forward"), (190, "green", "backward")):
        c.rect(x, 222, 14, 14, kind, 2)
        c.text(x + 20, 234, name, at="start")
    return c


def _begin_times(stages: int, batches: int) -> dict[tuple[str, int, int], int]:
    """Return when each (kind, stage, micro-batch) begins: after its inputs and its stage's work."""
    pending = [list(plan) for plan in _one_f_one_b(stages, batches)]
    begins: dict[tuple[str, int, int], int] = {}
    free = [0] * stages
    while any(pending):
        for stage, plan in enumerate(pending):
            if not plan:
                continue
            kind, batch = plan[0]
            before = ("F", stage - 1, batch) if kind == "F" else ("B", stage + 1, batch)
            if before[1] == stages:
                before = ("F", stage, batch)
            if before[1] >= 0 and before not in begins:
                continue
            ready = begins[before] + LENGTHS[before[0]] if before[1] >= 0 else 0
            begins[kind, stage, batch] = max(free[stage], ready)
            free[stage] = begins[kind, stage, batch] + LENGTHS[kind]
            plan.pop(0)
    return begins


def _one_f_one_b(stages: int, batches: int) -> list[list[tuple[str, int]]]:
    """Return the order of forwards and backwards of each stage."""
    plans = []
    for stage in range(stages):
        warm = min(stages - stage, batches)
        order = [("F", batch) for batch in range(warm)]
        for batch in range(batches):
            order.append(("B", batch))
            if warm + batch < batches:
                order.append(("F", warm + batch))
        plans.append(order)
    return plans


def streaming() -> Canvas:
    """Layers that do not fit are read into two slots while others compute."""
    c = Canvas(
        760,
        220,
        "Streaming over time: while layer 0 computes from slot A, layer 1 is read into slot B; "
        "then the slots change roles. Resident layers need no reading",
    )
    rows = (("read: disk", 40), ("slot A", 84), ("slot B", 128), ("compute", 172))
    for name, y in rows:
        c.text(16, y + 22, name, at="start")
        c.line([(100, y + 36), (745, y + 36)])
    for layer in range(6):
        x, kind = 100 + layer * 88, "blue" if layer % 2 == 0 else "orange"
        c.rect(x, 40, 84, 32, kind, 3)
        c.text(x + 42, 61, f"layer {layer}")
        c.rect(x, 84 if layer % 2 == 0 else 128, 172, 32, kind, 3)
        c.text(x + 86, (84 if layer % 2 == 0 else 128) + 21, f"weights of layer {layer}")
        c.rect(x + 88, 172, 80, 32, kind, 3)
        c.text(x + 128, 193, f"layer {layer}")
    c.arrow((100, 26), (745, 26))
    c.text(745, 18, "time", at="end")
    return c


def checkpoint() -> Canvas:
    """How a checkpoint is written: copy, write and hash, manifest, rename, latest."""
    c = Canvas(
        760,
        210,
        "A checkpoint is copied to host memory, written to a temporary directory and hashed, "
        "described by a manifest, renamed, and then named by latest; training goes on meanwhile",
    )
    steps = (
        ("copy", "to host memory", "blue"),
        ("write, hash", "temporary directory", "box"),
        ("manifest", "sizes and SHA-256", "box"),
        ("rename", "to its final name", "green"),
        ("latest", "replaced by a rename", "green"),
    )
    for number, (name, note, kind) in enumerate(steps):
        x = 16 + number * 148
        c.box(x, 60, 136, 62, name, note, kind)
        if number:
            c.arrow((x - 11, 91), (x - 1, 91))
    c.rect(16, 20, 136, 26, "orange", 4)
    c.text(84, 38, "training waits")
    c.rect(164, 20, 580, 26, "gray", 4)
    c.text(454, 38, "training continues")
    c.text(310, 150, "killed before the rename: the older checkpoint is used")
    c.text(310, 168, "what is left of the temporary directory is removed at the next start")
    c.text(668, 150, "killed later: this one is used")
    c.line([(164, 134), (456, 134)])
    c.line([(608, 134), (744, 134)])
    return c


def adapter() -> Canvas:
    """LoRA: two small trained matrices next to a frozen one, merged into one at the end."""
    c = Canvas(
        760,
        250,
        "LoRA adds the product of two small trained matrices to a frozen weight; merging adds "
        "alpha over r times B A to the weight, and the layer has its old shape again",
    )
    c.text(190, 24, "training", "name")
    c.box(150, 190, 80, 34, "x", kind="file")
    c.box(40, 80, 130, 80, "W", "frozen: 16, 8 or 4 bits", "gray")
    c.box(220, 124, 120, 40, "A", "r x in, trained", "blue")
    c.box(220, 66, 120, 40, "B", "out x r, trained", "blue")
    c.arrow((160, 188), (105, 162))
    c.arrow((220, 188), (280, 166))
    c.arrow((280, 123), (280, 108))
    c.arrow((105, 78), (180, 48))
    c.arrow((280, 64), (206, 48))
    c.text(193, 48, "+", "name")
    c.arrow((400, 120), (480, 120))
    c.text(440, 108, "merge")
    c.text(620, 24, "serving", "name")
    c.box(510, 80, 220, 80, "W + (alpha / r) B A", "one matrix of the old shape", "green")
    c.box(580, 190, 80, 34, "x", kind="file")
    c.arrow((620, 188), (620, 162))
    c.arrow((620, 78), (620, 48))
    return c


def paged_cache() -> Canvas:
    """Block tables of two requests that share the pages of a common prefix."""
    c = Canvas(
        760,
        270,
        "Two requests with the same system prompt: their block tables name the same two pages of "
        "16 tokens for the shared prefix and separate pages for the rest",
    )
    c.text(120, 24, "block tables", "name")
    c.text(560, 24, "pages of the KV cache, 16 tokens each", "name")
    tables = {"request 1": (3, 7, 1), "request 2": (3, 7, 5, 8)}
    shared = {3: "blue", 7: "blue", 1: "green", 5: "orange", 8: "orange"}
    for row, (name, pages) in enumerate(tables.items()):
        y = 66 + row * 110
        c.text(20, y - 8, name, at="start")
        for place, page in enumerate(pages):
            c.rect(20 + place * 48, y, 44, 32, shared[page], 3)
            c.text(42 + place * 48, y + 21, str(page))
    for page in range(12):
        x, y = 390 + page % 4 * 88, 44 + page // 4 * 66
        c.rect(x, y, 80, 52, shared.get(page, "box"), 3)
        c.text(x + 40, y + 22, f"page {page}")
        users = {"blue": "both", "green": "request 1", "orange": "request 2"}
        c.text(x + 40, y + 40, users.get(shared.get(page, ""), "free"))
    c.arrow((240, 84), (376, 84))
    c.arrow((240, 190), (376, 190))
    c.text(380, 255, "A page is freed when no request and no cached prefix uses it")
    return c


def data_parallel_flow() -> Canvas:
    """How text becomes batches: documents, token store, packed rows."""
    c = Canvas(
        760,
        190,
        "Documents are tokenized into one token store, cut into rows of equal length, shuffled by "
        "the seed, and dealt to the processes; the order does not depend on their number",
    )
    c.box(16, 50, 110, 80, "documents", "cleaned text", "file")
    c.box(166, 50, 120, 80, "token store", ".bin and .idx", "blue")
    c.box(326, 50, 120, 80, "rows", "seq_len tokens", "box")
    c.box(486, 50, 120, 80, "order", "seed, epoch", "box")
    for left, right in ((126, 164), (286, 324), (446, 484)):
        c.arrow((left, 90), (right, 90))
    for rank in range(3):
        y = 20 + rank * 54
        c.box(660, y, 84, 42, f"rank {rank}", kind="green")
        c.arrow((606, 90), (658, y + 21))
    c.text(206, 156, "bmforge prepare")
    c.text(466, 156, "DataLoader")
    return c


DIAGRAMS = {
    "workflow": workflow,
    "mesh": mesh,
    "zero": zero,
    "pipeline_schedule": pipeline,
    "streaming": streaming,
    "checkpoint": checkpoint,
    "adapter_merge": adapter,
    "paged_cache": paged_cache,
    "data_order": data_parallel_flow,
}
