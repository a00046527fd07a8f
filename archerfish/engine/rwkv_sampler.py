"""RwkvSampler: TTS tokens of texts, by an LLMEngine with an RWKV-7 TTS model.

Requests of a batch share the steps of the engine, so a step of all of them is one forward pass. A request that is
invalid or fails does not affect the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Self

from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.outputs import TextDelta
from archerfish.engine.request_maker import check_prompt_bytes
from archerfish.engine.tts import VOCAB_SIZE, TTSRequest, TTSTokens, check_names, read_output
from archerfish.errors import (
    ArcherfishError,
    InvalidInputError,
    StoppedError,
    TooManyRequestsError,
    UnsupportedModelError,
)
from archerfish.runtime.host_sampling import sample_row
from archerfish.sequence import Request
from archerfish.types import Closing

Piece = tuple[int, TTSTokens]  # the place of a request in its batch, and its new tokens


class EngineOptions(Protocol):
    """Options that can be applied to a running engine, such as OptimizationConfig."""

    def apply(self, engine: LLMEngine, /) -> Mapping[str, Any]: ...


class RwkvSampler(Closing):
    """Generates TTS tokens with an engine that is given, or with one made from a model's name, which `close` closes.

    Safe to use from several threads at once: their requests share the engine's steps.
    """

    def __init__(self, model: LLMEngine | EngineConfig | str | None = None, **options: Any) -> None:
        self._owns_engine = not isinstance(model, LLMEngine)
        self.engine = model if isinstance(model, LLMEngine) else LLMEngine(model, **options)
        num_known = self.engine.facts.vocab_size
        if num_known < VOCAB_SIZE:
            self.close()
            message = (
                f"{self.engine.model_name} has {num_known:,} tokens; a TTS model of RWKV-7 has at least {VOCAB_SIZE:,}."
            )
            raise UnsupportedModelError(message, hint="Give a TTS model.")
        self._open: set[str] = set()  # ids of running requests

    @classmethod
    def new(cls, model: LLMEngine | EngineConfig | str | None = None, **options: Any) -> Self:
        """The same as the constructor."""
        return cls(model, **options)

    # Tokens of texts

    def generate_tts_tokens(self, request: TTSRequest | str, **options: Any) -> TTSTokens:
        """Global and semantic tokens of one text. options: fields of TTSRequest, if the request is a text."""
        (tokens,) = self.generate_tts_tokens_batch([as_request(request, options)])
        if tokens.error is not None:
            raise tokens.error
        return tokens

    def generate_tts_tokens_batch(
        self, requests: Iterable[TTSRequest | str | Mapping[str, Any]], **options: Any
    ) -> list[TTSTokens]:
        """Tokens of many texts, in their order. A request that fails has an `error` and does not affect the others.

        options: fields of TTSRequest for requests that are texts or mappings; a mapping overrides them.
        """
        found: dict[int, list[TTSTokens]] = {}
        for place, tokens in self.stream_tts_tokens_batch(requests, **options):
            found.setdefault(place, []).append(tokens)
        return [joined(found[place]) for place in sorted(found)]

    def stream_tts_tokens(self, request: TTSRequest | str, **options: Any) -> Generator[TTSTokens, None, None]:
        """New tokens of one text as they come; the last piece has a finish_reason. Closing the iterator aborts the
        request."""
        for _, tokens in self.stream_tts_tokens_batch([as_request(request, options)]):
            if tokens.error is not None:
                raise tokens.error
            yield tokens

    def stream_tts_tokens_batch(
        self, requests: Iterable[TTSRequest | str | Mapping[str, Any]], **options: Any
    ) -> Generator[Piece, None, None]:
        """New tokens of many texts as they come, with the place of their request. Closing the iterator aborts the rest.

        The first piece of a request with a reference voice holds the reference's global tokens.
        """
        arrived: deque[Piece] = deque()
        waiting: deque[Request] = deque()
        if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
            raise InvalidInputError(f"Expected a list of requests, not {type(requests).__name__}.")
        batch = list(requests)
        check_options(options)  # an error of the whole batch is raised; an error of one request is its result
        for place, request in enumerate(batch):
            try:
                own = {} if isinstance(request, TTSRequest) else options
                waiting.append(self._prepare(place, as_request(request, own), arrived))
            except ArcherfishError as error:
                arrived.append((place, TTSTokens(finish_reason="error", error=error)))
        num_open, mine = len(batch), [request.request_id for request in waiting]
        try:
            while num_open:
                self._fill_queue(waiting)
                self.engine.wait_until(lambda: bool(arrived or (waiting and self.engine.scheduler.has_room)))
                while arrived:
                    piece = arrived.popleft()
                    num_open -= piece[1].finish_reason is not None
                    yield piece
            self.engine.settle()
        finally:
            for request_id in mine:
                if request_id in self._open:
                    self.engine.abort(request_id)
                self._open.discard(request_id)

    def _prepare(self, place: int, request: TTSRequest, arrived: deque[Piece]) -> Request:
        """A checked request for the engine. Its pieces are appended to `arrived`."""
        engine, facts = self.engine, self.engine.facts
        check_prompt_bytes([request.text], engine.config.max_prompt_bytes)
        prompt = request.prompt()
        params = request.params(min(facts.max_len, facts.memory.num_tokens) - len(prompt))
        prepared = engine.requests.make(
            prompt, params, listener=partial(self._on_delta, place, arrived), wants_text=False
        )
        engine.scheduler.check(prepared)
        if request.ref_global_tokens is not None:
            arrived.append((place, TTSTokens(list(request.ref_global_tokens))))
        return prepared

    def _on_delta(self, place: int, arrived: deque[Piece], delta: TextDelta) -> None:
        """Called in the thread that steps the engine."""
        global_tokens, semantic_tokens = read_output(delta.token_ids)
        reason = delta.finish_reason
        error = None
        num_prompt = 0
        if reason is not None:
            self._open.discard(delta.request_id)
        if delta.output is not None:
            error, num_prompt = delta.output.outputs[0].error, len(delta.output.prompt_token_ids)
        if reason in ("abort", "error") and error is None:
            error = StoppedError("The request was aborted before its tokens were complete.", hint="Send it again.")
        if global_tokens or semantic_tokens or reason is not None:
            arrived.append((place, TTSTokens(global_tokens, semantic_tokens, reason, error, num_prompt)))

    def _fill_queue(self, waiting: deque[Request]) -> None:
        while waiting and self.engine.scheduler.has_room:
            try:
                self._open.add(waiting[0].request_id)
                self.engine.submit(waiting[0])
            except TooManyRequestsError:  # another thread filled the queue
                self._open.discard(waiting[0].request_id)
                return
            waiting.popleft()

    # Single logits

    sample_logits = staticmethod(sample_row)

    # Running

    def reset(self) -> None:
        """Abort running requests and clear the cache."""
        for request_id in list(self._open):
            self.engine.abort(request_id)
        self.engine.clear_cache()

    def update_config(self, config: EngineOptions | None = None, **changes: Any) -> dict[str, Any]:
        """Change options of the running engine, by an OptimizationConfig or by name. Gives the changed options."""
        if config is not None and changes:
            raise InvalidInputError("Give an OptimizationConfig or options by name, not both.")
        if config is not None and not hasattr(config, "apply"):
            hint = "Give one, or options by name, such as logits_cache_mib=32."
            raise InvalidInputError(f"config must be an OptimizationConfig, not {type(config).__name__}.", hint=hint)
        return dict(config.apply(self.engine)) if config is not None else self.engine.configure(**changes)

    def close(self) -> None:
        """Close the engine unless it was given."""
        if self._owns_engine:
            self.engine.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"


def check_options(options: Mapping[str, Any]) -> None:
    check_names(options)
    if "text" in options:
        raise InvalidInputError("text is no option.", hint="Give each text as a request of its own.")


def as_request(request: object, options: Mapping[str, Any]) -> TTSRequest:
    """A TTSRequest from a text, a mapping or a TTSRequest."""
    check_options(options)
    if isinstance(request, str):
        return TTSRequest(text=request, **options)
    if isinstance(request, Mapping):
        return TTSRequest(**{**options, **{str(name): value for name, value in request.items()}})
    if not isinstance(request, TTSRequest):
        raise InvalidInputError(f"A TTS request must be a text or a TTSRequest, not {type(request).__name__}.")
    if options:
        raise InvalidInputError(
            f"{next(iter(options))} is no option of a TTSRequest.", hint="Set it in the TTSRequest."
        )
    return request


def joined(pieces: Sequence[TTSTokens]) -> TTSTokens:
    """The pieces of one request as one result. A failed request has no tokens."""
    last = pieces[-1]
    if last.error is not None:
        return last
    return TTSTokens(
        [token for piece in pieces for token in piece.global_tokens],
        [token for piece in pieces for token in piece.semantic_tokens],
        last.finish_reason,
        None,
        last.num_prompt_tokens,
    )
