"""How well duplicates are found: planted pairs, datatrove's clusters, spans, planted examples.

``python benchmarks/dedup_quality.py NEWS.csv POEMS.jsonl``; NEWS.csv has the columns class, title
and text, POEMS.jsonl the field text. Where datatrove is installed, its clusters and
CPU seconds too.
"""

from __future__ import annotations

import csv
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.data.dedup.minhash import DedupConfig, MinHasher
from bmforge.data.dedup.near import find_near_duplicates, read_sketches
from bmforge.data.dedup.overlap import OverlapIndex, find_overlap
from bmforge.data.dedup.spans import cut_spans, find_repeated_spans
from bmforge.data.dedup.tokens import split_tokens
from bmforge.data.sources.document import Document

BINS = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


def similarity(first: list[str], second: list[str]) -> float:
    """Return the Jaccard similarity of the sets of 5-grams."""
    one, other = ({tuple(t[i : i + 5]) for i in range(len(t) - 4)} for t in (first, second))
    return len(one & other) / len(one | other)


def plant(texts: list[str], draw: random.Random, joiner: str) -> list[tuple[Document, Document]]:
    """Return pairs of a text and its copy with a share of its tokens replaced by others'."""
    vocabulary = sorted({token for text in texts for token in split_tokens(text)})
    pairs = []
    for number, text in enumerate(texts):
        tokens = split_tokens(text)
        if len(set(tokens)) < 40:
            continue
        copy = list(tokens)
        for _ in range(draw.randrange(1 + len(tokens) // 10)):
            copy[draw.randrange(len(copy))] = draw.choice(vocabulary)
        one, other = joiner.join(tokens), joiner.join(copy)
        pairs.append((Document(one, "f", f"{number}a"), Document(other, "f", f"{number}b")))
    return pairs


def measure_pairs(name: str, texts: list[str], joiner: str) -> None:
    """Print, by similarity, how many planted pairs are candidates and how many are dropped."""
    pairs = plant(texts, random.Random(0), joiner)
    documents = [one for pair in pairs for one in pair]
    found = find_near_duplicates(lambda: documents)
    pairwise_found = np.array([any(d.id in found.survivor for d in pair) for pair in pairs])
    own = len(pairs)
    for seed in range(1, 6):  # more pairs, whether they share a band alone
        pairs += plant(texts, random.Random(seed), joiner)
    hasher = MinHasher(DedupConfig())
    keys = read_sketches([one for pair in pairs for one in pair], hasher).keys
    candidates = (keys[::2] == keys[1::2]).any(axis=1)
    values = np.array([similarity(*(split_tokens(d.text) for d in pair)) for pair in pairs])
    print(f"{name}: {len(pairs)} pairs, {own} of them whose clusters are made")
    print("similarity, pairs, candidates, by the formula, dropped")
    for low, high in pairwise(BINS):
        chosen = (values >= low) & (values < high if high < 1 else values <= 1)
        if chosen.any():
            curve = np.mean(1 - (1 - values[chosen] ** hasher.rows) ** hasher.bands)
            print(
                f"{low:.2f}-{high:.2f} {chosen.sum()} {candidates[chosen].mean():.4f} "
                f"{curve:.4f} {pairwise_found[chosen[:own]].mean():.4f}"
            )
    above = values[:own] >= 0.85
    print(f"recall from 0.85 on: {pairwise_found[above].mean():.4f}")


def datatrove_clusters(texts: Sequence[str]) -> tuple[Any, list[list[int]], float]:
    """Return datatrove's signature step, its clusters of texts, and its CPU seconds to the first.

    Its four steps run with the default settings, in one process.
    """
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )

    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        signature = MinhashDedupSignature(output_folder=f"{folder}/signatures")
        rows = [Theirs(text=text, id=str(number)) for number, text in enumerate(texts)]
        signature.run(iter(rows), rank=0, world_size=1)
        signed = time.process_time() - begin
        buckets = signature.config.num_buckets
        for rank in range(buckets):
            MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets").run(
                None, rank=rank, world_size=buckets
            )
        MinhashDedupCluster(f"{folder}/buckets", f"{folder}/clusters", save_cluster_id=True).run()
        clusters: dict[int, list[int]] = {}
        for path in Path(folder, "clusters").glob("*.clusters"):
            for document, cluster in np.fromfile(path, "<u4").reshape(-1, 2).tolist():
                clusters.setdefault(cluster, []).append(document)
    return signature, list(clusters.values()), signed


def measure_clusters(documents: list[Document]) -> None:
    """Print whether clusters are datatrove's with its n-grams, and the CPU seconds of both."""
    try:
        import datatrove.pipeline.dedup  # noqa: F401
    except ImportError:
        print("datatrove is not installed: its clusters are not compared")
        return
    begin = time.process_time()
    signature, clusters, signed = datatrove_clusters([one.text for one in documents])
    spent = time.process_time() - begin
    theirs = [{documents[number].id for number in cluster} for cluster in clusters]

    def shingle(text: str) -> np.ndarray:
        return np.unique(signature.get_shingles(text).ravel())

    found = find_near_duplicates(lambda: documents, DedupConfig(verify=False), shingle=shingle)
    ours: dict[str, set[str]] = {}
    for gone, kept in found.survivor.items():
        ours.setdefault(kept, {kept}).add(gone)
    same = set(map(frozenset, ours.values())) == set(map(frozenset, theirs))
    print(f"datatrove's clusters: {len(theirs)}, ours with its n-grams: {len(ours)}, same: {same}")
    begin = time.process_time()
    own = find_near_duplicates(lambda: documents)
    print(
        f"CPU seconds on {sum(len(d.text.encode()) for d in documents) / 1e6:.2f} MB: datatrove "
        f"{spent:.1f} ({signed:.1f} for signatures), ours {time.process_time() - begin:.2f} with "
        f"{own.compared} exact comparisons"
    )


def measure_spans(text: str, size: int = 200_000) -> None:
    """Compare spans with a search of every run among all earlier ones."""
    text = text[:size]
    third = len(text) // 3
    parts = [text[:third], text[third : 2 * third] + text[1000:4000], text[2 * third :]]
    documents = [Document(part, "f", str(number)) for number, part in enumerate(parts)]
    found = find_repeated_spans(lambda: documents, min_tokens=50)
    seen: list[tuple[str, ...]] = []
    buckets: dict[str, list[int]] = {}  # by first token, or the search takes hours
    same = True
    for document in documents:
        tokens = split_tokens(document.text)
        covered: set[int] = set()
        for at in range(len(tokens) - 49):
            run = tuple(tokens[at : at + 50])
            if any(seen[number] == run for number in buckets.get(run[0], ())):
                covered |= set(range(at, at + 50))
            buckets.setdefault(run[0], []).append(len(seen))
            seen.append(run)
        left = [token for number, token in enumerate(tokens) if number not in covered]
        same &= split_tokens(cut_spans(document.text, found.get(document.id, []))) == left
    print(f"spans of {len(text)} characters, {len(found)} documents with some; same: {same}")


def measure_examples(news: list[str], poems: list[str]) -> None:
    """Plant 200 examples of each language, and look for 2,000 that are not there."""
    for name, texts in (("news", news), ("poems", poems)):
        index = OverlapIndex((str(number), text) for number, text in enumerate(texts[:200]))
        hosts = texts[2000:4000]
        hits = sum(
            any(one.example == index.names[k] for one in find_overlap(planted, index))
            for k, planted in enumerate(
                f"{hosts[k]}\n{texts[int(index.names[k])].upper()}\n{hosts[-k]}"
                for k in range(len(index.names))
            )
        )
        wrong = []
        for host in hosts:
            wrong += find_overlap(host, index)
        print(
            f"{name}: {hits} of {len(index.names)} planted examples found ({index.too_short} too "
            f"short); {len(wrong)} in 2,000 texts without"
        )
        for one in wrong[:3]:
            print("   also there:", texts[int(one.example)][:80].replace("\n", " "))


def main(news_path: str, poems_path: str) -> None:
    """Measure everything, and print it."""
    with open(news_path, encoding="utf-8", newline="") as file:
        news = [f"{title}\n{text}" for _, title, text in csv.reader(file)]
    lines = Path(poems_path).read_text("utf-8").splitlines()
    poems = [json.loads(line)["text"] for line in lines]
    measure_pairs("English", [" ".join(news[i : i + 4]) for i in range(0, len(news), 4)], " ")
    measure_pairs("Chinese", ["\n".join(poems[i : i + 4]) for i in range(0, 8000, 4)], "")
    documents = [Document(text, "news", str(number)) for number, text in enumerate(news)]
    documents += [one for pair in plant(news[::5], random.Random(1), " ") for one in pair]
    measure_clusters(documents)
    measure_spans("\n".join(news))
    measure_examples(news, poems)


if __name__ == "__main__":
    main(*sys.argv[1:])
