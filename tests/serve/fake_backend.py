"""A backend that writes what a test says, and a small model for it: a token for every byte, and a chat template."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from starlette.applications import Starlette
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from archerfish.config import EngineConfig
from archerfish.engine.request_maker import RUNNING_OPTIONS
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.serve import wire
from archerfish.serve.app import create_app
from archerfish.serve.client import Answer, Part, Question, RemoteError
from archerfish.serve.tenants import Tenants
from archerfish.text.text_tokenizer import byte_alphabet

LIMIT_S = 20
END, START = 256, 257  # <|end|> and <|start|>
MODEL = "lab/writer"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
KEY = "a-key-of-the-tenant-acme"
TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EMPTY_VIEW = {
    "blocks": {"total": 64, "block_tokens": 16, "order": "memory", "runs": [("free", 64)]},
    "nodes": [],
    "num_nodes": 0,
    "requests": [],
    "num_running": 0,
    "num_waiting": 0,
    "tokens_per_second": 0.0,
    "ttft_p50_s": None,
    "ttft_p99_s": None,
    "inter_token_p50_s": None,
    "inter_token_p99_s": None,
    "kv_usage": 0.0,
    "cached_tokens": 0,
    "computed_tokens": 0,
    "acceptance": None,
}
Logprob = tuple[int, float, int, list[tuple[int, float]]]


def save_model(directory: Path) -> Path:
    """The files of a model whose token ids below 256 are the bytes of UTF-8."""
    alphabet = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<|end|>", "<|start|>")]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return directory


@cache
def kept_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="archerfish-writer-")


@cache
def model_directory() -> Path:
    return save_model(Path(kept_directory().name))


def ids(text: str) -> list[int]:
    return list(text.encode())


class FakeBackend:
    """Answers each request with `reply` of it, a token per chunk; the end token comes unless max_tokens does first."""

    def __init__(
        self, reply: str | Callable[[wire.GenerationRequest], str] = "Hello there", *, max_length: int = 1000
    ) -> None:
        self.directory, self.max_length = model_directory(), max_length
        self.max_prompt_bytes = 0
        self.default_sampling: dict[str, Any] = {}
        self.max_sequence = 0
        self.vocab_size = VOCAB_SIZE  # of TTS, whose tokens are these bytes as well
        self.reply = reply
        self.requests: list[wire.GenerationRequest] = []
        self.asked: list[Question] = []
        self.ask_error: RemoteError | None = None
        self.cards: list[dict[str, Any]] | None = None  # instead of those of the usual models
        self.left: list[str] = []  # requests that were left before their end
        self.ended: list[tuple[str, int]] = []  # sequences of several that came to their end before
        self.num_sent = 0
        self.fails: dict[int, RemoteError] = {}  # by the number of chunks before it
        self.num_cached = 3
        self.finish_reason: str | None = None  # instead of stop and length
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_before_gate = 0  # parts of an answer that do not wait for the gate
        self.tokens_per_chunk = 1
        self.config = EngineConfig()

    def params(self) -> dict[str, Any]:
        return self.requests[-1].params

    async def generate(self, request: wire.GenerationRequest) -> AsyncGenerator[Part, None]:
        self.requests.append(request)
        assert request.token_ids is not None
        assert request.wants_ids
        assert request.messages is None
        is_done = False
        try:
            parts = self._parts(request)
            for number, part in enumerate(parts if request.stream else parts[-1:]):
                if number in self.fails:
                    is_done = True
                    raise self.fails[number]
                if number >= self.num_before_gate:
                    await self.gate.wait()
                self.num_sent += 1
                is_done = isinstance(part, wire.Generated)
                yield part
        finally:
            if not is_done:
                self.left.append(request.request_id)

    def _parts(self, request: wire.GenerationRequest) -> list[Part]:
        outputs = [self._output(request, index) for index in range(request.params.get("n", 1))]
        chunks: list[Part] = []
        for output in outputs:
            steps = range(0, len(output.token_ids), self.tokens_per_chunk)
            for place in steps:
                end = place + self.tokens_per_chunk
                is_last = end >= len(output.token_ids)
                logprobs = None if output.logprobs is None else output.logprobs[place:end]
                chunks.append(
                    wire.Chunk(
                        request_id=request.request_id,
                        index=output.index,
                        token_ids=output.token_ids[place:end],
                        finish_reason=output.finish_reason if is_last else None,
                        logprobs=logprobs,
                        stop_reason=output.stop_reason if is_last else None,
                        num_cached_tokens=0 if chunks else self.num_cached,
                    )
                )
        prompt_ids = request.token_ids or []
        prompt_logprobs = None
        if request.params.get("prompt_logprobs") is not None:
            prompt_logprobs = [logprob_of(i, request.params["prompt_logprobs"]) for i in prompt_ids[1:]]
        final = wire.Generated(
            request_id=request.request_id,
            model=request.model,
            outputs=[] if request.stream else outputs,
            num_prompt_tokens=len(prompt_ids),
            num_output_tokens=sum(len(output.token_ids) for output in outputs),
            num_cached_tokens=self.num_cached,
            prompt_logprobs=prompt_logprobs,
        )
        return [*chunks, final]

    def _output(self, request: wire.GenerationRequest, index: int) -> wire.WireOutput:
        text = self.reply if isinstance(self.reply, str) else self.reply(request)
        token_ids = [*ids(text + (f" {index}" if index else "")), END]
        most = request.params.get("max_tokens", 16)
        is_cut = most is not None and len(token_ids) > most
        token_ids = token_ids[:most]
        wanted = request.params.get("logprobs")
        return wire.WireOutput(
            index=index,
            token_ids=token_ids,
            finish_reason=self.finish_reason or ("length" if is_cut else "stop"),
            stop_reason=None if is_cut or self.finish_reason else END,
            logprobs=None if wanted is None else [logprob_of(i, wanted) for i in token_ids],
        )

    async def ask(self, message: Question) -> Answer:
        self.asked.append(message)
        if self.ask_error is not None:
            raise self.ask_error
        if isinstance(message, wire.Query):
            return wire.Report(request_id=message.request_id, values=self._report(message.about))
        if isinstance(message, wire.Ping):
            return wire.Pong(request_id=message.request_id, seconds=0.001)
        if isinstance(message, wire.Configure):
            self.config = self.config.replace(**message.options)
            values = {name: getattr(self.config, name) for name in RUNNING_OPTIONS}
            return wire.Report(request_id=message.request_id, values=values)
        if isinstance(message, wire.ForVectors):
            rows = np.full((len(message.texts), 4 if isinstance(message, wire.EmbedRequest) else 1), 0.5, "<f4")
            return wire.Vectors(
                request_id=message.request_id,
                num_rows=rows.shape[0],
                num_columns=rows.shape[1],
                data=rows.tobytes(),
                num_tokens=len(message.texts),
            )
        assert isinstance(message, wire.ExplainRequest)
        assert message.token_ids is not None
        values = {"num_tokens": len(message.token_ids), "tenant": message.tenant}
        return wire.Report(request_id=message.request_id, values=values)

    def end_sequence(self, request_id: str, index: int) -> None:
        self.ended.append((request_id, index))

    def _report(self, about: str) -> dict[str, Any]:
        if about != "models":
            return dict(EMPTY_VIEW) if about == "view" else {}
        if self.cards is not None:
            return {"models": self.cards}
        card = {"id": MODEL, "kind": "generation", "directory": str(self.directory), "max_length": self.max_length}
        card |= {
            "vocab_size": self.vocab_size,
            "max_prompt_bytes": self.max_prompt_bytes,
            "default_sampling": self.default_sampling,
            "max_sequence": self.max_sequence,
        }
        bare = {"id": "lab/bare", "kind": "generation", "directory": "", "max_length": 100}
        vectors = {
            "id": "lab/vectors",
            "kind": "embedding",
            "directory": str(self.directory),
            "max_length": 64,
            "dimension": 4,
        }
        return {"models": [card, bare, vectors]}


def prompt_of(backend: FakeBackend) -> str:
    """The prompt of the last request, with its special tokens."""
    names = {END: "<|end|>", START: "<|start|>"}
    return "".join(names.get(i) or chr(i) for i in backend.requests[-1].token_ids or [])


def logprob_of(token_id: int, num_top: int) -> Logprob:
    return token_id, -0.5, 1, [(token_id, -0.5), (ord("?"), -1.5)][:num_top]


def fake_app(backend: FakeBackend) -> Starlette:
    return create_app(backend, credentials="pass")


def keyed_app(backend: FakeBackend) -> Starlette:
    """An app with the key KEY of the tenant acme."""
    return create_app(backend, credentials="pass", tenants=Tenants.from_text(f"acme={KEY}"))


@asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app, inside of the app's lifespan, which httpx does not run. No task may be left over."""
    before, transport = asyncio.all_tasks(), httpx.ASGITransport(app, raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    async with asyncio.timeout(LIMIT_S), app.router.lifespan_context(app), http as client:
        yield client
    assert asyncio.all_tasks() == before


def post(
    backend: FakeBackend,
    route: str,
    body: dict[str, Any] | bytes,
    *,
    app: Callable[[FakeBackend], Starlette] = fake_app,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """One answer. body: an object for JSON, or the bytes themselves."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **(headers or {})}

    async def main() -> httpx.Response:
        async with client_of(app(backend)) as client:
            return await client.post(route, content=content, headers=sent)

    return asyncio.run(main())


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, without the mark at its end."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's shape."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)
