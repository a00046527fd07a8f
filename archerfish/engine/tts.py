"""Requests and results of RWKV-7 TTS models: properties and text in, global (speaker) and semantic (audio) tokens out.

The vocabulary has semantic tokens (0-8191), their end token (8192), TAG_0 to TAG_2 (8193-8195), global tokens
(8196-12291), the tokens of the World tokenizer, and from 77823 on the properties of a voice. A prompt is `properties
TAG_2 text TAG_0`. The output is 32 global tokens, TAG_1, and semantic tokens until their end token. With a reference
voice (zero-shot) the prompt also has the reference's global tokens and TAG_1. Its semantic tokens are checked but not
used: they are not part of a voice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from archerfish.errors import InputTooLargeError, InvalidInputError, did_you_mean, refuse_unknown
from archerfish.params import SamplingParams, Stage, check_whole, items_of, plain_number
from archerfish.sequence import FinishReason
from archerfish.text.world_tokenizer import WorldTokenizer

NUM_SEMANTIC, EOS = 8192, 8192
TAG_0 = 8193
TAG_1 = 8194
TAG_2 = 8195
NUM_GLOBAL, GLOBAL_OFFSET = 4096, 8196
TEXT_OFFSET = 12292
PROPERTY_OFFSET = 77823
VOCAB_SIZE = PROPERTY_OFFSET + 48  # the least of a model
GLOBAL_LENGTH = 32
MAX_SEMANTIC = 2048  # in one output
TOKENS_PER_SECOND = 50  # semantic tokens for a second of audio


def numbered(first: int, names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split(), first)}


# In the order of the prompt, where they follow the token PROPERTY_OFFSET.
PROPERTIES = {
    "age": numbered(13, "child teenager youth-adult middle-aged elderly"),
    "gender": numbered(46, "female male"),
    "emotion": numbered(
        21,
        "UNKNOWN NEUTRAL ANGRY HAPPY SAD FEARFUL DISGUSTED SURPRISED SARCASTIC EXCITED SLEEPY CONFUSED EMPHASIS LAUGHING "
        "SINGING WORRIED WHISPER ANXIOUS NO-AGREEMENT APOLOGETIC CONCERNED ENUNCIATED ASSERTIVE ENCOURAGING CONTEMPT",
    ),
    "pitch": numbered(6, "low medium high very_high"),
    "speed": numbered(1, "very_slow slow medium fast very_fast"),
}
SAMPLING = ("temperature", "top_p", "top_k")
STAGE_DEFAULTS = {
    "global": {"temperature": 1.0, "top_p": 0.95, "top_k": 20},
    "semantic": {"temperature": 1.0, "top_p": 0.95, "top_k": 80},
}
world_tokenizer = WorldTokenizer()  # reads its vocabulary on first use


@dataclass(frozen=True, kw_only=True)
class TTSRequest:
    """A text to speak, its voice, and how its tokens are drawn. Values are checked when it is made."""

    text: str
    age: str = "youth-adult"
    gender: str = "female"
    emotion: str = "NEUTRAL"
    pitch: str = "medium"
    speed: str = "medium"
    ref_global_tokens: Sequence[int] | None = None  # of a reference voice: 32 numbers below 4096
    ref_semantic_tokens: Sequence[int] | None = None  # given together with ref_global_tokens; not used
    temperature: float | None = None  # None, as below: the default of each stage (STAGE_DEFAULTS)
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None  # semantic tokens, at most MAX_SEMANTIC
    seed: int | None = None  # None or -1: drawn when the request arrives

    def __new__(cls, **values: Any) -> Self:
        check_names(values)
        if "text" not in values:
            raise InvalidInputError("A TTS request needs a text.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidInputError(f"text must be a string, not {type(self.text).__name__}.")
        if not self.text.strip():
            raise InvalidInputError("text is empty.", hint="Give a text to speak.")
        for kind in PROPERTIES:
            property_token(kind, getattr(self, kind))
        if (self.ref_global_tokens is None) != (self.ref_semantic_tokens is None):
            missing = "ref_semantic_tokens" if self.ref_semantic_tokens is None else "ref_global_tokens"
            raise InvalidInputError(
                f"{missing} is missing.", hint="Give both reference lists, or none for a new voice."
            )
        if self.ref_global_tokens is not None and self.ref_semantic_tokens is not None:
            global_tokens = read_reference("ref_global_tokens", self.ref_global_tokens, NUM_GLOBAL)
            if len(global_tokens) != GLOBAL_LENGTH:
                raise InvalidInputError(
                    f"ref_global_tokens must have {GLOBAL_LENGTH} tokens, not {len(global_tokens)}."
                )
            semantic_tokens = read_reference("ref_semantic_tokens", self.ref_semantic_tokens, NUM_SEMANTIC)
            object.__setattr__(self, "ref_global_tokens", global_tokens)
            object.__setattr__(self, "ref_semantic_tokens", semantic_tokens)
        object.__setattr__(self, "max_tokens", plain_number(self.max_tokens))
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        _ = self.params()

    def prompt(self) -> list[int]:
        """The token ids before the output."""
        properties = [PROPERTY_OFFSET, *(property_token(kind, getattr(self, kind)) for kind in PROPERTIES)]
        text = [TEXT_OFFSET + token_id for token_id in world_tokenizer.encode(self.text)]
        prompt = [*properties, TAG_2, *text, TAG_0]
        if self.ref_global_tokens is not None:
            prompt += [*(GLOBAL_OFFSET + token_id for token_id in self.ref_global_tokens), TAG_1]
        return prompt

    def params(self, room: int | None = None) -> SamplingParams:
        """How the output is drawn. room: tokens that the model has left; too few are an error."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        stages = []
        if self.ref_global_tokens is None:
            ways = STAGE_DEFAULTS["global"] | given
            stages.append(Stage(first=0, end=NUM_GLOBAL, num_tokens=GLOBAL_LENGTH, offset=GLOBAL_OFFSET, **ways))
            stages.append(Stage(first=TAG_1, end=TAG_1 + 1, num_tokens=1))
        num_semantic = min(self.max_tokens or MAX_SEMANTIC, MAX_SEMANTIC)
        if room is not None:
            num_semantic = self._fitted(num_semantic, room - sum(stage.num_tokens for stage in stages))
        ways = STAGE_DEFAULTS["semantic"] | given
        stages.append(Stage(first=0, end=EOS + 1, num_tokens=num_semantic, stop_id=EOS, **ways))
        return SamplingParams(stages=stages, seed=self.seed)

    def _fitted(self, num_semantic: int, room: int) -> int:
        if room >= num_semantic or (self.max_tokens is None and room > 0):
            return min(num_semantic, room)
        message = (
            f"The text leaves room for {max(room, 0):,} semantic tokens in this model; max_tokens is {num_semantic:,}."
        )
        hint = "Shorten the text" + (", or lower max_tokens." if self.max_tokens is not None else ".")
        raise InputTooLargeError(message, hint=hint)


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are not fields of TTSRequest."""
    refuse_unknown(names, TTSRequest.__dataclass_fields__, "field of a TTS request")


@dataclass(frozen=True)
class TTSTokens:
    """The result of a request, or a piece of it: `global_tokens, semantic_tokens = tokens`. Ids begin at 0 in each
    list."""

    global_tokens: list[int] = field(default_factory=list)  # 32 for a speaker
    semantic_tokens: list[int] = field(default_factory=list)  # 50 for a second of audio
    finish_reason: FinishReason | None = None  # stop: the end token came; length: max_tokens
    error: BaseException | None = None  # with finish_reason error
    num_prompt_tokens: int = 0  # set in a whole result

    def __iter__(self) -> Iterator[list[int]]:
        return iter((self.global_tokens, self.semantic_tokens))

    @property
    def seconds(self) -> float:
        """The length of the audio."""
        return len(self.semantic_tokens) / TOKENS_PER_SECOND


def read_output(token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Global and semantic tokens of an output or a part of it, without tags and end token."""
    global_tokens = [i - GLOBAL_OFFSET for i in token_ids if GLOBAL_OFFSET <= i < GLOBAL_OFFSET + NUM_GLOBAL]
    return global_tokens, [i for i in token_ids if i < NUM_SEMANTIC]


def property_token(kind: str, name: object) -> int:
    """The token of a property. Case does not matter, nor do `-`, `_` and spaces differ; `low_pitch` is `low`."""
    names = PROPERTIES[kind]
    if not isinstance(name, str):
        raise InvalidInputError(f"{kind} must be a string, not {name!r}.", hint=f"It is one of {', '.join(names)}.")
    spelled = plain(name).removesuffix(f"_{kind}")
    for known, number in names.items():
        if plain(known) == spelled:
            return PROPERTY_OFFSET + number
    hint = (
        did_you_mean(name.upper() if kind == "emotion" else name.lower(), names) or f"It is one of {', '.join(names)}."
    )
    raise InvalidInputError(f"There is no {kind} {name!r}.", hint=hint)


def plain(name: str) -> str:
    return name.strip().casefold().replace("-", "_").replace(" ", "_")


def read_reference(name: str, values: Any, end: int) -> tuple[int, ...]:
    """The token ids of a list or an array."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    token_ids = items_of(name, listed, "a list of token ids")
    if not token_ids:
        raise InvalidInputError(f"{name} is empty.")
    for place, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < end:
            raise InvalidInputError(f"{name}[{place}] must be a whole number from 0 to {end - 1}, not {token_id!r}.")
    return token_ids
