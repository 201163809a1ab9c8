"""Answers that must be a case of a rule, whatever the model would rather write."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bmforge.errors import ConfigError
from bmforge.infer import Constraint, Engine, EngineConfig, GenerationConfig, Request
from bmforge.infer.engine.constraint import ConstraintCompiler, Matcher
from bmforge.infer.engine.one_of import replace_one_of
from bmforge.models import T5, Llama, LlamaConfig, T5Config
from bmforge.tokenizers import CPM2Tokenizer, CPMAntTokenizer, FastTokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

LETTERS = [chr(code) for code in range(32, 127)] + [*"你好世界，。\n"]
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
SIZES["num_layers"] = 1


def make_bytes() -> FastTokenizer:
    """Bytes, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return FastTokenizer(made.to_str().encode(), {"eos": "<end>"})


def make_own(kind: str) -> Any:
    if kind == "cpm-ant":
        lines = ["<pad>", "<unk>", "<s>", "</s>", "</_>", "</n>", *LETTERS[1:-1]]
        return CPMAntTokenizer("\n".join(lines).encode())
    head = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<eod>", "\u2582"]
    return CPM2Tokenizer("\n".join([*head, "\u2581", *LETTERS[1:-1], "<s_0>", "<s_1>"]).encode())


def opened(tokenizer: Any, kind: str = "llama", seed: int = 1) -> Engine:
    """A model of random weights, whose rows are more than the tokenizer has."""
    size = len(tokenizer) + 7
    model: Any
    if kind == "t5":
        model = T5.from_config(T5Config(vocab_size=size, **SIZES), seed=seed)
    else:
        model = Llama.from_config(LlamaConfig(vocab_size=size, **SIZES), seed=seed)
    config = EngineConfig(max_tokens=256)
    return Engine(model.eval(), tokenizer=tokenizer, config=config)


BYTES = make_bytes()
TOKENIZERS = {"bytes": BYTES, "cpm-ant": make_own("cpm-ant"), "cpm-2": make_own("cpm-2")}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", "猫"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def ask(engine: Engine, constraint: Constraint, **options: Any) -> list[str]:
    """The texts of a greedy answer and two drawn ones."""
    found = []
    for more in ({}, {"do_sample": True, "seed": 4, "num_return_sequences": 2}):
        config = GenerationConfig(**{"max_new_tokens": 120, **options, **more})
        for answer in engine.submit(Request("say", config, constraint=constraint)).wait(60):
            assert answer.finish_reason == "stop", answer
            found.append(answer.text)
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_schemas(name: str) -> None:
    """Every answer is JSON that the schema allows, of every kind of tokenizer."""
    with opened(TOKENIZERS[name]) as engine:
        for text in ask(engine, Constraint.json_schema(SCHEMA)):
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_choices_patterns_and_grammars(name: str) -> None:
    with opened(TOKENIZERS[name]) as engine:
        choices = ["yes", "no", '"perhaps"', "你好，世界"]
        assert set(ask(engine, Constraint.choices(choices))) <= set(choices)
        for text in ask(engine, Constraint.regex("[ab]{3,5}(世|界)[0-9]{1,4}x")):
            assert re.fullmatch("[ab]{3,5}(世|界)[0-9]{1,4}x", text)
        grammar = 'start: "(" pair ")"\npair: item "," item\nitem: "a" | "猫"? "b" | "[" "c" "]"'
        for text in ask(engine, Constraint.lark(grammar)):
            assert re.fullmatch(r"\((a|猫?b|\[c\]),(a|猫?b|\[c\])\)", text)


def test_an_encoder_decoder() -> None:
    with opened(BYTES, "t5") as engine:
        assert set(ask(engine, Constraint.choices(["one", "two"]))) <= {"one", "two"}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_nothing_ends_a_text_but_the_rule(name: str) -> None:
    """A model without an end token ends where the rule does."""
    with opened(TOKENIZERS[name]) as engine:
        choices = ["abc", "你好", "世界"]
        assert set(ask(engine, Constraint.choices(choices), eos_token_id=())) <= set(choices)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [(Constraint.json_schema({"const": "a"}), '"a"'), (Constraint.regex("a+"), "aa"),
     (Constraint.lark('start: begin\nbegin: "a"'), "a")],
    ids=lambda value: value.kind if isinstance(value, Constraint) else "",
)  # fmt: skip
def test_what_follows_the_start_of_a_call_is_free(constraint: Constraint, text: str) -> None:
    end = BYTES.special_ids["eos"]
    free = replace(constraint, free_after=("<call>", end - 1))
    for row, is_allowed in (
        (BYTES.encode(text), True), (BYTES.encode("<call>"), True), ([end - 1], True),
        (BYTES.encode("\n\n<call>{x} 天"), True), ([end - 1, *BYTES.encode("x"), end - 1], True),
        (BYTES.encode("<cal>"), False), (BYTES.encode("x<call>"), False),
        (BYTES.encode("\n\n\n<call>"), False),
    ):  # fmt: skip
        matcher = ConstraintCompiler(BYTES, len(BYTES), [end]).open(free)
        assert follows(matcher, row) == is_allowed, row
        matcher = ConstraintCompiler(BYTES, len(BYTES), [end]).open(constraint)
        assert follows(matcher, row) == (row == BYTES.encode(text))


def follows(matcher: Matcher, ids: list[int]) -> bool:
    """Return True if a matcher allows the tokens one after another, and then an end."""
    for id in ids:
        mask = matcher.allowed()
        if mask is None or not mask[id]:
            return False
        matcher.take(id)
    mask = matcher.allowed()
    return mask is None or bool(mask[BYTES.special_ids["eos"]])


def make_pieces() -> FastTokenizer:
    """Byte-level pairs with several added tokens, of which one is part of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s", "<s>", "</", "</s", "</s>", "ab"]
    merges = [("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">"), ("a", "b")]
    vocabulary = {letter: id for id, letter in enumerate([*alphabet, *words])}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    return FastTokenizer(made.to_str().encode(), {"eos": "</s>", "bos": "<s>"})


NAMES = {"bytes": (BYTES, ["<end>"]), "pieces": (make_pieces(), ["<s>", "</s>", "<|im_end|>"])}


@pytest.mark.parametrize("form", ["choices", "regex", "json", "lark"])
@pytest.mark.parametrize("kind", NAMES)
def test_names_of_special_tokens_are_written_as_characters(kind: str, form: str) -> None:
    """A constraint's text may contain them: the answer is that text, and no special token."""
    tokenizer, names = NAMES[kind]
    special = set(tokenizer.special_ids.values())
    with opened(tokenizer) as engine:
        for name in names:
            for text in (name, f"a{name}", f"{name}b", f"old {name}price{name} <b"):
                rule = {
                    "choices": lambda t: Constraint.choices([t]),
                    "regex": lambda t: Constraint.regex(re.escape(t).replace("\\ ", " ")),
                    "json": lambda t: Constraint.json_schema({"const": t}),
                    "lark": lambda t: Constraint.lark(f"start: {json.dumps(t)}"),
                }[form](text)
                handle = engine.submit(
                    Request("the", GenerationConfig(max_new_tokens=90), constraint=rule)
                )
                (answer,) = handle.wait(60)
                assert answer.text == (json.dumps(text) if form == "json" else text)
                assert not special & set(answer.ids[:-1])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Constraint.json_schema("{"), "is not valid JSON"),
        (lambda: Constraint.json_schema("3"), "must be a JSON object"),
        (lambda: Constraint.choices([]), "at least one string"),
        (lambda: Constraint.choices("yes"), "at least one string"),
        (lambda: Constraint.regex(""), "is empty"),
    ],
)
def test_rules_that_are_none(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_what_cannot_be_kept_to_is_refused() -> None:
    """Before anything is written, with what is wrong."""
    wrong = [
        Constraint.regex("(a"),
        Constraint.lark("begin: 3"),
        Constraint.json_schema({"type": "nothing"}),
        Constraint.json_schema({"not": {"type": "string"}}),
        Constraint.json_schema({"$ref": "https://example.com/schema.json"}),
        Constraint.json_schema({"type": "object", "minProperties": 2, "maxProperties": 1}),
    ]
    with opened(BYTES) as engine:
        for rule in wrong:
            with pytest.raises(ConfigError, match="constraint"):
                engine.submit(Request("say", constraint=rule))
        beams, least = GenerationConfig(num_beams=2), GenerationConfig(min_new_tokens=2)
        for options, match in ((beams, "token-by-token"), (least, "min_new_tokens=2")):
            with pytest.raises(ConfigError, match=match):
                engine.submit(Request("say", options, constraint=Constraint.regex("a")))
        handle = engine.submit(
            Request(
                "say",
                GenerationConfig(logit_bias={}, bad_words_ids=((BYTES.encode("a")[0],),)),
                constraint=Constraint.regex("a"),
            )
        )
        with pytest.raises(ConfigError, match="no token is left"):
            handle.wait(60)
    with (
        Engine(engine.model, config=EngineConfig(max_tokens=64)) as plain,
        pytest.raises(ConfigError, match="needs a tokenizer"),
    ):
        plain.submit(Request([1], constraint=Constraint.regex("a")))


def test_stop_strings_and_text() -> None:
    """In front of a stop string the text ends, whichever tokens it is made of."""
    with opened(BYTES, seed=3) as engine:
        options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seed": 2}
        free = engine.submit(Request("say", GenerationConfig(**options))).wait(60)[0]
        shown = [letter for letter in free.text if letter.isprintable()]
        stop = next(a + b for a, b in zip(free.text, free.text[1:], strict=False) if a in shown)
        config = GenerationConfig(**options, stop_strings=("never there", stop))
        handle = engine.submit(Request("say", config))
        pieces = [piece.text for piece in handle]
        (answer,) = handle.wait(1)
    assert answer.text == "".join(pieces) == free.text[: free.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.ids == free.ids[: len(answer.ids)]


CAT = {"type": "object", "required": ["kind"], "properties": {"kind": {"const": "cat"}}}
DOG = {"type": "object", "required": ["kind"],
       "properties": {"kind": {"enum": ["dog", "wolf"]}, "legs": {"type": "integer"}}}  # fmt: skip
LOOSE = {"properties": {"kind": {"const": "dog"}}}  # matches what has no kind, and no objects


@pytest.mark.parametrize(
    ("cases", "is_replaced"),
    [
        ([CAT, DOG], True),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}], True),
        ([{"const": 1}, {"enum": [2, "1"]}], True),
        ([{"type": "string"}, {"type": ["integer", "null"]}], True),
        ([CAT, {**DOG, "required": []}], False),
        ([CAT, LOOSE], False),
        ([CAT, CAT], False),
        ([{"const": 1}, {"enum": [2, 1.0]}], False),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"const": [1]}, {"const": [2]}], False),
        ([{"maximum": 3}, {"minimum": 5}], False),
        ([{"$ref": "#/$defs/cat/missing"}, DOG], False),
        ([True, {"const": 1}], False),
    ],
)
def test_one_of_is_any_of_if_its_cases_exclude_each_other(
    cases: list[Any], is_replaced: bool
) -> None:
    schema = {"$defs": {"cat": CAT, "dog": DOG}, "oneOf": cases}
    new = replace_one_of(schema)
    assert ("anyOf" in new) == is_replaced
    instances = [1, 2, 3, 9, 1.5, "1", None, [1], [2], {}, {"kind": "cat"}, {"kind": "dog"},
                 {"kind": "wolf", "legs": 4}, {"kind": "fish"}]  # fmt: skip
    if is_replaced:
        old, check = (jsonschema.Draft202012Validator(one) for one in (schema, new))
        for instance in instances:
            assert old.is_valid(instance) == check.is_valid(instance), instance


def test_one_of_is_kept_in_data_and_in_huge_schemas() -> None:
    data = {"const": {"oneOf": [{"const": 1}, {"const": 2}]}}
    assert replace_one_of(data) == data
    many = {"oneOf": [{"const": number} for number in range(65)]}
    assert replace_one_of(many) == many
    deep: dict[str, Any] = {"oneOf": [{"const": 1}, {"const": 2}]}
    for _ in range(400):
        deep = {"items": deep}
    assert replace_one_of(deep) == deep


def test_a_discriminated_union_of_pydantic() -> None:
    class Cat(BaseModel, extra="forbid"):
        kind: Literal["cat"]
        large: bool

    class Dog(BaseModel, extra="forbid"):
        kind: Literal["dog"]

    class Pet(BaseModel):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]

    schema = {**Pet.model_json_schema(), "additionalProperties": False}
    with opened(BYTES) as engine:
        for text in ask(engine, Constraint.json_schema(schema)):
            Pet.model_validate_json(text)


@pytest.mark.long
def test_many_generated_schemas() -> None:
    """200 schemas, random weights: every answer is valid, or refused before it begins."""
    draw = torch.Generator().manual_seed(0)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=draw))

    def schema(depth: int) -> dict[str, Any]:
        kind = number(8 if depth else 6)
        if kind == 0:
            return {"type": "string", "minLength": number(3), "maxLength": 3 + number(5)}
        if kind == 1:
            low = number(100) - 50
            return {"type": "integer", "minimum": low, "maximum": low + number(60)}
        if kind == 2:
            return {"enum": [number(9), "a\\b", "你", None, True][: 1 + number(5)]}
        if kind == 3:
            return {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"}
        if kind == 4:
            return {"const": {"x": [1, "y"]}}
        if kind == 5:
            return {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
        if kind == 6:
            count = number(3)
            return {"type": "array", "items": schema(depth - 1), "minItems": count, "maxItems": 3}
        names = ["a", "b", "长"][: 1 + number(3)]
        return {
            "type": "object",
            "properties": {name: schema(depth - 1) for name in names},
            "required": names[: number(len(names) + 1)],
            "additionalProperties": False,
        }

    answered = 0
    with opened(BYTES) as engine:
        for seed in range(200):
            rule = schema(3)
            config = GenerationConfig(max_new_tokens=240, do_sample=True, seed=seed)
            try:
                handle = engine.submit(Request("x", config, Constraint.json_schema(rule)))
            except ConfigError:
                continue
            (answer,) = handle.wait(60)
            if answer.finish_reason == "stop":
                jsonschema.validate(json.loads(answer.text), rule)
                answered += 1
    assert answered > 150
