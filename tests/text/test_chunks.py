"""Token ids out of known chunks against the Rust tokenizer's own."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from archerfish.errors import InvalidInputError
from archerfish.text import chunks
from archerfish.text.chunks import Block, ChunkTokenizer, KnownChunks
from archerfish.text.tokenizer import FastTokenizer, find_tokenizer, open_tokenizer

MAX_LENGTHS = (3, 4, 7, 16, 64, 128, 500)
PIECES = [
    "the", "The", "THE", "cat", "cats", "unaffable", "naïve", "e\u0301te\u0301", "Ünïcödé", "İstanbul", "ΣΑΣ", "Straße",
    "\u01c5", "\ufb01", "[SEP]", "[CLS]", "[sep]", "[ SEP]", "[S\u0301EP]", "[SE\x00P]", "[MASK]x", "[", "]", "[1]", "<s>",
    "<mark>", "banana", "ba nana", "ban\u00e1na", "two\nlines", ".", "...", "!?", "_", "a_b", "don't", "don\u2019t",
    "\u201cquoted\u201d", "$9.99", "a=b", "e-mail@host.org", "\u2260", "\u226emark>", "\u037e", "\u1fef", "今天", "天气x好",
    "日本語の", "한국어", "ไทย", "हिन्दी", "🙂", "\u0301", ".\u0301x", "a\u0301\u0327", "a\u200db", "\U0001d518", "\x00",
    "\x01", "\x0b", "\x0c", "\x1c", "\x1f", "\x7f", "\x85", "\xa0", "\xad", "\u1680", "\u2003", "\u200b", "\u200d", "\u2028",
    "\u2029", "\u202f", "\u3000", "\ufeff", "\ufffd", "\ue000", "\U000e0001", "x" * 15, "x" * 16, "y" * 64, "y" * 65,
    "z" * 99, "z" * 100, "z" * 101, "é" * 7, "é" * 8, "é" * 32, "é" * 33, " ", "  ", "\t", "\n", "\r\n", "",
]  # fmt: skip
AWKWARD = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=30).map("".join)
SPACED = st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=30).map(" ".join)
TEXTS = st.lists(AWKWARD | SPACED | st.text(), max_size=6)


def small(*, added: tuple[AddedToken, ...] = (), post: Any = None, **normalizer: Any) -> Tokenizer:
    """A tokenizer of letters and some words, among them accented, Chinese and Greek ones."""
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, *"éüßσάİi̇今天日本語한\u0301\u201c\u2019"]
    words = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "<s>",
        "the",
        "The",
        "cat",
        "##s",
        "un",
        "##aff",
        "naive",
        "naïve",
        "don",
        "straße",
    ]
    vocabulary = dict.fromkeys([*words, *letters, *(f"##{letter}" for letter in letters)])
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "<s>", *added])
    tokenizer.post_processor = post
    return tokenizer


BERT = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
LONG = processors.TemplateProcessing("[CLS] <s> $A [SEP]", "$A $B", [("[CLS]", 1), ("<s>", 3), ("[SEP]", 2)])
FLAGGED = (
    AddedToken("<mark>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("banana", single_word=True, normalized=False),
    AddedToken("ba nana", rstrip=True, normalized=False),
    AddedToken("two\nlines", normalized=False),
)
VARIANTS: dict[str, Callable[[], Tokenizer]] = {
    "bert": lambda: small(post=BERT),
    "cased": lambda: small(lowercase=False, post=BERT),
    "cased without accents": lambda: small(lowercase=False, strip_accents=True, post=BERT),
    "lower case with accents": lambda: small(strip_accents=False, post=BERT),
    "chinese together": lambda: small(handle_chinese_chars=False, post=LONG),
    "not cleaned": lambda: small(clean_text=False, post=BERT),
    "no special tokens": lambda: small(),
    "roberta": lambda: small(post=processors.RobertaProcessing(("[SEP]", 2), ("<s>", 3))),
    "flagged tokens": lambda: small(added=FLAGGED, post=BERT),
}
SIZES: dict[str, dict[str, int]] = {
    "usual": {},
    "crowded": {"MAX_CHUNKS": 120, "MAX_IDS": 300, "MAX_LONG_CHUNKS": 3, "SLOT_BITS": 6, "MAX_PROBES": 3},
}


def limit(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    for name, value in values.items():
        monkeypatch.setattr(chunks, name, value)


def set_size(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    """Few texts are looked up too, and always; what is known is a lot or very little."""
    limit(monkeypatch, MIN_CHARACTERS=2, MAX_PAUSE=0, BLOCK_CHARACTERS=1000, **SIZES[size])


@pytest.fixture(
    params=[*((name, "usual") for name in ("minilm", *VARIANTS)), ("minilm", "crowded"), ("roberta", "crowded")]
)
def both(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, minilm_source: Path, tmp_path: Path
) -> tuple[FastTokenizer, Tokenizer]:
    """A tokenizer under test, which keeps what it learns, and the Rust one by itself."""
    (name, size), directory = request.param, minilm_source
    set_size(monkeypatch, size)
    if name != "minilm":
        directory = tmp_path
        VARIANTS[name]().save(str(directory / "tokenizer.json"))
    tokenizer = FastTokenizer(directory, 256)
    assert tokenizer._chunks is not None
    return tokenizer, open_tokenizer(find_tokenizer(directory))


def ids_of(tokenizer: FastTokenizer, texts: list[str], max_length: int | None = None) -> list[list[int]]:
    return [text.token_ids.tolist() for text in tokenizer.tokenize(texts, max_length)]


def theirs(rust: Tokenizer, texts: list[str], max_length: int = 256) -> list[list[int]]:
    rust.enable_truncation(max_length)
    return [encoding.ids for encoding in rust.encode_batch(texts)]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(texts=TEXTS, max_length=st.sampled_from(MAX_LENGTHS))
def test_the_same_ids_as_the_rust_tokenizer(
    both: tuple[FastTokenizer, Tokenizer], texts: list[str], max_length: int
) -> None:
    """Red if a text is cut where a neighbour matters, if an added token is overlooked, or if the end is cut
    elsewhere."""
    ours, rust = both
    max_length += rust.num_special_tokens_to_add(False)
    assert ids_of(ours, texts, max_length) == theirs(rust, texts, max_length)
    cut = [bool(encoding.overflowing) for encoding in rust.encode_batch(texts)]
    assert [text.is_cut for text in ours.tokenize(texts, max_length)] == cut


def test_every_pair_of_pieces_and_words_that_differ_in_one_byte(both: tuple[FastTokenizer, Tokenizer]) -> None:
    ours, rust = both
    others = random.Random(0)
    words = [("a" * place + "b" + "a" * length)[:length] for length in range(1, 19) for place in range(length + 1)]
    texts = [f"{a}{b} {b}.{a}" for a in PIECES for b in others.sample(PIECES, 10)]
    texts += [" ".join(words[start : start + 30]) for start in range(0, len(words), 30)]
    for _ in range(2):  # the second time most are known
        assert ids_of(ours, texts) == theirs(rust, texts)


def test_known_text_does_not_reach_the_rust_tokenizer(minilm_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if what was learned is not found, for any reason: accents, line ends, long words, repeated spaces, "[1]"."""
    tokenizer = FastTokenizer(minilm_source, 256)
    assert tokenizer._chunks is not None
    text = "The naïve archerfish,  it\u2019s said,\n spits [1] water\tat unsuspectingly-incomprehensibilities 今天."
    texts = [text * 4, "", "  "]
    first = tokenizer._chunks.tokenize(texts, 256)
    assert all(ids is not None for ids in first)
    monkeypatch.setattr(tokenizer._chunks, "_rust", None)
    again = tokenizer._chunks.tokenize(texts, 256)
    assert [ids.tolist() for ids in again if ids is not None] == [ids.tolist() for ids in first if ids is not None]


def test_added_tokens_and_very_long_texts_use_the_rust_tokenizer(minilm_source: Path) -> None:
    tokenizer = ChunkTokenizer.of(open_tokenizer(find_tokenizer(minilm_source)), 256)
    assert tokenizer is not None
    found = tokenizer.tokenize(["some words " * 50, "a [SEP] b", "x" * 65, "a" + "." * chunks.BLOCK_CHARACTERS], 256)
    assert [ids is None for ids in found] == [False, True, True, True]


def test_only_bert_tokenizers_are_supported(minilm_source: Path) -> None:
    assert ChunkTokenizer.of(open_tokenizer(find_tokenizer(minilm_source)), 256) is not None
    assert ChunkTokenizer.of(small(post=BERT), 2) is None
    assert ChunkTokenizer.of(small(added=(AddedToken("<x>", normalized=True),)), 256) is None
    twice = small(post=processors.TemplateProcessing("$A [SEP] $A", "$A $B", [("[SEP]", 2)]))
    assert ChunkTokenizer.of(twice, 256) is None
    other = small()
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    assert ChunkTokenizer.of(other, 256) is None
    other = small()
    other.normalizer = normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Strip()])
    assert ChunkTokenizer.of(other, 256) is None
    no_unknown = Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    no_unknown.normalizer, no_unknown.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    assert ChunkTokenizer.of(no_unknown, 256) is None


def test_a_length_below_the_special_tokens_is_refused(minilm_source: Path) -> None:
    with pytest.raises(InvalidInputError, match="special tokens alone are 2"):
        FastTokenizer(minilm_source, 256).tokenize(["word " * 100], 2)


def test_a_long_chunk_is_not_truncated(tmp_path: Path) -> None:
    """The model's length cuts what the Rust tokenizer reads, and so what is learned: red if that is kept for other
    lengths."""
    small(post=BERT).save(str(tmp_path / "tokenizer.json"))
    text = "".join(random.Random(1).choices(string.ascii_lowercase, k=40)) + " the" * 100
    tokenizer, rust = FastTokenizer(tmp_path, 20), small(post=BERT)
    for max_length in (20, 60, 200):
        assert ids_of(tokenizer, [text], max_length) == theirs(rust, [text], max_length)


def new_texts(seed: int, num_texts: int) -> list[str]:
    """Texts of words that have not been seen, short and long."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.choice((8, 9, 20)))) for _ in range(num_texts * 40)]
    return [" ".join(words[start : start + 40]) for start in range(0, len(words), 40)]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever new chunks: red if anything grows beyond its limit, or if nothing can be learned after that."""
    limit(monkeypatch, MAX_CHUNKS=2000, MAX_IDS=9000, MAX_LONG_CHUNKS=300, MAX_PAUSE=0)
    tokenizer = ChunkTokenizer.of(small(post=BERT), 256)
    assert tokenizer is not None
    seen = set()
    for seed in range(40):
        tokenizer.tokenize(new_texts(seed, 20), 256)
        known = tokenizer._known
        seen.add(id(known))
        assert len(known.counts) == 2000 and len(known.ids) == 9000
        assert known._num_chunks <= 2000 and known._num_ids <= 9000 and len(known.long) < 300
    assert len(seen) > 3
    plain = ["the cats " * 40]
    tokenizer.tokenize(plain, 256)
    assert tokenizer.tokenize(plain, 256)[0] is not None


def test_pauses_grow_while_chunks_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of unknown chunks only: red if each is cut and looked up in vain, or if texts that are known then stay
    slow."""
    cut: list[Block] = []
    of = Block.of

    def count(joined: str) -> Block:
        cut.append(of(joined))
        return cut[-1]

    monkeypatch.setattr(Block, "of", count)
    tokenizer = ChunkTokenizer.of(small(post=BERT), 256)
    assert tokenizer is not None
    for seed in range(200):
        tokenizer.tokenize(new_texts(seed, 8), 256)
    assert 5 <= len(cut) <= 12
    plain = ["the cats " * 40] * 8
    assert any(tokenizer.tokenize(plain, 256)[0] is not None for _ in range(40))
    assert all(tokenizer.tokenize(plain, 256)[0] is not None for _ in range(40))


def test_chunks_that_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one slot, of which eight places are tried: red if a chunk is taken for another."""
    monkeypatch.setattr(KnownChunks, "_slots_of", lambda self, heads, tails: (heads * 0).astype("int64"))
    rust = small(post=BERT)
    tokenizer = ChunkTokenizer.of(rust, 256)
    assert tokenizer is not None
    words = ["the", "cat", "cats", "a", "ab", "abc", "abcdefgh", "abcdefghi", "a\x00", "\x00", "unaff"]
    tokenizer.tokenize([" ".join(words * 20)], 256)
    found = tokenizer.tokenize([f" {word} " for word in words] * 4, 256)[: len(words)]
    expected = [rust.encode(word).ids for word in words]
    assert sum(ids is not None for ids in found) == 7  # and the empty chunk
    assert all(ids is None or ids.tolist() == wanted for ids, wanted in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_threads_get_the_same_ids(size: str, minilm_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a thread reads what another is writing, or numbers of chunks that have been forgotten meanwhile."""
    set_size(monkeypatch, size)
    draw, words = random.Random(3), [*new_texts(5, 20)[0].split(), *PIECES[:40]]
    jobs = [[" ".join(draw.choices(words, k=60)) for _ in range(40)] for _ in range(16)]
    rust = open_tokenizer(find_tokenizer(minilm_source))
    expected = [theirs(rust, job) for job in jobs]
    tokenizer = FastTokenizer(minilm_source, 256)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(partial(ids_of, tokenizer), jobs)) == expected
