"""Loads the tokenizer.json of a Hugging Face directory, or builds one from older files.

Older repositories have only ``vocab.json`` with ``merges.txt`` (GPT-2, OPT, RoBERTa), ``vocab.txt``
(BERT) or ``spiece.model`` (T5). The algorithms are those of the tokenizers library; the settings
for each kind follow transformers' ``tokenization_gpt2.py``, ``tokenization_roberta.py`` and
``tokenization_bert.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bmforge.errors import DataError
from bmforge.files import read_bytes, read_json
from bmforge.tokenizers.spiece import SPIECE_FILES, open_spiece

__all__ = [
    "BYTE_PAIR_FILES",
    "CONFIG_FILE",
    "ROLE_FILES",
    "TEMPLATE_DIR",
    "TEMPLATE_FILE",
    "TOKENIZER_FILE",
    "add_begin_and_end_",
    "find_named_templates",
    "find_tokenizer_json",
    "has_tokenizer_json",
    "open_byte_pairs",
    "open_tokenizer_json",
    "read_role_tokens",
]

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
ROLE_FILES = (CONFIG_FILE, "special_tokens_map.json")
TEMPLATE_FILE = "chat_template.jinja"
# Folder in which transformers 5 keeps the chat templates other than the default one.
TEMPLATE_DIR = "additional_chat_templates"
_ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")
BYTE_PAIR_FILES, _WORD_PIECES = ("vocab.json", "merges.txt"), ("vocab.txt",)
# Values of tokenizer_class or model_type, without "tokenizer" and "fast", for which these files
# define the tokenizer; other models with such files (CLIP, Qwen2, BertJapanese) split text in other
# ways.
_BYTE_PAIR_NAMES = {"gpt2", "gptj", "opt", "roberta", "longformer", "bart"}
_WORD_PIECE_NAMES = {"bert", "electra", "distilbert"}
_SPIECE_NAMES = {"t5", "mt5", "umt5"}
# Roles if no file defines them: the first mapping whose tokens are all in the vocabulary.
_ROBERTA_ROLES = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "cls": "<s>",
                  "pad": "<pad>", "mask": "<mask>"}  # fmt: skip
_GPT2_ROLES = dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")
_T5_ROLES = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
_BERT_ROLES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}


def find_named_templates(folder: Path) -> list[str]:
    """Return the chat templates in a folder's `TEMPLATE_DIR`, as paths relative to the folder."""
    return sorted(f"{TEMPLATE_DIR}/{path.name}" for path in folder.glob(f"{TEMPLATE_DIR}/*.jinja"))


def open_tokenizer_json(content: bytes, path: Path) -> Any:
    """Load a tokenizer.json with the ``tokenizers`` library.

    Truncation and padding, which may be stored in the file, are disabled, so that texts are encoded
    completely.

    Args:
        content: contents of the file.
        path: path of the file, for error messages.

    Raises:
        DataError: the content is not a valid tokenizer.json.
    """
    from tokenizers import Tokenizer  # imported here to keep `import bmforge` fast

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises a bare Exception for invalid files
        raise DataError(
            f"{str(path)!r} is not a tokenizer.json ({error}). Download the file again."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_tokenizer_json(folder: Path) -> bytes | None:
    """Return the contents of a directory's tokenizer.json, or build them from older files.

    Raises:
        DataError: the older files are damaged.

    Returns:
        contents of a tokenizer.json; None if there are no such files, or a config file names a
        tokenizer that the older files do not fully define.
    """
    if (folder / TOKENIZER_FILE).is_file():
        return read_bytes(folder / TOKENIZER_FILE, "a file of the tokenizers library")
    kind = _older_kind(folder)
    if kind is None:
        return None
    if kind == BYTE_PAIR_FILES:
        leading = bool(_settings(folder).get("add_prefix_space", False))
        tokenizer = open_byte_pairs(folder, leading)
    elif kind == SPIECE_FILES:
        path = folder / SPIECE_FILES[0]
        extra_ids = _settings(folder).get("extra_ids")
        tokenizer = open_spiece(read_bytes(path, "a sentencepiece model"), path, extra_ids)
    else:
        tokenizer = _word_pieces(folder)
    _add_tokens(tokenizer, folder)
    return tokenizer.to_str().encode()


def has_tokenizer_json(folder: Path) -> bool:
    """Return True if a directory has a tokenizer.json, or older files from which one is built."""
    return (folder / TOKENIZER_FILE).is_file() or _older_kind(folder) is not None


def _older_kind(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the older files from which the tokenizer can be built, or None."""
    named = _named_kind(folder)
    if _has(folder, BYTE_PAIR_FILES) and (named is None or named in _BYTE_PAIR_NAMES):
        return BYTE_PAIR_FILES
    if _has(folder, _WORD_PIECES) and (named is None or named in _WORD_PIECE_NAMES):
        lines = (folder / _WORD_PIECES[0]).read_text("utf-8", errors="replace").split("\n")
        if {"[UNK]", "[CLS]", "[SEP]"} <= {line.rstrip("\r") for line in lines}:
            return _WORD_PIECES
    if _has(folder, SPIECE_FILES) and (named is None or named in _SPIECE_NAMES):
        return SPIECE_FILES
    return None


def read_role_tokens(folder: Path) -> dict[str, str]:
    """Return a dict from role ("pad", "bos", ...) to token, read from a tokenizer's files.

    If the files define no roles, defaults for the older file type are used.

    Raises:
        DataError: a file is not a JSON object.
    """
    roles = {role: entry["content"] for role, entry in _role_entries(folder).items()}
    if roles or (folder / TOKENIZER_FILE).is_file():
        return roles
    if _has(folder, BYTE_PAIR_FILES):
        words = read_json(folder / BYTE_PAIR_FILES[0])
        usual = next((r for r in (_ROBERTA_ROLES, _GPT2_ROLES) if set(r.values()) <= {*words}), {})
        return dict(usual)
    if _has(folder, _WORD_PIECES):
        return dict(_BERT_ROLES)
    return dict(_T5_ROLES) if _has(folder, SPIECE_FILES) else {}


def _role_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return a dict from role to token entry; the first of `ROLE_FILES` has priority."""
    entries: dict[str, dict[str, Any]] = {}
    for name in ROLE_FILES:
        config = read_json(folder / name) if (folder / name).is_file() else {}
        for role in _ROLES:
            entry = config.get(f"{role}_token")
            entry = {"content": entry} if isinstance(entry, str) else entry
            if isinstance(entry, dict) and isinstance(entry.get("content"), str):
                entries.setdefault(role, entry)
    return entries


def _named_kind(folder: Path) -> str | None:
    """Return the tokenizer or model name in the config files, such as "gpt2", or None."""
    for name, key in ((CONFIG_FILE, "tokenizer_class"), ("config.json", "model_type")):
        if (folder / name).is_file() and (value := read_json(folder / name).get(key)):
            short = str(value).lower().replace("-", "").replace("_", "")
            return short.removesuffix("fast").removesuffix("tokenizer")
    return None


def open_byte_pairs(folder: Path, leading: bool = False) -> Any:
    """Load the byte-level BPE in ``vocab.json`` and ``merges.txt``, without special tokens.

    Args:
        folder: directory with the files.
        leading: True to prepend a space to texts that do not begin with one.

    Raises:
        DataError: a file is damaged.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    paths = [str(folder / name) for name in BYTE_PAIR_FILES]
    try:
        tokenizer = Tokenizer(models.BPE.from_file(*paths))
    except Exception as error:  # a bare Exception, see above
        raise _damaged(paths, error) from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=leading)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_pieces(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    path = str(folder / _WORD_PIECES[0])
    try:
        tokenizer = Tokenizer(models.WordPiece.from_file(path, unk_token="[UNK]"))
    except Exception as error:  # a bare Exception, see above
        raise _damaged([path], error) from error
    settings = _settings(folder)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),
        lowercase=bool(settings.get("do_lower_case", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _add_tokens(tokenizer: Any, folder: Path) -> None:
    """Add the special tokens of all roles, and the tokens in ``added_tokens.json``.

    Raises:
        DataError: an added token would get another id than in ``added_tokens.json``.
    """
    from tokenizers import AddedToken

    path = folder / "added_tokens.json"
    ids = read_json(path) if path.is_file() else {}
    entries = _role_entries(folder)
    special = {}
    for role, token in read_role_tokens(folder).items():
        entry = entries.get(role, {})
        # RoBERTa's mask token includes the preceding space, so that it replaces " word".
        before = bool(entry.get("lstrip", role == "mask" and token == "<mask>"))
        after = bool(entry.get("rstrip", False))
        special[token] = AddedToken(token, lstrip=before, rstrip=after, normalized=False)
    for token in sorted(ids, key=lambda name: ids[name]):
        if token in special:
            tokenizer.add_special_tokens([special.pop(token)])
        else:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
        if (id := tokenizer.token_to_id(token)) != ids[token]:
            raise DataError(
                f"{str(path)!r} assigns the id {ids[token]} to {token!r}, but the vocabulary in "
                f"the same directory assigns {id}. Use two files of the same model."
            )
    tokenizer.add_special_tokens(list(special.values()))


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    return read_json(path) if path.is_file() else {}


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return all((folder / name).is_file() for name in names)


def _damaged(paths: list[str], error: Exception) -> DataError:
    return DataError(
        f"cannot read the vocabulary of the tokenizer in {' and '.join(paths)} ({error}). Download "
        "the files again."
    )


def add_begin_and_end_(
    tokenizer: Any, roles: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Set a post-processor that adds the BOS and EOS tokens that `settings` require.

    transformers ignores `add_bos_token` in tokenizer_config.json for a tokenizer without a class of
    its own. A tokenizer that already has a post-processor does not change.

    Args:
        tokenizer: tokenizer of the `tokenizers` library, changed in place.
        roles: mapping from role ("bos", "eos") to token.
        settings: fields of tokenizer_config.json.
    """
    from tokenizers.processors import TemplateProcessing

    begin, end = (
        [roles[role]] if settings.get(f"add_{role}_token") and role in roles else []
        for role in ("bos", "eos")
    )
    if tokenizer.post_processor is not None or not (begin or end):
        return
    second = [f"{token}:1" for token in (*begin, "$B", *end)]
    tokenizer.post_processor = TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *second],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*begin, *end}],
    )
