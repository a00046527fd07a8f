"""The tokenizer of a safetensors or torch source: copied, or built when the source has only a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.files import write_file
from archerfish.store.format import first_line
from archerfish.store.sidecars import optional_json, read_json

WORLD_NAME = "rwkv_vocab_v20230424.txt"  # of RWKV models
COPIED_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.txt", "vocab.json", "merges.txt", WORLD_NAME,
)  # fmt: skip
SENTENCEPIECE_NAMES = ("sentencepiece.bpe.model", "spiece.model", "tokenizer.model")
BERT_TOKENS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
ROBERTA_TOKENS = {"unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>"}
MPNET_TOKENS = {**ROBERTA_TOKENS, "unk_token": "[UNK]"}


def write_tokenizer_files(source: Path, target: Path) -> None:
    """Fill `target` with tokenizer.json, or an RWKV vocabulary, and its companions; without a tokenizer it stays absent."""
    data = {name: (source / name).read_bytes() for name in COPIED_NAMES if (source / name).is_file()}
    if "tokenizer.json" in data:
        check_tokenizer(source / "tokenizer.json", data["tokenizer.json"].decode("utf-8", "replace"))
    elif "vocab.txt" in data:
        data["tokenizer.json"] = build_wordpiece(source).encode()
    elif "vocab.json" in data and "merges.txt" in data:
        data["tokenizer.json"] = build_byte_level(source).encode()
    elif WORLD_NAME not in data:
        found = [name for name in SENTENCEPIECE_NAMES if (source / name).is_file()]
        if found:
            hint = "Save it once with transformers' AutoTokenizer (use_fast=True), which writes tokenizer.json."
            raise UnsupportedModelError(f"{source} has no tokenizer.json, only the SentencePiece file {found[0]}.", hint=hint)
        return
    target.mkdir()
    for name, content in data.items():
        write_file(target / name, content)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        (target / templates.name).mkdir()
        for path in sorted(templates.glob("*.jinja")):
            write_file(target / templates.name / path.name, path.read_bytes())


def check_tokenizer(path: Path, text: str) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the Rust side raises bare Exception
        raise CorruptFileError(f"{path} is not a sound tokenizer: {first_line(error)}") from error


def special_tokens(source: Path, defaults: dict[str, str]) -> dict[str, str]:
    """The special tokens that the source's files name, by role."""
    tokens = dict(defaults)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for role, value in (optional_json(source / name) or {}).items():
            text = value.get("content") if isinstance(value, dict) else value
            if role in defaults and isinstance(text, str):
                tokens[role] = text
    return tokens


def tokenizer_class(source: Path) -> str:
    options = optional_json(source / "tokenizer_config.json") or {}
    config = optional_json(source / "config.json") or {}
    return f"{options.get('tokenizer_class', '')} {config.get('model_type', '')}".lower()


def require_ids(path: Path, vocabulary: dict[str, int], tokens: dict[str, str], roles: tuple[str, ...]) -> None:
    for role in roles:
        if tokens[role] not in vocabulary:
            raise CorruptFileError(f"{path} has no {role} {tokens[role]!r}.")


def build_wordpiece(source: Path) -> str:
    """tokenizer.json of a BERT-like model that has only vocab.txt."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    path = source / "vocab.txt"
    try:
        words = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path} is not UTF-8 text.") from error
    vocabulary = {word.rstrip("\r"): index for index, word in enumerate(words[:-1] if words[-1] == "" else words)}
    is_mpnet = "mpnet" in tokenizer_class(source)
    tokens = special_tokens(source, MPNET_TOKENS if is_mpnet else BERT_TOKENS)
    require_ids(path, vocabulary, tokens, ("unk_token", "cls_token", "sep_token"))
    options = optional_json(source / "tokenizer_config.json") or {}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=tokens["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(options.get("tokenize_chinese_chars", True)),
        strip_accents=options.get("strip_accents"),
        lowercase=bool(options.get("do_lower_case", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    separator, first = ((tokens[role], vocabulary[tokens[role]]) for role in ("sep_token", "cls_token"))
    tokenizer.post_processor = (
        processors.RobertaProcessing(separator, first, trim_offsets=False, add_prefix_space=False)
        if is_mpnet
        else processors.BertProcessing(separator, first)
    )
    return finish(tokenizer, tokens, vocabulary)


def build_byte_level(source: Path) -> str:
    """tokenizer.json of a RoBERTa- or GPT-2-like model that has only vocab.json and merges.txt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    kind = tokenizer_class(source)
    is_roberta = "roberta" in kind
    if not is_roberta and "gpt2" not in kind:
        hint = "Save it once with transformers' AutoTokenizer (use_fast=True), which writes tokenizer.json."
        raise UnsupportedModelError(f"{source} has vocab.json and merges.txt but no tokenizer.json.", hint=hint)
    vocabulary = read_json(source / "vocab.json")
    lines = (source / "merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs) or not all(type(index) is int for index in vocabulary.values()):
        raise CorruptFileError(f"{source}: vocab.json or merges.txt is not what it should be.")
    options = optional_json(source / "tokenizer_config.json") or {}
    prefix = bool(options.get("add_prefix_space", False))
    tokenizer = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = special_tokens(source, ROBERTA_TOKENS if is_roberta else {"unk_token": "<|endoftext|>"})
    if is_roberta:
        require_ids(source / "vocab.json", vocabulary, tokens, ("cls_token", "sep_token"))
        separator, first = ((tokens[role], vocabulary[tokens[role]]) for role in ("sep_token", "cls_token"))
        tokenizer.post_processor = processors.RobertaProcessing(separator, first, add_prefix_space=prefix)
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return finish(tokenizer, tokens, vocabulary)


def finish(tokenizer: Any, tokens: dict[str, str], vocabulary: dict[str, int]) -> str:
    from tokenizers import AddedToken

    present = [(role, text) for role, text in tokens.items() if text in vocabulary]
    tokenizer.add_special_tokens(
        [AddedToken(text, lstrip=role == "mask_token" and text == "<mask>", normalized=False) for role, text in present]
    )
    return str(tokenizer.to_str())


def dump_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
