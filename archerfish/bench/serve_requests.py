"""What `bench serve` asks servers for, and the account of every request: sizes, bodies, and what came back when."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from archerfish.bench.serve_http import EventParser
from archerfish.errors import InvalidOptionError

PATHS = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "ids": "/v1/completions", "embeddings": "/v1/embeddings",
}  # fmt: skip
OUTCOMES = ("ok", "refused", "error", "timeout", "disconnected", "left")  # left: we hung up on purpose
REFUSALS = (429, 503, 504)  # 504: let in, but its turn did not come before its deadline
DONE = b"[DONE]"
LEAST_ID, MOST_ID = 100, 8000  # ids that every vocabulary has, past the special ones
# Words that most vocabularies have as one token, also after a space.
COMMON = """
about above across after again against air all almost along also always among animal another answer any area around ask away
back base beautiful because become bed before began behind being below best better between big bird black blue boat body
book both box boy bring brought build built busy call came car care carry case cause center certain change check child
children city class clear close cold color come common complete contain correct could country course cover cross cut dark
day deep develop direct distance dog done door down draw drive dry during each early earth east eat end enough even ever
every example eye face fact fall family far farm fast father feel feet few field figure fill final find fine fire first fish
five fly follow food foot force form found four free friend from front full game gave girl give gold good great green ground
group grow half hand happen hard have head hear heard heat help here high hold home horse hot hour house hundred idea island
just keep kind king knew know land language large last late laugh lead learn leave left less letter life light like line
list listen little live long look love machine made main make many map mark mean measure men might mile mind minute money
moon more morning most mother mountain move much music must name near need never new next night north note nothing notice
now number object ocean often old once only open order other over own page paper part pass pattern people person picture
piece place plain plan plant play point port possible power press problem produce product pull put question quick rain reach
read ready real record red remember rest right river road rock room round rule run same school science sea second seem
sentence serve set several shape ship short should show side simple since sing six size sleep slow small snow some song soon
sound south space special spell stand star start state stay step still stood stop story street strong study such sun sure
surface system table tail take talk teach tell test than their them then there these thing think though thought thousand
three through time together told took top toward town travel tree true try turn under unit until upon use usual very voice
wait walk want war warm watch water week weight well went were west what wheel when where which while white whole why wind
with wonder wood word work world would write year yellow yes young
"""
WORDS = COMMON.split()


@dataclass(frozen=True)
class Shape:
    """Requests of one kind: tokens in, tokens out, and how often they come among others."""

    kind: str
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int] = (0, 0)
    num_texts: int = 1  # of an embeddings request
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Of KIND:IN[/OUT][xTEXTS][@WEIGHT], where IN and OUT are numbers or ranges: chat:64/16, ids:32-512/16-128@3."""
        number = r"(\d+)(?:-(\d+))?"
        found = re.fullmatch(rf"(\w+):{number}(?:/{number})?(?:x(\d+))?(?:@(\d+(?:\.\d+)?))?", text.strip())
        hint = "Write chat:64/16, completions:32-512/16-128, ids:64/16 or embeddings:32x4, with @WEIGHT behind it in a mix."
        if not found or found[1] not in PATHS:
            raise InvalidOptionError(f"{text!r} is no workload.", hint=hint)
        is_embedding = found[1] == "embeddings"
        low, high = int(found[2]), int(found[3] or found[2])
        low_out, high_out = (int(found[4]), int(found[5] or found[4])) if found[4] else (0, 0)
        shape = cls(found[1], (low, high), (low_out, high_out), int(found[6] or 1), float(found[7] or 1))
        if is_embedding == bool(found[4]) or (found[6] and not is_embedding):
            raise InvalidOptionError(f"{text!r}: only embeddings have no output tokens, and only they take xTEXTS.", hint=hint)
        least_out = 0 if is_embedding else 1
        if not (1 <= low <= high and least_out <= low_out <= high_out and shape.num_texts >= 1 and shape.weight > 0):
            raise InvalidOptionError(f"{text!r} has a number that is too small, or a range the wrong way round.", hint=hint)
        return shape

    def __str__(self) -> str:
        shown = f"{self.kind}:{span(self.input_tokens)}"
        shown += f"/{span(self.output_tokens)}" if self.streams else ""
        shown += f"x{self.num_texts}" if self.num_texts > 1 else ""
        return shown + (f"@{self.weight:g}" if self.weight != 1 else "")

    @property
    def streams(self) -> bool:
        return self.kind != "embeddings"


def span(bounds: tuple[int, int]) -> str:
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]}-{bounds[1]}"


@dataclass(frozen=True)
class Manner:
    """How a server is spoken to: the names of its models and which extras it takes."""

    model: str = ""
    embedding_model: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)  # of requests that generate: ignore_eos, stream_options


@dataclass(slots=True)
class Record:
    """The account of one request. Times are those of one clock, nan where nothing happened."""

    index: int
    kind: str
    intended_s: float  # when it was meant to be sent: what latencies count from
    sent_s: float = float("nan")
    first_s: float = float("nan")  # first token
    ended_s: float = float("nan")
    outcome: str = ""
    status: int = 0
    code: str = ""  # of an error, as the server or we name it
    retry_after_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_wanted_tokens: int = 0
    is_cut: bool = False  # by its deadline, with a part of its tokens
    chunk_times: array[float] = field(default_factory=lambda: array("d"))

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.intended_s


@dataclass(frozen=True)
class Prepared:
    """A request that is ready to be sent."""

    kind: str
    path: str
    body: bytes
    num_texts: int
    num_wanted_tokens: int


class RequestMaker:
    """Makes the requests of a load; the same seed and index give the same request, whatever came before."""

    def __init__(self, shapes: Sequence[Shape], manner: Manner, seed: str, deadline_s: float = 0.0) -> None:
        self._shapes, self._manner, self._seed = list(shapes), manner, seed
        self._deadline = {"deadline_s": deadline_s} if deadline_s else {}
        self._weights = [shape.weight for shape in shapes]

    def make(self, index: int) -> Prepared:
        chance = random.Random(f"{self._seed}:{index}")
        shape = chance.choices(self._shapes, self._weights)[0]
        length, wanted = chance.randint(*shape.input_tokens), chance.randint(*shape.output_tokens)
        body = self._body(shape, length, wanted, chance)
        encoded = json.dumps(body | self._deadline, separators=(",", ":")).encode()
        return Prepared(shape.kind, PATHS[shape.kind], encoded, shape.num_texts, wanted)

    def _body(self, shape: Shape, length: int, wanted: int, chance: random.Random) -> dict[str, Any]:
        if shape.kind == "embeddings":
            texts = [" ".join(chance.choices(WORDS, k=length)) for _ in range(shape.num_texts)]
            return {"model": self._manner.embedding_model, "input": texts if shape.num_texts > 1 else texts[0]}
        common = {"model": self._manner.model, "max_tokens": wanted, "temperature": 0, "stream": True, **self._manner.extras}
        if shape.kind == "ids":
            return {"prompt": [chance.randint(LEAST_ID, MOST_ID) for _ in range(length)], **common}
        text = " ".join(chance.choices(WORDS, k=length))
        if shape.kind == "completions":
            return {"prompt": text, **common}
        return {"messages": [{"role": "user", "content": text}], **common}


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None

    @property
    def has_token(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls)))


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamChunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class EmbeddingsAnswer(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: Usage | None = None


_decode_chunk = msgspec.json.Decoder(StreamChunk).decode
_decode_embeddings = msgspec.json.Decoder(EmbeddingsAnswer).decode


class Account:
    """The receiver of one answer, which writes down in a Record what came and when."""

    def __init__(self, record: Record, prepared: Prepared) -> None:
        self.record = record
        self._prepared = prepared
        self._events = EventParser() if prepared.kind != "embeddings" else None
        self._body = bytearray()  # of an answer that is not a stream
        self._num_chunks = 0
        self._has_end = False
        record.num_wanted_tokens = prepared.num_wanted_tokens

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None:
        self.record.status = status
        self.record.retry_after_s = seconds_of(headers.get("retry-after"))

    def on_body(self, piece: bytes, now: float) -> None:
        if self._events is None or self.record.status != 200:
            self._body += piece
            return
        for event in self._events.feed(piece):
            if event != DONE:
                self._take(event, now)
            else:
                self._has_end = True

    def _take(self, event: bytes, now: float) -> None:
        record = self.record
        try:
            chunk = _decode_chunk(event)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            record.code = record.code or "malformed_chunk"
            return
        if chunk.error is not None:
            record.code = record.code or error_code(event) or "error_in_stream"
        if chunk.usage is not None:
            record.num_prompt_tokens, record.num_output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices or ():
            if choice.has_token:
                if not self._num_chunks:
                    record.first_s = now
                self._num_chunks += 1
                record.chunk_times.append(now)
            if choice.finish_reason is not None:
                self._has_end = True
                record.is_cut = record.is_cut or choice.stop_reason == "deadline"

    def close(self) -> None:
        """The answer is here, whole: say what it was."""
        record = self.record
        if record.status in REFUSALS:
            record.outcome, record.code = "refused", error_code(self._body)
        elif record.status != 200:
            record.outcome, record.code = "error", error_code(self._body)
        elif self._events is None:
            self._read_embeddings()
        else:
            record.num_output_tokens = record.num_output_tokens or self._num_chunks
            if not record.code and not (self._has_end and self._num_chunks):
                record.code = "incomplete_stream"
            record.outcome = "error" if record.code else "ok"

    def _read_embeddings(self) -> None:
        record = self.record
        try:
            answer = _decode_embeddings(self._body)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            record.outcome, record.code = "error", "malformed_answer"
            return
        record.num_prompt_tokens = answer.usage.prompt_tokens if answer.usage else 0
        is_whole = len(answer.data) == self._prepared.num_texts
        record.outcome, record.code = ("ok", "") if is_whole else ("error", "missing_vectors")


def seconds_of(text: str | None) -> float | None:
    """A Retry-After in seconds; a date, which no inference server sends, counts as none."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def error_code(body: bytes | bytearray) -> str:
    """What a body in OpenAI's shape, or near to it, calls its error."""
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return ""
    inner = found.get("error", found) if isinstance(found, dict) else None
    if not isinstance(inner, dict):
        return ""
    return next((str(inner[key]) for key in ("code", "type") if isinstance(inner.get(key), str) and inner[key]), "")
