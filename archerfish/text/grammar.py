"""What rules tokens out: grammars of requests, compiled by llguidance for the vocabulary of a model, and lists of
tokens."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from archerfish.background import Lazy, in_background
from archerfish.errors import InvalidInputError, UnsupportedModelError
from archerfish.sequence import TokenGrammar, TokenMatcher
from archerfish.text.text_tokenizer import TextTokenizer
from archerfish.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT, MAX_KEPT_BYTES = 64, 1 << 19  # compiled grammars, and bytes of their sources (a thousandth of their memory)
MAX_LEXER_STATES = 50_000  # of one grammar; each takes 1 to 2 kB
MAX_STEP_ITEMS = 10_000  # of the parser in one step, to bound the time of a step
MAX_COMPILE_BYTES = 1 << 30  # address space of the process that tries a grammar, its stack included
STACK_BYTES = 256 << 20  # llguidance recurses for nested rules; 1,000 of them overflow the default stack
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,64}"}  # without a bound a model may write blanks without end
OVERLAP = "the alternatives of oneOf may overlap, use anyOf"
R = TypeVar("R")
logger = logging.getLogger("archerfish")
_stack_lock = threading.Lock()


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches the latest. Safe to use from several threads at once."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, model_name: str = "this model", max_seconds: int = 3
    ) -> None:
        """max_seconds: CPU time that compiling one grammar may take."""
        self._max_seconds = max_seconds
        self._vocabulary = Lazy(partial(read_vocabulary, tokenizer, vocab_size, model_name))
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Mapping[str, Any]) -> CompiledGrammar:
        """Compile a `SamplingParams.grammar`; an InvalidInputError says what is wrong with it."""
        key = json.dumps(grammar)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        vocabulary = self._vocabulary.get()
        kind, value = str(grammar["kind"]), grammar["value"]
        found = with_deep_stack(lambda: CompiledGrammar(vocabulary, kind, value, self._max_seconds))
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > MAX_KEPT or sum(map(len, self._kept)) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return found

    def warm_up(self) -> None:
        """Read the vocabulary now, which takes up to a second, instead of for the first grammar."""
        self._vocabulary.get()


def read_vocabulary(tokenizer: Tokenizer | None, vocab_size: int, model_name: str) -> LLTokenizer:
    if tokenizer is None:
        raise InvalidInputError(f"{model_name} has no tokenizer, which a grammar needs.", hint="Leave out grammar.")
    ends = list(tokenizer.eos_token_ids)
    if not ends:
        hint = "State eos_token_id in its generation_config.json."
        raise InvalidInputError(f"{model_name} has no end token, with which a grammar ends a text.", hint=hint)
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        hint = "Run `pip install 'archerfish[grammar]'`."
        raise InvalidInputError(
            "Grammars need the package llguidance, which is not installed here.", hint=hint
        ) from None
    source = (
        tokenizer.to_json() if isinstance(tokenizer, TextTokenizer) else TokenizerWrapper(ByteVocabulary(tokenizer))
    )
    try:
        try:
            return LLTokenizer(source, n_vocab=vocab_size, eos_token=ends)
        except ValueError:  # the model has fewer rows than its tokenizer has tokens
            return LLTokenizer(source, eos_token=ends)
    except Exception as error:
        message = f"Grammars cannot be used with the tokenizer of {model_name}: {error}."
        raise UnsupportedModelError(message, hint="Leave out grammar.") from error


class ByteVocabulary:
    """A tokenizer of byte tokens in the form that llguidance takes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_tokens
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_ids[0], tokenizer.bos_token_id
        self.special_token_ids = list(special)
        self.tokens = [
            special[i].encode() if i in special else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class CompiledGrammar:
    """A compiled grammar. Each sequence gets its own matcher."""

    def __init__(self, vocabulary: LLTokenizer, kind: str, value: Any, max_seconds: int = 0) -> None:
        """max_seconds: as in GrammarCompiler; 0: no limit."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_max_items=MAX_STEP_ITEMS, verbose_errors=False)
        try:
            text = grammar_text(kind, value)
        except ValueError as error:
            raise InvalidInputError(f"The grammar of kind {kind} is not valid: {error}.") from None
        if max_seconds:
            try_compiling(kind, text, max_seconds)
        self._num_words = -(-vocabulary.vocab_size // 32)
        self._first = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if self._first.is_error():
            raise InvalidInputError(f"The grammar of kind {kind} is not valid: {reason_of(self._first.get_error())}.")
        self._lock = threading.Lock()
        first = GrammarMatcher(self._first.deep_copy(), self._num_words)
        self._first_bits = first.find_bits()  # raises if the grammar allows no first token

    def start(self) -> GrammarMatcher:
        with self._lock:
            return GrammarMatcher(self._first.deep_copy(), self._num_words, self._first_bits)


class GrammarMatcher:
    """The TokenMatcher of one sequence."""

    def __init__(self, matcher: LLMatcher, num_words: int, first_bits: npt.NDArray[np.int32] | None = None) -> None:
        """first_bits: the result of `find_bits` before the first token, if it is known."""
        self._matcher, self._first_bits = matcher, first_bits
        self._num_words = num_words  # of the tokenizer's vocabulary
        self._num_taken = 0

    def fill(self, output: Sequence[int], bits: npt.NDArray[np.int32]) -> None:
        new = list(output[self._num_taken :])
        self._num_taken = len(output)
        if new and not self._matcher.consume_tokens(new):
            raise self._dead_end()
        first = None if self._num_taken else self._first_bits
        found = (self.find_bits() if first is None else first)[: len(bits)]
        bits[: len(found)] = found
        bits[len(found) :] = 0
        if not found.any():
            raise self._dead_end()

    def copy(self) -> GrammarMatcher:
        copied = GrammarMatcher(self._matcher.deep_copy(), self._num_words)
        copied._num_taken = self._num_taken
        return copied

    def forced(self) -> list[int]:
        return list(self._matcher.compute_ff_tokens())

    def find_bits(self) -> npt.NDArray[np.int32]:
        """A bit for every token: whether it may follow. End tokens may follow where the grammar is complete."""
        bits = np.zeros(self._num_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if (
            self._matcher.is_error()
            or not bits.any()
            or (self._matcher.is_stopped() and not self._matcher.is_accepting())
        ):
            raise self._dead_end()
        return bits

    def _dead_end(self) -> InvalidInputError:
        stated = self._matcher.get_error()
        has_reason = stated and not stated.startswith("NoExtension")
        why = reason_of(stated) if has_reason else "no token of the vocabulary may follow"
        hint = "The vocabulary cannot write what it asks for, or it is too complex: make it simpler."
        return InvalidInputError(f"The grammar came to a dead end after {self._num_taken} tokens: {why}.", hint=hint)


def with_deep_stack(work: Callable[[], R]) -> R:
    """Run `work` in a thread with a large stack and wait for its result."""
    with _stack_lock:
        usual = threading.stack_size(STACK_BYTES)
        try:
            running = in_background(work, "grammar", daemon=True)
        finally:
            threading.stack_size(usual)
    return running.result()


def try_compiling(kind: str, text: str, max_seconds: int) -> None:
    """Compile a grammar in a process of its own, whose time and memory are limited: llguidance's limits are not enough.

    A grammar of 40 bytes can take minutes and gigabytes, and a thread that compiles it cannot be stopped.
    """
    import subprocess  # takes long to import

    import llguidance

    script = Path(__file__).with_name("grammar_trial.py")
    limits = (max_seconds, MAX_COMPILE_BYTES, STACK_BYTES, MAX_LEXER_STATES, MAX_STEP_ITEMS)
    command = [sys.executable, "-IS", str(script), str(Path(llguidance.__file__).parent), *map(str, limits)]
    tried = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if tried.returncode:
        logger.info(
            "A grammar was refused: exit status %s. %s", tried.returncode, tried.stderr.decode(errors="replace")
        )
        message = f"The grammar of kind {kind} is too complex to compile: it takes more than {max_seconds} s or 1 GiB."
        raise InvalidInputError(message, hint="Make it simpler, or raise the server's grammar_seconds.")


def grammar_text(kind: str, value: Any) -> str:
    """A grammar in llguidance's language. Compiling it shows whether it is valid."""
    from llguidance import LLMatcher, regex_to_lark

    match kind:
        case "json":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)
        case "json_schema":
            from archerfish.text.json_schema import prepare_schema

            schema, remarks = prepare_schema(value)
            for remark in remarks:
                logger.warning("JSON schema: %s.", remark)
            return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, 'd')}/")  # digits are 0 to 9
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
        case _:
            return LLMatcher.grammar_from_lark(value)


def reason_of(message: str) -> str:
    """The line of an error message of llguidance that says what is wrong; the other lines show where."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    stated = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    reason = (stated or (lines[0] if lines else "it gives no reason")).rstrip(".")
    return OVERLAP if reason.startswith("oneOf constraints are not supported") else reason


# Limits of single tokens: bad_words and allowed_token_ids, alone or beside a grammar


class TokenLimits:
    """The TokenGrammar of a request. allowed: None stands for all tokens. banned: token sequences that must not be
    written.

    A sequence of several tokens is ruled out at its last token, where the others stand before it.
    """

    def __init__(
        self,
        grammar: TokenGrammar | None,
        vocab_size: int,
        allowed: Iterable[int] | None,
        banned: Sequence[Sequence[int]],
    ) -> None:
        self._grammar = grammar
        banned = [ids for ids in banned if max(ids) < vocab_size]  # the model cannot write the others
        is_allowed = np.full(-(-vocab_size // 32) * 32, allowed is None)
        is_allowed[vocab_size:] = False
        is_allowed[[] if allowed is None else list(allowed)] = True
        self.longer = [list(ids) for ids in banned if len(ids) > 1]
        is_allowed[[ids[0] for ids in banned if len(ids) == 1]] = False
        self.bits: npt.NDArray[np.uint32] = np.packbits(is_allowed, bitorder="little").view(np.uint32)

    def start(self) -> LimitedMatcher:
        return LimitedMatcher(self, None if self._grammar is None else self._grammar.start())


class LimitedMatcher:
    """The TokenMatcher of one sequence."""

    def __init__(self, limits: TokenLimits, inner: TokenMatcher | None) -> None:
        self._limits, self._inner = limits, inner

    def copy(self) -> LimitedMatcher:
        return LimitedMatcher(self._limits, None if self._inner is None else self._inner.copy())

    def forced(self) -> list[int]:
        return []

    def fill(self, output: Sequence[int], bits: npt.NDArray[np.int32]) -> None:
        if self._inner is None:
            bits[:] = -1
        else:
            self._inner.fill(output, bits)
        words: npt.NDArray[Any] = bits.view(np.uint32)
        words &= self._limits.bits
        for *before, last in self._limits.longer:
            if list(output[-len(before) :]) == before:
                words[last // 32] &= ~np.uint32(1 << last % 32)
        if not words.any():
            raise InvalidInputError(
                f"No token may follow after {len(output)} tokens: allowed_token_ids, bad_words and grammar rule them all out."
            )


def word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The token ids of words, as a text begins with them and as they stand behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.strip(), f" {word.strip()}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False, plain=True))] = None
    return [list(ids) for ids in found if ids]
