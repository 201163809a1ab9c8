"""Recall and precision of deduplication on planted duplicates, and agreement with datatrove.

    python -m benchmarks.data.deduplication NEWS.csv POEMS.jsonl

Measures the share of planted near duplicates that are found, by similarity; the agreement with
datatrove's clusters and the CPU time of both, if datatrove is installed; repeated spans, compared
with an exhaustive search; and planted evaluation examples. NEWS.csv has the columns class, title
and text, POEMS.jsonl the field text.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import make_parser
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


def plant(
    texts: list[str], generator: random.Random, joiner: str
) -> list[tuple[Document, Document]]:
    """Return pairs of a text and a copy in which some tokens are replaced."""
    vocabulary = sorted({token for text in texts for token in split_tokens(text)})
    pairs = []
    for number, text in enumerate(texts):
        tokens = split_tokens(text)
        if len(set(tokens)) < 40:
            continue
        copy = list(tokens)
        for _ in range(generator.randrange(1 + len(tokens) // 10)):
            copy[generator.randrange(len(copy))] = generator.choice(vocabulary)
        one, other = joiner.join(tokens), joiner.join(copy)
        pairs.append((Document(one, "f", f"{number}a"), Document(other, "f", f"{number}b")))
    return pairs


def measure_pairs(name: str, texts: list[str], joiner: str) -> None:
    """Print by similarity the share of planted pairs that are candidates, and that are dropped."""
    pairs = plant(texts, random.Random(0), joiner)
    documents = [one for pair in pairs for one in pair]
    found = find_near_duplicates(lambda: documents)
    pairwise_found = np.array([any(d.id in found.survivor for d in pair) for pair in pairs])
    own = len(pairs)
    for seed in range(1, 6):  # more pairs, for the candidates alone
        pairs += plant(texts, random.Random(seed), joiner)
    hasher = MinHasher(DedupConfig())
    keys = read_sketches([one for pair in pairs for one in pair], hasher).keys
    candidates = (keys[::2] == keys[1::2]).any(axis=1)
    values = np.array([similarity(*(split_tokens(d.text) for d in pair)) for pair in pairs])
    print(f"{name}: {len(pairs)} pairs, of which {own} are clustered")
    print("similarity, pairs, candidates, expected candidates, dropped")
    for low, high in pairwise(BINS):
        chosen = (values >= low) & (values < high if high < 1 else values <= 1)
        if chosen.any():
            curve = np.mean(1 - (1 - values[chosen] ** hasher.rows) ** hasher.bands)
            print(
                f"{low:.2f}-{high:.2f} {chosen.sum()} {candidates[chosen].mean():.4f} "
                f"{curve:.4f} {pairwise_found[chosen[:own]].mean():.4f}"
            )
    above = values[:own] >= 0.85
    print(f"recall at a similarity of at least 0.85: {pairwise_found[above].mean():.4f}")


def datatrove_clusters(texts: Sequence[str]) -> tuple[Any, list[list[int]], float]:
    """Run datatrove's four steps with the default settings, in one process.

    Returns:
        The signature step, the clusters of texts, and the CPU seconds of the signatures.
    """
    from datatrove.data import Document as DatatroveDocument
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )

    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        signature = MinhashDedupSignature(output_folder=f"{folder}/signatures")
        rows = [DatatroveDocument(text=text, id=str(number)) for number, text in enumerate(texts)]
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
    """Compare the clusters with datatrove's, with its n-grams, and the CPU time of both."""
    try:
        import datatrove.pipeline.dedup  # noqa: F401
    except ImportError:
        print("datatrove is not installed, so the clusters are not compared")
        return
    begin = time.process_time()
    signature, clusters, signed = datatrove_clusters([one.text for one in documents])
    spent = time.process_time() - begin
    expected = [{documents[number].id for number in cluster} for cluster in clusters]

    def shingle(text: str) -> np.ndarray:
        return np.unique(signature.get_shingles(text).ravel())

    found = find_near_duplicates(lambda: documents, DedupConfig(verify=False), shingle=shingle)
    clusters_by_survivor: dict[str, set[str]] = {}
    for dropped, survivor in found.survivor.items():
        clusters_by_survivor.setdefault(survivor, {survivor}).add(dropped)
    actual = clusters_by_survivor.values()
    same = set(map(frozenset, actual)) == set(map(frozenset, expected))
    print(f"clusters: datatrove {len(expected)}, bmforge {len(actual)}, equal: {same}")
    begin = time.process_time()
    duplicates = find_near_duplicates(lambda: documents)
    print(
        f"CPU seconds on {sum(len(d.text.encode()) for d in documents) / 1e6:.2f} MB: datatrove "
        f"{spent:.1f} ({signed:.1f} for signatures), bmforge {time.process_time() - begin:.2f} "
        f"with {duplicates.compared} exact comparisons"
    )


def measure_spans(text: str, size: int = 200_000) -> None:
    """Compare repeated spans with an exhaustive search."""
    text = text[:size]
    third = len(text) // 3
    parts = [text[:third], text[third : 2 * third] + text[1000:4000], text[2 * third :]]
    documents = [Document(part, "f", str(number)) for number, part in enumerate(parts)]
    found = find_repeated_spans(lambda: documents, min_tokens=50)
    runs: list[tuple[str, ...]] = []
    buckets: dict[str, list[int]] = {}  # by first token, because the full search takes hours
    same = True
    for document in documents:
        tokens = split_tokens(document.text)
        covered: set[int] = set()
        for at in range(len(tokens) - 49):
            run = tuple(tokens[at : at + 50])
            if any(runs[number] == run for number in buckets.get(run[0], ())):
                covered |= set(range(at, at + 50))
            buckets.setdefault(run[0], []).append(len(runs))
            runs.append(run)
        left = [token for number, token in enumerate(tokens) if number not in covered]
        same &= split_tokens(cut_spans(document.text, found.get(document.id, []))) == left
    print(f"{len(text)} characters, {len(found)} documents with repeated spans; equal: {same}")


def measure_examples(news: list[str], poems: list[str]) -> None:
    """Plant 200 examples of each language, and search 2,000 texts without examples."""
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
            f"short); {len(wrong)} false hits in 2,000 texts"
        )
        for one in wrong[:3]:
            print("   false hit:", texts[int(one.example)][:80].replace("\n", " "))


def main() -> None:
    """Run all measurements."""
    parser = make_parser(__doc__)
    parser.add_argument("news", type=Path)
    parser.add_argument("poems", type=Path)
    options = parser.parse_args()
    with options.news.open(encoding="utf-8", newline="") as file:
        news = [f"{title}\n{text}" for _, title, text in csv.reader(file)]
    lines = options.poems.read_text("utf-8").splitlines()
    poems = [json.loads(line)["text"] for line in lines]
    measure_pairs("English", [" ".join(news[i : i + 4]) for i in range(0, len(news), 4)], " ")
    measure_pairs("Chinese", ["\n".join(poems[i : i + 4]) for i in range(0, 8000, 4)], "")
    documents = [Document(text, "news", str(number)) for number, text in enumerate(news)]
    documents += [one for pair in plant(news[::5], random.Random(1), " ") for one in pair]
    measure_clusters(documents)
    measure_spans("\n".join(news))
    measure_examples(news, poems)


if __name__ == "__main__":
    main()
