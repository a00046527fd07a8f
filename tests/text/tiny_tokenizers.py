"""Small tokenizers of every kind of vocabulary, and the real one of SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from archerfish.config import HubConfig
from archerfish.store.converter import ensure_converted
from archerfish.store.names import resolve_model
from archerfish.text.text_tokenizer import BYTE_OF_CHARACTER, TextTokenizer
from tests.engine.tiny_llama import save_tiny_llama

MARK = "\u2581"
WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    MARK,
    f"{MARK}the",
    f"{MARK}cat",
    "s",
    "a",
    f"{MARK}a",
    "b",
    "\n",
    "你",
    "�",
    f"{MARK}{MARK}",
]

JSON_WORDS = ['{"', '":', '",', '"}', "ab", "bc", "abc", "12", "true", "}}", "  ", "},{"]
END = 1  # of byte_level
ROWS = 320  # of a model over byte_level, which has fewer tokens


def smollm2_directory() -> Path:
    hub = HubConfig()
    return ensure_converted(resolve_model("smollm2-135m-instruct", hub), dtype="bfloat16", hub=hub)


def save(directory: Path, tokenizer: Tokenizer, **settings: Any) -> TextTokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return TextTokenizer(directory)


def byte_fallback(directory: Path, *, strips: bool = True, **settings: Any) -> TextTokenizer:
    """As Llama 2: pieces with a mark for the space before a word, and a token for every byte."""
    vocabulary = WORDS + [f"<0x{value:02X}>" for value in range(256)]
    model = models.BPE(
        {word: index for index, word in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    steps: list[Any] = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return save(directory, tokenizer, bos_token="<s>", eos_token="</s>", **settings)


def save_text_llama(directory: Path, max_len: int, **settings: Any) -> Path:
    """A tiny Llama with the vocabulary of `byte_fallback`."""
    byte_fallback(directory, **settings)
    return save_tiny_llama(directory, vocab_size=288, max_position_embeddings=max_len)


def metaspace(directory: Path, **settings: Any) -> TextTokenizer:
    """As T5 and XLM-R: the mark is handled by one decoder, which strips the first one."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS[:3]])
    return save(directory, tokenizer, bos_token="<s>", eos_token="</s>", **settings)


def word_pieces(directory: Path) -> TextTokenizer:
    words = ["[UNK]", "the", "cat", "##s", "##a", ".", ",", "n't", "[CLS]"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return save(directory, tokenizer)


def word_ends(directory: Path) -> TextTokenizer:
    """As the first GPT: the end of a word is marked."""
    words = ["<unk>", "the</w>", "cat</w>", "c", "at</w>", ".</w>"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return save(directory, tokenizer)


def byte_level(directory: Path, *, without: str = "", **settings: Any) -> TextTokenizer:
    """Every byte but those of some characters, and a few words that need no merge."""
    alphabet = [character for character, value in BYTE_OF_CHARACTER.items() if chr(value) not in without]
    vocabulary = ["<start>", "<end>", *alphabet, *(word.replace(" ", "Ġ") for word in JSON_WORDS)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in vocabulary[:2]])
    return save(directory, tokenizer, **{"bos_token": "<start>", "eos_token": "<end>", **settings})
