"""Deduplication, test examples, sentences and word lists in 14 writing systems.

Texts are built from known words, so the truth is exact: the words never come from a splitter.
"""

from __future__ import annotations

import random
import unicodedata

import pytest

from bmforge.data.clean.lists import WordBlocklist
from bmforge.data.clean.rules.c4 import select_lines
from bmforge.data.clean.statistics import TextStatistics
from bmforge.data.clean.words import count_sentences, split_words
from bmforge.data.dedup import DedupConfig, OverlapIndex, find_near_duplicates, find_overlap
from bmforge.data.dedup.spans import find_repeated_spans
from bmforge.data.dedup.tokens import locate_tokens, split_tokens
from bmforge.data.sources.document import Document

# Base letters, what may follow one of them (vowel signs, points), the end of a sentence, and the
# space between words. Without a space every letter with its signs is a token of its own.
SCRIPTS = {
    "hindi": ("कखगघचछजटडतदनपबभमयरलवसह", "ािीुूेैोौं", "।", " "),
    "bengali": ("কখগঘচছজটডতদনপবভমযরলশসহ", "ািীুূেৈোৌ", "।", " "),
    "tamil": ("கஙசஞடணதநபமயரலவழளறன", "ாிீுூெேைொோ", ".", " "),
    "telugu": ("కఖగఘచఛజటడతదనపబభమయరలవసహ", "ాిీుూెేైొోౌ", ".", " "),
    "thai": ("กขคงจชซดตถทนบปผพมยรลวสหอ", "ิีึืุู่้๊", "", ""),
    "lao": ("ກຂຄງຈສຊຍດຕຖທນບປຜຝພຟມຢຣລວຫອຮ", "ິີຶືຸູ່້", "", ""),
    "burmese": ("ကခဂငစဆဇညတထဒနပဖဗမယရလဝသဟအ", "ိီုူဲံ့", "။", ""),
    "khmer": ("កខគឃងចឆជឈញដឋឌឍណតថទធនបផពភមយរលវសហ", "ិីឹឺុូំ", "។", ""),
    "arabic": ("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", "\u064e\u064f\u0650\u0651\u0652", ".", " "),
    "hebrew": ("אבגדהוזחטיכלמנסעפצקרשת", "\u05b0\u05b4\u05b5\u05b6\u05b7\u05b8\u05bb", ".", " "),
    "georgian": ("აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ", "", ".", " "),
    "amharic": ("ሀለሐመሠረሰሸቀበተቸኀነኘአከኸወዐዘዠየደጀገጠጨጰጸፀፈፐ", "", "።", " "),
    "korean": ("가나다라마바사아자차카타파하고노도로모보소오조초코토포호구누두", "", ".", " "),
    "japanese": (
        "あいうえおかきくけこさしすせそたちつてとなにぬねのアイウエオ日本語文",
        "",
        "。",
        "",
    ),
}
INVISIBLE = "\u00ad\u200b\u2060\u200e\ufeff\u200d\ufe0f"
LENGTH = 5


def make_words(draw: random.Random, script: str, count: int) -> list[str]:
    letters, signs, _, space = SCRIPTS[script]
    size = 4 if space else 1

    def letter() -> str:
        return draw.choice(letters) + (draw.choice(signs) if signs and draw.random() < 0.7 else "")

    return ["".join(letter() for _ in range(size)) for _ in range(count)]


def other_signs(words: list[str], script: str) -> list[str]:
    """Return words with the same letters and other signs; without signs, other letters."""
    letters, signs, _, _ = SCRIPTS[script]
    pool = signs or letters
    turned = str.maketrans(pool, pool[1:] + pool[:1])
    return [word.translate(turned) for word in words]


def add_noise(draw: random.Random, text: str) -> str:
    return "".join(c + (draw.choice(INVISIBLE) if draw.random() < 0.3 else "") for c in text)


def shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + LENGTH]) for at in range(len(words) - LENGTH + 1)}


def similarity(first: list[str], second: list[str]) -> float:
    one, other = shingles(first), shingles(second)
    return len(one & other) / len(one | other)


@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_are_the_words_that_a_text_was_built_from(script):
    draw = random.Random(script)
    words = make_words(draw, script, 200)
    space = SCRIPTS[script][3]
    for text in (space.join(words), add_noise(draw, space.join(words))):
        expected = [unicodedata.normalize("NFKC", word) for word in words]
        assert split_tokens(text) == expected
        tokens, spots = locate_tokens(text)
        assert tokens == expected
        shown = [text[begin:end] for begin, end in spots]
        assert ["".join(c for c in one if c not in INVISIBLE) for one in shown] == words


@pytest.mark.parametrize("script", SCRIPTS)
def test_near_duplicates_are_those_of_exact_sets(script):
    """Copies with edits and invisible noise, and texts that differ in vowel signs alone."""
    draw = random.Random(script)
    space = SCRIPTS[script][3]
    texts: list[list[str]] = []
    for _ in range(12):
        base = make_words(draw, script, 160)
        edited = list(base)
        edited[draw.randrange(40, 120)] = make_words(draw, script, 1)[0]
        far = [word if draw.random() < 0.8 else make_words(draw, script, 1)[0] for word in base]
        texts += [base, edited, far, other_signs(base, script)]
    documents = [
        Document(add_noise(draw, space.join(words)) if at % 2 else space.join(words), str(at))
        for at, words in enumerate(texts)
    ]
    dropped = find_near_duplicates(lambda: documents, DedupConfig(threshold=0.8)).survivor
    truth = {
        frozenset((one, other))
        for one in range(len(texts))
        for other in range(one)
        if similarity(texts[one], texts[other]) >= 0.8
    }
    places = {document.id: at for at, document in enumerate(documents)}
    assert len(truth) == 12
    assert {frozenset((places[lost], places[left])) for lost, left in dropped.items()} == truth


@pytest.mark.parametrize("script", SCRIPTS)
def test_test_examples_and_repeated_spans_are_found_by_whole_words(script):
    draw = random.Random(script)
    space = SCRIPTS[script][3]
    example, around = make_words(draw, script, 60), make_words(draw, script, 100)
    index = OverlapIndex([("example", space.join(example))])
    text = add_noise(draw, space.join([*around[:50], *example, *around[50:]]))
    assert [one.example for one in find_overlap(text, index)] == ["example"]
    changed = space.join([*around[:50], *other_signs(example, script), *around[50:]])
    assert find_overlap(changed, index) == []
    first, second = Document(space.join(example), "a"), Document(text, "b")
    ((begin, end),) = find_repeated_spans(lambda: [first, second])[second.id]
    shown = "".join(c for c in text[begin:end] if c not in INVISIBLE)
    assert shown == space.join(example)
    third = Document(changed, "c")
    assert find_repeated_spans(lambda: [first, third]) == {}


@pytest.mark.parametrize("script", [name for name, row in SCRIPTS.items() if row[2]])
def test_sentences_are_counted_by_the_ends_of_the_script(script):
    draw = random.Random(script)
    _, _, end, space = SCRIPTS[script]
    for count in (1, 2, 7, 20):
        sentences = [space.join(make_words(draw, script, 6)) + end for _ in range(count)]
        for joined in (" ".join(sentences), space.join(sentences)):
            assert count_sentences(split_words(joined)) == count
    lines = "\n".join(" ".join(make_words(draw, script, 5)) + end for _ in range(6))
    kept = select_lines(TextStatistics(lines, split=split_words))
    assert (len(kept.lines), kept.sentences) == (6, 6)


@pytest.mark.parametrize("script", [name for name, row in SCRIPTS.items() if row[1] and row[3]])
def test_a_listed_word_does_not_end_within_a_letter_and_its_sign(script):
    letters, signs, _, _ = SCRIPTS[script]
    word = letters[0] + letters[1]
    listed = WordBlocklist((word,), most_per_line=0)
    assert listed.find(f"{letters[2]} {word} {letters[3]}")
    assert not listed.find(f"{letters[2]} {word}{signs[0]} {letters[3]}")
