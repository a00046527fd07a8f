"""The parameters of OpenAI's routes, and vLLM's beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from archerfish.serve.client import RemoteError
from archerfish.text.chat_template import texts_in

from .fake_backend import (
    CHAT,
    HI,
    MODEL,
    RESPONSES,
    START,
    TEXT,
    FakeBackend,
    error_of,
    events,
    post,
    prompt_of,
    save_model,
)

VECTORS = "/v1/embeddings"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {"type": "object"}
FUNCTION = {"name": "weather", "description": "Now", "parameters": SCHEMA, "strict": True}
CLAUDE_TOOL = {"name": "weather", "description": "Now", "input_schema": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "model": MODEL},
    TEXT: {"prompt": "Hi", "model": MODEL},
    RESPONSES: {"input": "Hi", "model": MODEL},
    VECTORS: {"input": "Hi", "model": "lab/vectors"},
    MESSAGES: {"messages": HI, "model": MODEL, "max_tokens": 20},
    COUNT: {"messages": HI, "model": MODEL},
}
PARAMETERS: list[tuple[str, type]] = [
    (CHAT, chat_create_params.CompletionCreateParamsStreaming),
    (TEXT, completion_create_params.CompletionCreateParamsStreaming),
    (RESPONSES, response_create_params.ResponseCreateParamsStreaming),
    (VECTORS, embedding_create_params.EmbeddingCreateParams),
    (MESSAGES, message_create_params.MessageCreateParamsStreaming),
    (MESSAGES, beta_create_params.MessageCreateParamsStreaming),
    (COUNT, message_count_tokens_params.MessageCountTokensParams),
    (COUNT, beta_count_params.MessageCountTokensParams),
]
REMARK = "x-archerfish-remark"
IN_HEADERS = {"betas"}  # the package sends them as a header
NUMBERS = {"temperature": 0.5, "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
# What is done about each: a body that has it, with what it needs beside it.
SUPPORTED: dict[str, dict[str, dict[str, Any]]] = {
    CHAT: {
        **{name: {name: value} for name, value in NUMBERS.items()}, "messages": {"messages": HI}, "model": {"model": MODEL},
        "seed": {"seed": 1}, "n": {"n": 2}, "stop": {"stop": ["e"]}, "max_tokens": {"max_tokens": 2},
        "max_completion_tokens": {"max_completion_tokens": 2}, "logit_bias": {"logit_bias": {"5": 1}},
        "logprobs": {"logprobs": True}, "top_logprobs": {"logprobs": True, "top_logprobs": 2}, "stream": {"stream": True},
        "stream_options": {"stream": True, "stream_options": {"include_usage": True}}, "tools": TOOLS,
        "tool_choice": {**TOOLS, "tool_choice": "required"}, "parallel_tool_calls": {**TOOLS, "parallel_tool_calls": False},
        "response_format": {"response_format": {"type": "json_object"}},
    },
    TEXT: {
        **{name: {name: value} for name, value in NUMBERS.items()}, "prompt": {"prompt": "Hi"}, "model": {"model": MODEL},
        "seed": {"seed": 1}, "n": {"n": 2}, "stop": {"stop": "e"}, "max_tokens": {"max_tokens": 2}, "logprobs": {"logprobs": 1},
        "logit_bias": {"logit_bias": {"5": 1}}, "echo": {"echo": True}, "stream": {"stream": True},
        "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    },
    RESPONSES: {
        "temperature": {"temperature": 0.5}, "top_p": {"top_p": 0.5}, "input": {"input": "Hi"}, "model": {"model": MODEL},
        "instructions": {"instructions": "Be kind"}, "max_output_tokens": {"max_output_tokens": 2}, "stream": {"stream": True},
        "top_logprobs": {"top_logprobs": 2}, "include": {"include": ["message.output_text.logprobs"]},
        "text": {"text": {"format": {"type": "json_object"}}}, "tools": {"tools": [{"type": "function", **FUNCTION}]},
        "tool_choice": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        "parallel_tool_calls": {"tools": [{"type": "function", **FUNCTION}], "parallel_tool_calls": False},
        "metadata": {"metadata": {"a": "b"}},
    },
    VECTORS: {
        "input": {"input": "Hi"}, "model": {"model": "lab/vectors"}, "dimensions": {"dimensions": 2},
        "encoding_format": {"encoding_format": "base64"},
    },
    MESSAGES: {
        "messages": {"messages": HI}, "model": {"model": MODEL}, "max_tokens": {"max_tokens": 2},
        "system": {"system": "Be kind"},
        "stop_sequences": {"stop_sequences": ["e"]}, "stream": {"stream": True}, "tools": {"tools": [CLAUDE_TOOL]},
        "tool_choice": {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}},
        "output_config": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    },
}  # fmt: skip
SUPPORTED[COUNT] = {
    name: SUPPORTED[MESSAGES][name]
    for name in (
        "messages",
        "model",
        "system",
        "tools",
        "tool_choice",
        "output_config",
    )
}
OPENAI_DEFAULTS = {"store": False, "service_tier": "auto"}
WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    CHAT: {**OPENAI_DEFAULTS, "modalities": ["text"], "reasoning_effort": "none", "verbosity": "medium"},
    TEXT: {"best_of": 1, "suffix": ""},
    RESPONSES: {
        **OPENAI_DEFAULTS,
        "background": False,
        "reasoning": {"effort": "none"},
        "truncation": "disabled",
        "stream_options": {"include_obfuscation": False},
        "text": {"verbosity": "medium"},
        "include": ["reasoning.encrypted_content"],
    },
    VECTORS: {"user": "ann"},
    MESSAGES: {
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "speed": "standard",
        "thinking": {"type": "disabled"},
        "mcp_servers": [],
        "fallbacks": [],
    },
    COUNT: {
        "cache_control": {"type": "ephemeral"},
        "speed": "standard",
        "thinking": {"type": "disabled"},
        "mcp_servers": [],
    },
}
# Accepted and ignored, which a header of the answer says.
REMARKED: dict[str, dict[str, Any]] = {
    CHAT: {
        "user": "ann", "metadata": {"a": "b"}, "safety_identifier": "ann", "prompt_cache_key": "k", "store": True,
        "prompt_cache_retention": "24h", "moderation": {"model": "x"}, "prediction": {"type": "content", "content": "x"},
        "prompt_cache_options": {"a": 1}, "reasoning_effort": "high", "service_tier": "priority", "verbosity": "low",
    },
    TEXT: {"user": "ann"},
    RESPONSES: {
        "user": "ann", "safety_identifier": "ann", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
        "access_programs": ["x"], "context_management": [{"type": "compaction"}], "include": ["file_search_call.results"],
        "max_tool_calls": 3, "moderation": {"model": "x"}, "prompt_cache_options": {"a": 1}, "reasoning": {"effort": "high"},
        "service_tier": "flex", "store": True, "text": {"verbosity": "low"}, "truncation": "auto",
    },
    VECTORS: {},
    MESSAGES: {
        "metadata": {"user_id": "ann"}, "compaction": {"a": 1}, "context_management": {"a": 1}, "diagnostics": {"a": 1},
        "fallback_credit_token": "x", "fallbacks": [{"model": "x"}], "inference_geo": "us", "output_config": {"effort": "high"},
        "service_tier": "priority", "speed": "fast", "thinking": {"type": "enabled", "budget_tokens": 1024},
        "user_profile_id": "x", "workspace_id": "x",
    },
    COUNT: {
        "compaction": {"a": 1}, "context_management": {"a": 1}, "speed": "fast", "user_profile_id": "x", "workspace_id": "x",
    },
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    CHAT: {
        "audio": {"voice": "x", "format": "wav"},
        "function_call": "auto",
        "functions": [FUNCTION],
        "modalities": ["audio"],
        "web_search_options": {"a": 1},
    },
    TEXT: {"best_of": 2, "suffix": "x"},
    RESPONSES: {
        "background": True,
        "conversation": "x",
        "image": {"a": 1},
        "previous_response_id": "resp_1",
        "prompt": {"id": "x"},
    },
    VECTORS: {},
    MESSAGES: {"container": "x", "mcp_servers": [{"url": "x"}], "thread": {"a": 1}},
    COUNT: {"mcp_servers": [{"url": "x"}]},
}
# Parameters of vLLM, SGLang and llama.cpp that clients send and that change nothing here.
OF_OTHERS: dict[str, Any] = {
    "guided_decoding_backend": "outlines",
    "spaces_between_special_tokens": False,
    "request_id": "a",
    "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "length_penalty": 2.0,
    "keep_alive": "5m",
}


def names_of(parameters: Any) -> set[str]:
    return set(parameters.__required_keys__ | parameters.__optional_keys__) - IN_HEADERS


@pytest.mark.parametrize("route", BODIES)
def test_tables_have_the_parameters_of_the_packages(route: str) -> None:
    expected = set[str]().union(*(names_of(parameters) for place, parameters in PARAMETERS if place == route))
    tables = (SUPPORTED, WITHOUT_EFFECT, REMARKED, REFUSED)
    assert set[str]().union(*(table[route] for table in tables)) == expected


@pytest.mark.parametrize(("route", "name"), [(route, name) for route, table in SUPPORTED.items() for name in table])
def test_supported_parameters(route: str, name: str) -> None:
    answer = post(FakeBackend(), route, {**BODIES[route], **SUPPORTED[route][name]})
    assert answer.status_code == 200, answer.text


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("route", "name"), [(route, name) for route, table in WITHOUT_EFFECT.items() for name in table]
)
def test_parameters_without_effect(route: str, name: str) -> None:
    backend = FakeBackend()
    answer = post(backend, route, {**BODIES[route], name: WITHOUT_EFFECT[route][name]})
    assert answer.status_code == 200, answer.text
    assert REMARK not in answer.headers
    check_same_request(backend, route)


def check_same_request(backend: FakeBackend, route: str) -> None:
    """The last request is the one that the route's body makes by itself."""
    post(backend, route, BODIES[route])
    if backend.requests:
        first, second = backend.requests
        assert (first.token_ids, first.params, first.stream) == (second.token_ids, second.params, second.stream)


@pytest.mark.parametrize(("route", "name"), [(route, name) for route, table in REMARKED.items() for name in table])
def test_ignored_parameters_are_named_in_a_header(route: str, name: str) -> None:
    backend = FakeBackend()
    answer = post(backend, route, {**BODIES[route], name: REMARKED[route][name]})
    assert answer.status_code == 200, answer.text
    assert name in answer.headers[REMARK]
    check_same_request(backend, route)


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_parameters_of_other_servers_are_ignored(route: str) -> None:
    backend = FakeBackend()
    for stream in (False, True):
        answer = post(backend, route, {**BODIES[route], **OF_OTHERS, "stream": stream})
        assert answer.headers[REMARK] == f"without effect here: {', '.join(sorted(OF_OTHERS))}"


@pytest.mark.parametrize(
    ("route", "stated"),
    [
        (CHAT, {"user": "ann"}),
        (MESSAGES, {"thinking": {"budget_tokens": 9}}),
        (RESPONSES, {"text": {"verbosity": "low"}}),
        ("/api/chat", {"messages": HI, "options": {"num_ctx": 9}}),
    ],
)
def test_refused_requests_have_their_remarks(route: str, stated: dict[str, Any]) -> None:
    answer = post(FakeBackend(), route, {**BODIES.get(route, {}), **stated, "model": "nowhere"})
    assert answer.status_code == 404 and "without effect here: " in answer.headers[REMARK]


@pytest.mark.parametrize(("route", "name"), [(route, name) for route, table in REFUSED.items() for name in table])
def test_refused_parameters(route: str, name: str) -> None:
    backend = FakeBackend()
    answer = post(backend, route, {**BODIES[route], name: REFUSED[route][name]})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert name in error["message"]
    assert "nknown" not in error["message"]
    if "code" in error:
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert not backend.requests


@pytest.mark.parametrize("route", BODIES)
def test_unknown_parameters(route: str) -> None:
    answer = post(FakeBackend(), route, {**BODIES[route], "tempratur": 1})
    assert answer.status_code == 400
    assert "Unknown parameter 'tempratur'." in answer.json()["error"]["message"]


LENGTHS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (TEXT, "max_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]


@pytest.mark.parametrize(("route", "name"), LENGTHS)
def test_max_tokens_is_lowered_to_what_fits(route: str, name: str) -> None:
    backend = FakeBackend(max_length=1000)
    for number in (1000, 10**12, 10**30):
        for stream in (False, True):
            answer = post(backend, route, {**BODIES[route], name: number, "min_tokens": 999, "stream": stream})
            assert answer.status_code == 200, answer.text
            num_prompt = len(backend.requests[-1].token_ids or ())
            assert backend.params()["max_tokens"] == backend.params()["min_tokens"] == 1000 - num_prompt
            said = f"from {number:,} to {1000 - num_prompt}, as many as fit after the prompt of {num_prompt}"
            assert answer.headers["x-archerfish-remark"] == f"max_tokens was lowered {said}"
    fitting = post(backend, route, {**BODIES[route], name: 1000 - num_prompt})
    assert fitting.status_code == 200 and "x-archerfish-remark" not in fitting.headers


def test_seed_minus_one_means_no_seed() -> None:
    for seed, told in ((-1, None), (-2, 2**64 - 2), (5, 5)):
        backend = FakeBackend()
        assert post(backend, CHAT, {**BODIES[CHAT], "seed": seed}).status_code == 200
        assert backend.params().get("seed") == told


@pytest.mark.parametrize(("route", "name"), LENGTHS)
def test_errors_use_the_parameter_names_of_the_route(route: str, name: str) -> None:
    for stated, expected in (
        ({name: -1}, rf"^{name} must be a whole number at least 1, not -1\."),
        ({name: 4, "min_tokens": 5}, rf"^min_tokens \(5\) is above {name} \(4\)\."),
    ):
        answer = post(FakeBackend(), route, {**BODIES[route], **stated})
        assert answer.status_code == 400 and re.match(expected, answer.json()["error"]["message"]), answer.text
    body = {**BODIES[CHAT], "logprobs": True, "top_logprobs": 65}
    assert post(FakeBackend(), CHAT, body).json()["error"]["message"].startswith("top_logprobs must be")


FORMS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"guided_regex": "("}, "guided_regex"),
    (TEXT, {"guided_grammar": "start:"}, "guided_grammar"),
    (CHAT, {"response_format": {"type": "regex", "regex": "("}}, "response_format"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, "text"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "stated", "param"), FORMS)
def test_invalid_grammar_error_names_the_parameter(
    route: str, stated: dict[str, Any], param: str, stream: bool
) -> None:
    """The engine process compiles grammars and does not know the parameters of routes."""
    backend = FakeBackend()
    for message, expected in (
        ("The grammar of kind regex is not valid: unclosed group.", param),
        ("Too many blocks.", None),
    ):
        backend.fails[0] = RemoteError(message, code="invalid_input", status=400)
        answer = post(backend, route, {**BODIES[route], **stated, "stream": stream})
        assert answer.status_code == 400, answer.text
        assert (answer.json()["error"]["message"], answer.json()["error"]["param"]) == (message, expected)


LONG = [{"role": "user", "content": "é" * 20}, {"role": "assistant", "content": "a" * 11}]  # 51 bytes in 31 characters
READ: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": LONG}, "messages"),
    (TEXT, {"prompt": ["a", "é" * 26]}, "prompt"),
    (RESPONSES, {"input": LONG}, "input"),
    (MESSAGES, {"messages": [*LONG, *HI], "max_tokens": 5}, "messages"),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": "a" * 51}], "max_tokens": 5}, "messages"),
    (COUNT, {"messages": [*LONG, *HI]}, "messages"),
    ("/tokenize", {"prompt": "é" * 26}, "prompt"),
    ("/tokenize", {"messages": LONG}, "messages"),
    ("/v1/cache/explain", {"prompt": "é" * 26}, "prompt"),
    (
        CHAT,
        {"messages": HI, "tools": [{"type": "function", "function": {**FUNCTION, "description": "x" * 51}}]},
        "messages",
    ),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"documents": [{"text": "x" * 51}]}}, "messages"),
]


@pytest.mark.parametrize(("route", "body", "param"), READ)
def test_every_route_limits_prompt_bytes(route: str, body: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    assert post(backend, route, body).status_code == 200
    backend.requests, backend.max_prompt_bytes = [], 50
    answer = post(backend, route, body)
    assert answer.status_code == 413, answer.text
    error = answer.json()["error"]
    assert "bytes; the limit is 50." in error["message"] and error.get("param", param) == param
    assert error["type"] == ("request_too_large" if route in (MESSAGES, COUNT) else "invalid_request_error")
    assert not backend.requests


def test_deeply_nested_tools_are_refused() -> None:
    backend = FakeBackend()
    backend.max_prompt_bytes = 10**6
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(50):  # a stack that is deep itself, as under a tracer, still reads it
        schema = {"properties": {"a": schema}}
    tools = [{"type": "function", "function": {**FUNCTION, "parameters": schema}}]
    answer = post(backend, CHAT, {"messages": HI, "tools": tools})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "tools[0] is nested too deeply.")
    nested: Any = "inside"
    for _ in range(10**5):
        nested = {"a": [nested]}
    assert texts_in(nested).count("inside") == 1


# Parameters of vLLM's server that have a meaning here too


TALK = [*HI, {"role": "assistant", "content": "The sky"}]


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": HI, "n": 2}), (TEXT, {"prompt": "Hi"})])
def test_continuous_usage_stats(route: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(post(FakeBackend("abc"), route, {**body, "stream": True, "stream_options": options}))
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts) and counts[-1] == 4 * body.get("n", 1) + 2 * (body.get("n", 1) - 1)
    assert len(set(counts)) > 3
    only = {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert "usage" not in events(post(FakeBackend("abc"), route, only))[-1]


def test_generation_prompt_and_continued_message() -> None:
    backend = FakeBackend(" is blue")
    post(backend, CHAT, {"messages": HI, "add_generation_prompt": False})
    assert prompt_of(backend) == "<|start|>user\nHi<|end|>"
    answer = post(backend, CHAT, {"messages": TALK, "add_generation_prompt": False, "continue_final_message": True})
    assert prompt_of(backend) == "<|start|>user\nHi<|end|><|start|>assistant\nThe sky"
    assert answer.json()["choices"][0]["message"]["content"] == " is blue"
    tokens = post(backend, "/tokenize", {"messages": TALK, "continue_final_message": True}).json()["tokens"]
    assert tokens == backend.requests[-1].token_ids
    for body, expected in (
        ({"messages": TALK, "add_generation_prompt": True}, "exclude each other"),
        ({"messages": HI}, "text of the assistant"),
        ({"messages": TALK[1:]}, "text of the assistant"),
    ):
        error = error_of(post(backend, CHAT, {**body, "continue_final_message": True}))
        assert expected in error["message"] and error["param"] == "continue_final_message"


def test_echo_of_a_continued_message() -> None:
    body = {"messages": TALK, "continue_final_message": True, "echo": True}
    answer = post(FakeBackend(" is blue"), CHAT, body)
    assert answer.json()["choices"][0]["message"]["content"] == "The sky is blue"
    deltas = [
        event["choices"][0]["delta"] for event in events(post(FakeBackend(" is blue"), CHAT, {**body, "stream": True}))
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == "The sky is blue"
    assert (
        post(FakeBackend("Yes"), CHAT, {"messages": HI, "echo": True}).json()["choices"][0]["message"]["content"]
        == "Yes"
    )


def test_special_tokens_before_a_conversation(tmp_path: Path) -> None:
    backend, file = FakeBackend(), save_model(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", START)])
    tokenizer.save(str(file))
    backend.directory = tmp_path
    for route in (CHAT, "/tokenize"):
        found: list[list[int]] = []
        for stated in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
            answer = post(backend, route, {"messages": HI, **stated})
            found.append(answer.json()["tokens"] if route == "/tokenize" else backend.requests[-1].token_ids or [])
        assert found[0] == found[1] and found[2] == [START, *found[0]]
    text = [
        post(backend, "/tokenize", {"prompt": "a", **s}).json()["tokens"] for s in ({}, {"add_special_tokens": False})
    ]
    assert text == [[START, 97], [97]]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * 2000}]}),
        (TEXT, {"prompt": "a" * 2000}),
        (TEXT, {"prompt": [97] * 2000}),
    ],
)
def test_truncated_prompts_keep_their_end(route: str, body: dict[str, Any]) -> None:
    backend = FakeBackend(max_length=1000)
    assert post(backend, route, body).status_code == 400
    for stated, max_tokens, expected in ((30, 5, 30), (-1, 100, 900), (-1, None, 984 if route == TEXT else 999)):
        given = {"truncate_prompt_tokens": stated} | ({"max_tokens": max_tokens} if max_tokens else {})
        assert post(backend, route, {**body, **given}).status_code == 200
        assert len(backend.requests[-1].token_ids or []) == expected
    assert prompt_of(backend).endswith("assistant\n" if route == CHAT else "aaa")
    error = error_of(post(backend, route, {**body, "truncate_prompt_tokens": 0}))
    assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("stated", "grammar"),
    [
        ({"json": {"type": "object"}}, {"kind": "json_schema", "value": {"type": "object"}}),
        ({"regex": "a+", "disable_fallback": True}, {"kind": "regex", "value": "a+"}),
        ({"choice": ["a", "b"]}, {"kind": "choice", "value": ["a", "b"]}),
        ({"json_object": True}, {"kind": "json", "value": None}),
        ({"grammar": 'start: "a"', "json": None}, {"kind": "lark", "value": 'start: "a"'}),
    ],
)
def test_structured_outputs(stated: dict[str, Any], grammar: dict[str, Any]) -> None:
    for route, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "Hi"})):
        backend, guided = FakeBackend(), FakeBackend()
        assert post(backend, route, {**body, "structured_outputs": stated}).status_code == 200
        names = {
            "json_schema": "guided_json",
            "regex": "guided_regex",
            "choice": "guided_choice",
            "lark": "guided_grammar",
        }
        assert backend.params()["grammar"].items() >= {k: v for k, v in grammar.items() if v is not None}.items()
        if grammar["kind"] in names:
            post(guided, route, {**body, names[grammar["kind"]]: grammar["value"]})
            assert guided.params() == backend.params()


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "exactly one"),
        ({"jsn": {"a": 1}}, "Did you mean"),
    ],
)
def test_wrong_structured_outputs(stated: dict[str, Any], expected: str) -> None:
    error = error_of(post(FakeBackend(), CHAT, {"messages": HI, "structured_outputs": stated}))
    assert expected in error["message"] and error["param"] == "structured_outputs"
    both = {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}
    assert "exclude each other" in error_of(post(FakeBackend(), CHAT, {"messages": HI, **both}))["message"]
