"""HTTP requests that are nearly right: valid ones of every route, mutated as values, as JSON, as bytes and in their headers."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from archerfish.serve.chat_bodies import ChatBody, CompletionBody, TextBody
from archerfish.serve.messages_routes import MessagesBody
from archerfish.serve.responses_routes import ResponsesBody
from archerfish.serve.token_routes import TokenizeBody

from .fake_backend import MODEL

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"name": "weather", "description": "Now", "parameters": SCHEMA}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TALK = [
    {"role": "system", "content": "Be kind"}, {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"}, {"role": "user", "content": "So?", "name": "ann"},
]  # fmt: skip
CLAUDE_TOOL = {"name": "weather", "description": "Now", "input_schema": SCHEMA}
CLAUDE_TALK = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "text", "text": "I ask"}, {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
        {"type": "text", "text": "So?"},
    ]},
]  # fmt: skip
SAMPLING = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "seed": 7, "min_tokens": 1, "stop_token_ids": [3], "ignore_eos": False,
    "skip_special_tokens": True, "include_stop_str_in_output": False, "logit_bias": {"5": 1.5}, "priority": 1, "deadline_s": 30,
}  # fmt: skip
VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": MODEL, "messages": HI, "max_tokens": 4},
        {"messages": TALK, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True, "max_completion_tokens": 5},
        {"messages": HI, "max_tokens": 4, "tools": [TOOL], "tool_choice": {"type": "function",
        "function": {"name": "weather"}}},
        {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "stop": ["e", "zz"],
        "max_tokens": 6},
        {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "user": "ann", "metadata": {"a": "b"}},
        {"messages": HI, "max_tokens": 9, "response_format": {
            "type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
        }},
        {"messages": HI, "max_tokens": 5, "guided_regex": "[a-c]{2,3}", "store": False, "service_tier": "auto"},
        {"messages": HI, "max_tokens": 5, "guided_choice": ["yes", "no"], "chat_template_kwargs": {"x": 1}},
        {"messages": HI, "max_tokens": 5, "prompt_logprobs": 1, **SAMPLING},
    ],
    "/v1/completions": [
        {"prompt": "Hi", "max_tokens": 4}, {"prompt": [5, 6, 7], "max_tokens": 3, "echo": True, "logprobs": 2},
        {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "stream": True, "stop": "x", "return_token_ids": True},
        {"prompt": [[5], [6, 7]], "max_tokens": 2, "best_of": 1, "suffix": "", "user": "ann"},
        {"prompt": "Hi", "max_tokens": 0, "echo": True, "add_special_tokens": False},
        {"prompt": "Hi", "max_tokens": 4, "guided_grammar": 'start: "a" | "b"', "prompt_logprobs": 1},
        {"prompt": "Hi", "max_tokens": 4, "guided_json": SCHEMA, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "Hi", "max_tokens": 5, **SAMPLING},
    ],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 4, "instructions": "Be kind"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                   {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c1", "output": "sunny"}],
         "tools": [{"type": "function", **WEATHER}], "max_output_tokens": 5, "stream": True},
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}, "max_output_tokens": 6},
        {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1, "store": False, "max_output_tokens": 2},
    ],
    "/v1/messages": [
        {"model": MODEL, "max_tokens": 4, "messages": HI, "system": "Be kind"},
        {"max_tokens": 5, "messages": CLAUDE_TALK, "tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}, "stream": True},
        {"max_tokens": 5, "messages": HI, "stop_sequences": ["e"], "metadata": {"user_id": "ann"},
        "thinking": {"type": "disabled"}},
        {"max_tokens": 5, "messages": HI, "system": [{"type": "text", "text": "One"}], "stream": True, "temperature": 0.5},
        {"max_tokens": 6, "messages": HI, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
    "/v1/messages/count_tokens": [{"model": MODEL, "messages": CLAUDE_TALK, "tools": [CLAUDE_TOOL], "system": "Be kind"}],
    "/v1/embeddings": [
        {"input": "Hi"}, {"input": ["a", "b c"], "encoding_format": "base64", "dimensions": 3, "user": "ann"},
        {"input": [[1, 2], [3]]}, {"input": [1, 2, 3]},
    ],
    "/v1/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}],
    "/similarity": [{"source": "a", "sentences": ["b", "c"]}, {"source": ["a", "b"], "sentences": ["c"]}],
    "/tokenize": [{"prompt": "Hi", "add_special_tokens": True, "return_token_strs": True}, {"messages": TALK, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [5, 6], "skip_special_tokens": True}],
    "/v1/cache/explain": [{"prompt": "Hi"}, {"prompt": [5, 6]}, {"messages": HI, "tools": [TOOL]}],
    "/v1/tts/tokens": [
        {"text": "Hi", "emotion": "SAD", "speed": "fast", "seed": 5},
        {"text": "Hi", "max_tokens": 3, "stream": True, "top_k": 9, "pitch": "low_pitch"},
        {"text": "Hi", "ref_global_tokens": [7] * 32, "ref_semantic_tokens": [1, 2], "temperature": 0, "top_p": 0.5},
    ],
    "/admin/optimization": [{"enable_prefetch": True}, {"logits_cache_mib": 8, "eviction_policy": "lru"}],
}  # fmt: skip
EVERY = [body for bodies in VALID.values() for body in bodies]
TEXT_BODIES: list[type[TextBody]] = [ChatBody, CompletionBody, ResponsesBody, MessagesBody]
TEXT_FIELDS = {name for body in TEXT_BODIES for name in (*body.model_fields, *body.unsupported)}
FIELDS = sorted(TEXT_FIELDS | TokenizeBody.model_fields.keys())
GETS = ["/v1/models", "/v1/models/x", "/health", "/ready", "/stats", "/metrics", "/", "/openapi.json", "/admin/optimization"]
STRINGS = [
    "", " ", "\x00", "a\x00b", "\ud800", "x\udfffy", "\udc00\ud800", "\N{ZERO WIDTH JOINER}", "e\u0301" * 50, "\u202etxt",
    "\ufeff",
    "\U0010ffff", "𝕏" * 9, "{message}", "{0}", "%s%n", "<|end|>", "<|start|>", "<0x00>", "auto", "none", "required", "function",
    "text",
    "json_schema", "json_object", "regex", "grammar", "user", "assistant", "tool", "developer", "type", "role", "name", "null",
    "true",
    "1", "-1", "NaN", "{{ 7*7 }}", "{% for x in y %}", "(", "[", "(a*)*b", "a{99999}", "\\", "[\\ud800]", "start: start",
    "x" * 3000,
    "../../etc/passwd", "lab/bare", "lab/vectors", "tiny", MODEL, "é" * 700, "\r\n\r\n", "=", "data: [DONE]\n\n",
    "</tool_call>",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64,
    -(2**63), 10**30,
    -(10**30), float("nan"), float("inf"), float("-inf"), 3.0, 128, 129, 1e-9, 100.0001, 64, 65, 0.0, 257, 300,
]  # fmt: skip
RAW_NUMBERS = [
    b"1e999", b"-1e999", b"01", b"0x10", b"+1", b"1.", b".5", b"1e", b"-", b"9" * 5000, b"1E+2", b"NaN", b"-Infinity", b"1_0",
]  # fmt: skip
RAW = [
    b"", b" ", b"null", b"true", b"[]", b"{}", b'""', b"0", b"{", b"}", b'{"a"', b"\x00", b"\xff\xfe", b"\xef\xbb\xbf{}",
    b'{"":0}', b"[[[[",
    b"{'a': 1}", b'{"a": 1} {"b": 2}', b"//", b'{"messages": undefined}', b"a=b&c=d", b"<?xml?>", b"--x\r\n", b'{"\\u0000": 1}',
    b'{"\\ud800": 1}',
]  # fmt: skip
CONTENT_TYPES = [
    b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"application/xml", b"", b"/",
    b"json",
    b"application/json; charset=utf-16", b"application/json;;;", b"APPLICATION/JSON", b"application/problem+json", b"\xff/\xfe",
    b"*/*",
    b"application/json; charset=nonsense", b"application/octet-stream", b"application/json\x00",
]  # fmt: skip
HEADERS = [
    (b"content-length", b"abc"), (b"content-length", b"-1"), (b"content-length", b"0"), (b"content-length", b"9" * 40),
    (b"content-length", b"\xb2"),
    (b"content-encoding", b"gzip"), (b"content-encoding", b"br"), (b"transfer-encoding", b"chunked"), (b"expect",
    b"100-continue"),
    (b"accept", b"image/png"), (b"accept", b"\xff"), (b"authorization", b"Bearer \xff"), (b"authorization", b"Basic x"),
    (b"x-api-key", b"\x00"),
    (b"cache-control", b"no-store"), (b"cache-control", b"max-age=-9e9,,=;no-cache="), (b"host", b"["), (b"host", b""),
    (b"host", b"a b\xff"),
    (b"cookie", b"\xff=;;" * 99), (b"anthropic-version", b"x"), (b"anthropic-beta", b"\xe9"), (b"openai-organization",
    b"x" * 4000),
    (b"x-tenant", b"other"), (b"range", b"bytes=0-1"), (b"upgrade", b"websocket"), (b"accept-encoding", b"\x80"),
    (b"x-request-id", b"\n"),
]  # fmt: skip


@dataclass
class FuzzedRequest:
    """One request as its bytes."""

    path: str
    content: bytes = b""
    method: str = "POST"
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    num_parts: int = 1
    is_broken_off: bool = False  # the client goes before the end of the body


def fuzzed(draw: random.Random) -> FuzzedRequest:
    """One request; most of them have one or two things wrong."""
    if draw.random() < 0.04:
        return fuzzed_get(draw)
    path = draw.choice(list(VALID))
    body = copy.deepcopy(draw.choice(VALID[path]))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        mutate(draw, body)
    made = FuzzedRequest(path, encoded(draw, body), "PATCH" if path.startswith("/admin") else "POST")
    made.headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(made.content))]
    if draw.random() < 0.15:
        garble(draw, made)
    if draw.random() < 0.12:
        vary_headers(draw, made)
    if draw.random() < 0.02:
        made.method = draw.choice(("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "POST", "TRACE", "x"))
    if draw.random() < 0.02:
        made.path += draw.choice(("/", "//", "/x", "?", "/\x00", "%ff", "/../stats", "é"))
    if draw.random() < 0.02:
        made.query = draw.choice((b"model=x", b"model=%ff", b"model=%00&model=", b"%", b"\xff=1", b"model=" + b"x" * 5000,
        b"&&=="))
    made.num_parts = draw.choice((1, 1, 1, 2, 7))
    made.is_broken_off = draw.random() < 0.01
    return made


def fuzzed_get(draw: random.Random) -> FuzzedRequest:
    path = draw.choice(GETS)
    if path.endswith("/x"):
        path = "/v1/models/" + draw.choice(STRINGS)
    return FuzzedRequest(path, method="GET", query=draw.choice((b"", b"model=x", b"model=%ff%00", b"a=b&a=c", b"\xff")))


def mutate(draw: random.Random, body: dict[str, Any]) -> None:
    """Change one place of a body."""
    holders: list[Any] = [body]
    for holder in holders:
        inner = holder.values() if isinstance(holder, dict) else holder
        holders += [item for item in inner if isinstance(item, (dict, list))]
    holder = draw.choice(holders) if draw.random() < 0.7 else body
    if isinstance(holder, dict):
        change_member(draw, holder)
    else:
        kind = draw.randrange(4)
        if kind == 0 or not holder:
            holder.append(strange(draw))
        elif kind == 1:
            holder.clear()
        elif kind == 2 and len(holder) < 8:
            holder *= draw.choice((2, 3, 700))
        else:
            holder[draw.randrange(len(holder))] = strange(draw)


def change_member(draw: random.Random, holder: dict[str, Any]) -> None:
    kind = draw.randrange(8)
    names = list(holder)
    if kind <= 2 and names:
        holder[draw.choice(names)] = strange(draw)
    elif kind == 3 and names:
        del holder[draw.choice(names)]
    elif kind == 4 and names:
        name = draw.choice(names)
        holder[name + draw.choice(("s", "_", " ", "\x00", "\ud800"))] = holder.pop(name)
    elif kind == 5:
        name, value = draw.choice(list(draw.choice(EVERY).items()))
        holder[name] = copy.deepcopy(value)
    elif kind == 6:
        holder[draw.choice(draw.choice((FIELDS, FIELDS, STRINGS)))] = strange(draw)
    else:
        holder[draw.choice(names or ["x"])] = copy.deepcopy(draw.choice(EVERY))


def strange(draw: random.Random) -> Any:
    """A value that is rarely wanted."""
    kinds: list[Callable[[], Any]] = [
        lambda: draw.choice(STRINGS), lambda: draw.choice(NUMBERS), lambda: draw.choice((None, True, False, [], {}, [[]],
        [{}])),
        lambda: [draw.choice(STRINGS + NUMBERS) for _ in range(draw.randrange(1, 4))],  # type: ignore[operator]
        lambda: {draw.choice(STRINGS): draw.choice(NUMBERS) for _ in range(draw.randrange(1, 3))},
        lambda: nested(draw.choice((3, 40, 400)), draw.random() < 0.5), lambda: "".join(chr(draw.randrange(1,
        0x3000)) for _ in range(20)),
        lambda: {"type": draw.choice(STRINGS), "text": draw.choice(STRINGS)}, lambda: draw.choice(STRINGS) * 40,
    ]  # fmt: skip
    return draw.choice(kinds)()


def nested(depth: int, is_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if is_list else {"type": "object", "properties": {"a": value}}
    return value


def encoded(draw: random.Random, body: dict[str, Any]) -> bytes:
    is_ascii = draw.random() < 0.7
    try:
        text = json.dumps(body, ensure_ascii=is_ascii)
    except RecursionError:
        return b'{"a":' * 900 + b"1" + b"}" * 900
    if draw.random() < 0.03:
        name = draw.choice(list(body) or ["x"])
        text = "{" + json.dumps(name) + ":" + json.dumps(draw.choice(STRINGS)) + "," + text[1:]
    return text.encode("utf-8", "surrogatepass")


def garble(draw: random.Random, made: FuzzedRequest) -> None:
    """Make the bytes of a body something else, which may be JSON no more."""
    content = made.content
    place = draw.randrange(len(content) + 1)
    digits = [i for i, byte in enumerate(content) if 48 <= byte < 58]
    ways: list[Callable[[], bytes]] = [
        lambda: content[:place], lambda: content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :],
        lambda: content[:place] + draw.randbytes(3) + content[place:], lambda: draw.choice(RAW), lambda: draw.randbytes(40),
        lambda: content.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass"), lambda: b"\xef\xbb\xbf" + content,
        lambda: gzip.compress(content), lambda: content + content, lambda: b"[" * draw.choice((500, 50_000)),
        lambda: b'{"a":' * 20_000,
        lambda: content[:place] + b"\x00" + content[place:], lambda: content + b"\n" * 9,
    ]  # fmt: skip
    if digits and draw.random() < 0.4:
        digit = draw.choice(digits)
        made.content = content[:digit] + draw.choice(RAW_NUMBERS) + content[digit + 1 :]
    else:
        made.content = draw.choice(ways)()
    made.headers[1] = (b"content-length", b"%d" % len(made.content))


def vary_headers(draw: random.Random, made: FuzzedRequest) -> None:
    if draw.random() < 0.4:
        made.headers[0] = (b"content-type", draw.choice(CONTENT_TYPES))
    elif draw.random() < 0.3:
        del made.headers[draw.randrange(2)]
    else:
        made.headers += draw.sample(HEADERS, draw.randrange(1, 4))
