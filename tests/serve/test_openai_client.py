"""The real packages of OpenAI and Anthropic against a real socket."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from anthropic.types import TextBlock, ToolUseBlock

from archerfish.serve.client import RemoteError
from archerfish.serve.wire import GenerationRequest

from .client import WORDS, app_of, running, words_host
from .fake_backend import KEY, LIMIT_S, MODEL, FakeBackend, fake_app, keyed_app
from .hosting import WordEncoder

WEATHER: Any = {"name": "weather", "description": "The weather now", "parameters": {"type": "object", "properties": {}}}
RESPONSE_TOOLS: Any = [{"type": "function", "strict": False, **WEATHER, "name": name} for name in ("weather", "clock")]
TOOLS: Any = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {**WEATHER, "name": "clock"}}]
CALL = (
    'One moment.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def reply(request: GenerationRequest) -> str:
    text = bytes(i for i in request.token_ids or [] if i < 256).decode()
    if "tools" in text:
        return CALL
    return "Hello thére"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(keyed_app(FakeBackend(reply))) as served:
        yield served.url


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as made:
        yield made


@pytest.fixture
def claude(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0, timeout=LIMIT_S) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=50,
        extra_body={"top_k": 3, "min_p": 0.1},
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello thére", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert raw.decode() == "Hello thére"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
        n=2,
        temperature=0.5,
    )
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["Hello thére", "Hello thére 1"]
    assert usage is not None
    assert usage.completion_tokens == 13 + 15


def test_tool_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], tools=TOOLS
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.delta") > 5
    [choice] = final.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
    assert choice.message.tool_calls is not None
    calls = [call.function for call in choice.message.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Rome"}), ("clock", {})]
    whole = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        tools=[{"type": "function", "function": WEATHER}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    assert whole.choices[0].message.tool_calls is not None


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=5, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == list("Hello")
    stream = client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hi", instructions="Be kind", store=False)
    assert (answer.output_text, answer.status) == ("Hello thére", "completed")
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 3
    with client.responses.stream(model=MODEL, input="Hi", tools=RESPONSE_TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 5
    assert final.output_text == "One moment."
    assert final.output[1].type == "function_call"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_packages_raise_their_error_classes(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="another").models.list()
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        claude.with_options(api_key="another").messages.create(
            model=MODEL, max_tokens=20, messages=[{"role": "user", "content": "Hi"}]
        )
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="a" * 5000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=MODEL, prompt="a", extra_body={"top_kk": 1})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "top_kk")


def test_refusals_and_broken_streams() -> None:
    backend = FakeBackend()
    backend.fails[0] = RemoteError("Too much waits.", code="too_many_requests", status=429, retry_after_s=3)
    with running(fake_app(backend)) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt="a", stream=True)
        assert caught.value.response.headers["retry-after"] == "3"
        backend.fails = {2: RemoteError("It died.", code="unavailable", status=503)}
        with pytest.raises(openai.APIError, match="It died"):
            list(client.completions.create(model=MODEL, prompt="a", stream=True))
        client.close()
        claude = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
        with (
            pytest.raises(anthropic.APIStatusError, match="It died"),
            claude.messages.stream(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "Hi"}]) as stream,
        ):
            list(stream)
        claude.close()


def test_messages(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model=MODEL, max_tokens=50, system="Be kind", messages=[{"role": "user", "content": "Hi"}]
    )
    assert answer.content == [TextBlock(type="text", text="Hello thére")]
    assert (answer.stop_reason, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == ("end_turn", 3, 13)
    counted = claude.messages.count_tokens(model=MODEL, system="Be kind", messages=[{"role": "user", "content": "Hi"}])
    assert counted.input_tokens == answer.usage.input_tokens + 3
    with claude.messages.stream(model=MODEL, max_tokens=50, messages=[{"role": "user", "content": "Hi"}]) as stream:
        assert "".join(stream.text_stream) == "Hello thére"
        assert stream.get_final_message().usage.output_tokens == 13


def test_tool_use_in_messages(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model=MODEL,
        max_tokens=500,
        messages=[{"role": "user", "content": "Hi"}],
        tools=[{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "clock")],
    ) as stream:
        final = stream.get_final_message()
    text, call, _ = final.content
    assert isinstance(text, TextBlock)
    assert isinstance(call, ToolUseBlock)
    assert (text.text, call.name, call.input, final.stop_reason) == (
        "One moment.",
        "weather",
        {"city": "Rome"},
        "tool_use",
    )


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_embeddings(encoding_format: str | None) -> None:
    with words_host() as host, host, running(app_of(host)) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        # Without encoding_format the package itself asks for base64 and decodes it.
        chosen: dict[str, Any] = {"encoding_format": encoding_format} if encoding_format else {}
        answer = client.embeddings.create(model="words", input=["one", "two words"], **chosen)
        embedding: Any = answer.data[0].embedding
        if encoding_format == "base64":
            embedding = np.frombuffer(base64.b64decode(embedding), "<f4")
        np.testing.assert_array_equal(np.asarray(embedding, np.float32), WordEncoder.vector("one"))
        assert [model.id for model in client.models.list()] == [WORDS] == [client.models.retrieve(WORDS).id]
        client.close()
