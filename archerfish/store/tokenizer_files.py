"""The tokenizer of a model: tokenizer.json and the files that belong to it.

A safetensors or torch source has them, or has a vocabulary from which they are built. In a GGUF file the vocabulary is
part of the metadata, in one of three kinds:

    gpt2   byte-level BPE; `tokenizer.ggml.pre` says how text is split before it
    llama  SentencePiece BPE; merges follow from the scores of the pieces
    bert   WordPiece; GGUF marks the beginning of a word, Hugging Face its continuation
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.files import write_file
from archerfish.store.source import WORLD_NAME, optional_json, token_name
from archerfish.store.tokenizer_checks import (
    GPT4O_SPLIT,
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    TEKKEN_SPLIT,
    open_tokenizer,
    tokenizer_errors,
)

COPIED_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    WORLD_NAME,
)
SENTENCEPIECE_NAMES = ("sentencepiece.bpe.model", "spiece.model", "tokenizer.model")
BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
ROBERTA_TOKENS = {
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
GPT2_TOKENS = {"unk_token": "<|endoftext|>"}
MPNET_TOKENS = {**ROBERTA_TOKENS, "unk_token": "[UNK]"}
SAVE_AGAIN = "Save it once with transformers' AutoTokenizer (use_fast=True), which writes tokenizer.json."


def write_tokenizer_files(source: Path, target: Path) -> None:
    """Fill the new directory `target` with the tokenizer files of a source. A source without a tokenizer makes no
    directory."""
    data = {name: (source / name).read_bytes() for name in COPIED_NAMES if (source / name).is_file()}
    with tokenizer_errors(source):
        if "tokenizer.json" in data:
            open_tokenizer(data["tokenizer.json"], source)
        elif "vocab.txt" in data:
            data["tokenizer.json"] = build_wordpiece(source).encode()
        elif "vocab.json" in data and "merges.txt" in data:
            data["tokenizer.json"] = build_byte_level(source).encode()
        elif WORLD_NAME not in data:
            found = [name for name in SENTENCEPIECE_NAMES if (source / name).is_file()]
            if not found:
                return
            raise UnsupportedModelError(f"{source} has no tokenizer.json, only the file {found[0]}.", hint=SAVE_AGAIN)
    write_files(data, target)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        write_files(
            {path.name: path.read_bytes() for path in sorted(templates.glob("*.jinja"))}, target / templates.name
        )


def write_files(files: Mapping[str, bytes], target: Path) -> None:
    """Write files, by name, into the new directory `target`. Without files there will be no directory."""
    if files:
        target.mkdir()
    for name, data in files.items():
        write_file(target / name, data)


def special_tokens(
    source: Path, vocabulary: Mapping[str, int], defaults: dict[str, str], required: tuple[str, ...]
) -> dict[str, str]:
    """The special token of each role of `defaults`, as the source's files or else `defaults` name it."""
    files = [optional_json(source / name) or {} for name in ("tokenizer_config.json", "special_tokens_map.json")]
    tokens = {role: token_name(role, *files) or default for role, default in defaults.items()}
    for role in required:
        if tokens[role] not in vocabulary:
            raise CorruptFileError(f"The vocabulary of {source} has no {role} {tokens[role]!r}.")
    return tokens


def tokenizer_class(source: Path, options: Mapping[str, Any]) -> str:
    config = optional_json(source / "config.json") or {}
    return f"{options.get('tokenizer_class', '')} {config.get('model_type', '')}".lower()


def build_wordpiece(source: Path) -> str:
    """tokenizer.json of a BERT-like model that has only vocab.txt."""
    words = (source / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocabulary = {word: index for index, word in enumerate(words)}
    options = optional_json(source / "tokenizer_config.json") or {}
    is_mpnet = "mpnet" in tokenizer_class(source, options)
    roles = ("unk_token", "sep_token", "cls_token")
    tokens = special_tokens(source, vocabulary, MPNET_TOKENS if is_mpnet else BERT_TOKENS, roles)
    tokenizer = tokenizers.BertWordPieceTokenizer(
        vocabulary,
        **tokens,
        handle_chinese_chars=bool(options.get("tokenize_chinese_chars", True)),
        strip_accents=options.get("strip_accents"),
        lowercase=bool(options.get("do_lower_case", True)),
    )
    if is_mpnet:
        separator, first = ((tokens[role], vocabulary[tokens[role]]) for role in roles[1:])
        tokenizer.post_processor = processors.RobertaProcessing(
            separator, first, trim_offsets=False, add_prefix_space=False
        )
    return to_json(tokenizer, tokens, vocabulary)


def build_byte_level(source: Path) -> str:
    """tokenizer.json of a RoBERTa- or GPT-2-like model that has only vocab.json and merges.txt."""
    options = optional_json(source / "tokenizer_config.json") or {}
    kind = tokenizer_class(source, options)
    is_roberta = "roberta" in kind
    if not is_roberta and "gpt2" not in kind:
        raise UnsupportedModelError(f"{source} has vocab.json and merges.txt but no tokenizer.json.", hint=SAVE_AGAIN)
    vocabulary, merges = models.BPE.read_file(str(source / "vocab.json"), str(source / "merges.txt"))
    defaults, roles = (ROBERTA_TOKENS, ("sep_token", "cls_token")) if is_roberta else (GPT2_TOKENS, ())
    tokens = special_tokens(source, vocabulary, defaults, roles)
    prefix = bool(options.get("add_prefix_space", False))
    tokenizer = tokenizers.ByteLevelBPETokenizer(vocabulary, merges, add_prefix_space=prefix)
    if is_roberta:
        separator, first = ((tokens[role], vocabulary[tokens[role]]) for role in roles)
        tokenizer.post_processor = processors.RobertaProcessing(separator, first, add_prefix_space=prefix)
    return to_json(tokenizer, tokens, vocabulary)


def to_json(tokenizer: Any, tokens: dict[str, str], vocabulary: Mapping[str, int]) -> str:
    present = [(role, text) for role, text in tokens.items() if text in vocabulary]
    tokenizer.add_special_tokens(
        [AddedToken(text, lstrip=role == "mask_token" and text == "<mask>", normalized=False) for role, text in present]
    )
    return str(tokenizer.to_str())


# Kinds of tokens, as in tokenizer.ggml.token_type.
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
WORD_MARK = "\u2581"
# Fields by role; "seperator" is spelt so in the format.
ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before byte-level BPE: by a pattern, or by GPT-2's own after splitting off single digits."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is not split, even where no merges lead to it
    add_bos: bool = False


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "gpt2", "default", "olmo", "exaone4"), PreTokenizer()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), PreTokenizer(single_digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), PreTokenizer(LLAMA3_SPLIT, ignore_merges=True, add_bos=True)),
    "smaug-bpe": PreTokenizer(LLAMA3_SPLIT, ignore_merges=True),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), PreTokenizer(LLAMA3_SPLIT)),
    "tekken": PreTokenizer(TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(QWEN2_SPLIT, nfc=True)),
    "stablelm2": PreTokenizer(QWEN2_SPLIT),
    "gpt-4o": PreTokenizer(GPT4O_SPLIT),
}


@dataclass(frozen=True)
class GGUFVocabulary:
    """The checked lists of a GGUF tokenizer."""

    name: str
    fields: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]

    def get(self, key: str) -> Any:
        return self.fields.get(f"tokenizer.ggml.{key}")

    def role_token(self, role: str) -> str | None:
        token_id = self.get(ROLES[role])
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise CorruptFileError(f"{self.name}: {ROLES[role]} is {token_id}, beyond the {len(self.tokens)} tokens.")
        return self.tokens[token_id]


def make_tokenizer_files(name: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, bytes]:
    """Files of the tokenizer directory of a GGUF model; empty when the GGUF file has no tokenizer."""
    kind = fields.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return {}
    builders = {"gpt2": build_gguf_byte_level, "llama": build_gguf_sentencepiece, "bert": build_gguf_wordpiece}
    if kind not in builders:
        hint = (
            f"Supported: {', '.join(builders)}. Otherwise convert the model from safetensors with its tokenizer.json."
        )
        raise UnsupportedModelError(f"{name} has a tokenizer of kind {kind!r}, which is not supported.", hint=hint)
    vocabulary = read_gguf_vocabulary(name, fields, config)
    with tokenizer_errors(name):
        tokenizer = builders[kind](vocabulary)
        add_special_tokens(tokenizer, vocabulary)
        text = tokenizer.to_str()
    return {"tokenizer.json": text.encode(), **side_files(vocabulary, config)}


def read_gguf_vocabulary(name: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> GGUFVocabulary:
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CorruptFileError(f"{name} has no list of tokens.")
    if len(tokens) > config["vocab_size"]:
        raise CorruptFileError(f"{name} has {len(tokens)} tokens and {config['vocab_size']} embeddings.")
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CorruptFileError(f"{name} has {len(tokens)} tokens and {len(kinds)} token types.")
    if fields["tokenizer.ggml.model"] == "bert":
        tokens = [wordpiece_of(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise CorruptFileError(f"{name}: the tokenizer has the same token twice.")
    return GGUFVocabulary(name, fields, tokens, kinds, ids)


def wordpiece_of(token: str, kind: int) -> str:
    if token.startswith(WORD_MARK):
        return token[1:]
    return token if is_bracketed(token) or kind in (UNKNOWN, CONTROL) else f"##{token}"


def is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def build_gguf_byte_level(vocabulary: GGUFVocabulary) -> Any:
    kind = vocabulary.get("pre") or "default"
    pre = PRE_TOKENIZERS.get(kind)
    if pre is None:
        hint = f"Known: {', '.join(PRE_TOKENIZERS)}."
        raise UnsupportedModelError(
            f"{vocabulary.name} splits text in the way {kind!r}, which is not known.", hint=hint
        )
    merges: list[Any] = [tuple(merge.split(" ")) for merge in vocabulary.get("merges") or []]
    if any(len(pair) != 2 for pair in merges):
        raise CorruptFileError(f"{vocabulary.name} has merges that are not of two tokens.")
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=pre.ignore_merges))
    prefix = bool(vocabulary.get("add_space_prefix"))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    template = bos_eos_template(vocabulary, add_bos=pre.add_bos)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), *template])
    return tokenizer


def build_gguf_sentencepiece(vocabulary: GGUFVocabulary) -> Any:
    ids, scores = vocabulary.ids, vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise CorruptFileError(f"{vocabulary.name} has no score for every token.")
    merges = merges_from_scores(vocabulary, scores)
    unknown = vocabulary.role_token("unk")
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in ids))
    prefix = vocabulary.get("add_space_prefix") is not False
    steps: list[Any] = [normalizers.Prepend(WORD_MARK)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", WORD_MARK)])
    undo: list[Any] = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *undo]
    )
    tokenizer.post_processor = processors.Sequence(bos_eos_template(vocabulary, add_bos=True))
    return tokenizer


def merges_from_scores(vocabulary: GGUFVocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose joined piece scores best; as a list, that is all pairs by score."""
    ids = vocabulary.ids
    found: list[tuple[float, int, int, str, str]] = []
    for index, piece in enumerate(vocabulary.tokens):
        if vocabulary.kinds[index] in (UNKNOWN, CONTROL) or len(piece) < 2:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-scores[index], ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def build_gguf_wordpiece(vocabulary: GGUFVocabulary) -> Any:
    tokens = {
        role: vocabulary.role_token(role.removesuffix("_token")) or default for role, default in BERT_TOKENS.items()
    }
    if tokens["unk_token"] not in vocabulary.ids:
        raise CorruptFileError(f"{vocabulary.name} has no token {tokens['unk_token']!r}.")
    # GGUF does not say whether text is lower-cased. A vocabulary without capitals needs it.
    is_cased = any(word != word.lower() for word in vocabulary.tokens if not is_bracketed(word))
    return tokenizers.BertWordPieceTokenizer(vocabulary.ids, **tokens, lowercase=not is_cased)


def bos_eos_template(vocabulary: GGUFVocabulary, *, add_bos: bool) -> list[Any]:
    """The post-processor that adds the tokens of beginning and end, or nothing when neither is added."""
    wanted = vocabulary.get("add_bos_token")
    bos = vocabulary.role_token("bos") if (add_bos if wanted is None else wanted) else None
    eos = vocabulary.role_token("eos") if vocabulary.get("add_eos_token") else None
    if bos is None and eos is None:
        return []
    single = [token for token in (bos, "$A", eos) if token is not None]
    pair = single + [f"{token}:1" if token != "$A" else "$B:1" for token in single]
    special = [(token, vocabulary.ids[token]) for token in {bos, eos} if token is not None]
    return [processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)]


def add_special_tokens(tokenizer: Any, vocabulary: GGUFVocabulary) -> None:
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (UNKNOWN, CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def side_files(vocabulary: GGUFVocabulary, config: Mapping[str, Any]) -> dict[str, bytes]:
    roles = {f"{role}_token": token for role in ROLES if (token := vocabulary.role_token(role)) is not None}
    options: dict[str, Any] = {
        "tokenizer_class": "BertTokenizer" if vocabulary.get("model") == "bert" else "PreTrainedTokenizerFast",
        "add_bos_token": bool(vocabulary.get("add_bos_token")),
        "add_eos_token": bool(vocabulary.get("add_eos_token")),
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    if "max_position_embeddings" in config:
        options["model_max_length"] = config["max_position_embeddings"]
    files: dict[str, bytes] = {}
    template = vocabulary.fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        options["chat_template"] = template
        files["chat_template.jinja"] = template.encode()
    for name, value in (("tokenizer_config.json", options), ("special_tokens_map.json", roles)):
        files[name] = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    return files
