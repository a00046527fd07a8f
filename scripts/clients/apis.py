"""Checks through curl, plain HTTP and the packages of those whose routes we have: OpenAI, Anthropic, Cohere, TEI,
Ollama."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

from scripts.clients.checks import (
    ASK,
    HI,
    KEY,
    QUERY,
    SHORT,
    TEXTS,
    TOOL,
    WEATHER,
    Server,
    Weather,
    check,
    command,
    weather,
)


def assert_ranked(results: Any) -> None:
    """The document about the kitten comes first."""
    assert [result.index for result in results] == [1, 0], results
    assert results[0].relevance_score > results[1].relevance_score


def request(server: Server, path: str, body: Any = None) -> str:
    """A plain HTTP request: GET, or POST of a body. What is refused is raised with the words of the refusal."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from None


# Plain HTTP


@check("curl", "chat")
def curl_chat(server: Server) -> None:
    body = json.dumps({"messages": HI, **SHORT})
    answer = command("curl", "-sf", f"{server.v1}/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    assert json.loads(answer)["choices"][0]["message"]["content"]


@check("curl", "stream")
def curl_stream(server: Server) -> None:
    body = json.dumps({"messages": HI, **SHORT, "stream": True})
    answer = command(
        "curl", "-sfN", f"{server.v1}/chat/completions", "-H", "Content-Type: application/json", "-d", body
    )
    assert answer.endswith("data: [DONE]\n\n"), answer


@check("curl", "version, docs, favicon")
def curl_pages(server: Server) -> None:
    for page in ("version", "docs", "favicon.ico"):
        assert request(server, f"/{page}"), page


@check("guidellm", "usage in every chunk")
def guidellm_usage(server: Server) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True}
    body = {"model": server.chat, "messages": HI, **SHORT, "ignore_eos": True, **options}
    events = [
        line.removeprefix("data: ") for line in request(server, "/v1/chat/completions", body).splitlines() if line
    ]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    assert all(chunk.get("usage") for chunk in chunks), "a chunk has no usage"
    assert chunks[-1]["usage"]["completion_tokens"] == 8


@check("plain HTTP", "harmless parameters of chat")
def harmless_chat(server: Server) -> None:
    accept_each(
        server,
        "/v1/chat/completions",
        {"messages": HI},
        {
            "reasoning_effort": "low",
            "verbosity": "low",
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "echo": False,
            "truncate_prompt_tokens": 100,
            "user": "me",
            "store": False,
            "metadata": {"a": "b"},
            "structured_outputs": {"choice": ["yes", "no"]},
        },
    )


@check("plain HTTP", "harmless parameters of completions")
def harmless_completions(server: Server) -> None:
    accept_each(
        server,
        "/v1/completions",
        {"prompt": "Once"},
        {
            "echo": True,
            "add_special_tokens": True,
            "truncate_prompt_tokens": 100,
            "user": "me",
            "structured_outputs": {"choice": ["yes", "no"]},
        },
    )


def accept_each(server: Server, path: str, body: dict[str, Any], parameters: dict[str, Any]) -> None:
    refused = []
    for name, value in parameters.items():
        try:
            request(server, path, {"model": server.chat, "max_tokens": 4, **body, name: value})
        except RuntimeError:
            refused.append(name)
    assert not refused, f"refused: {', '.join(refused)}"


@check("plain HTTP", "vLLM's rerank, score, pooling")
def vllm_routes(server: Server) -> None:
    ranked = json.loads(request(server, "/rerank", {"model": server.embedder, "query": QUERY, "documents": TEXTS}))
    assert [result["index"] for result in ranked["results"]] == [1, 0]
    scored = json.loads(request(server, "/score", {"model": server.embedder, "text_1": QUERY, "text_2": TEXTS}))
    assert scored["data"][1]["score"] > scored["data"][0]["score"]
    pooled = json.loads(request(server, "/pooling", {"model": server.embedder, "input": TEXTS}))
    assert [len(item["data"]) for item in pooled["data"]] == [server.dimension] * 2


# openai


def openai_client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)


@check("openai", "models")
def openai_models(server: Server) -> None:
    assert {server.chat, server.embedder} <= {model.id for model in openai_client(server).models.list()}


@check("openai", "chat")
def openai_chat(server: Server) -> None:
    client = openai_client(server)
    answer = client.chat.completions.create(model=server.chat, messages=HI, max_completion_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 8


@check("openai", "chat, async and streamed")
def openai_stream(server: Server) -> None:
    import openai

    async def read() -> tuple[str, Any]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=server.chat, messages=HI, **SHORT, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks[-1].usage

    text, usage = asyncio.run(read())
    assert text
    assert usage


@check("openai", "tools")
def openai_tools(server: Server) -> None:
    client = openai_client(server)
    answer = client.chat.completions.create(
        model=server.chat, messages=ASK, temperature=0, tools=[TOOL], tool_choice="required"
    )
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
    result = {"role": "tool", "tool_call_id": call.id, "content": weather("Rome")}
    following = [*ASK, message, result]
    assert client.chat.completions.create(model=server.chat, messages=following, tools=[TOOL], **SHORT).choices


@check("openai", "tools, streamed")
def openai_tool_stream(server: Server) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    with openai_client(server).chat.completions.stream(
        model=server.chat, messages=ASK, temperature=0, tools=[TOOL], tool_choice=choice
    ) as stream:
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")


@check("openai", "structured parse")
def openai_parse(server: Server) -> None:
    client = openai_client(server)
    answer = client.chat.completions.parse(model=server.chat, messages=ASK, response_format=Weather, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@check("openai", "structured parse with tools")
def openai_parse_with_tools(server: Server) -> None:
    import openai

    answer = openai_client(server).chat.completions.parse(
        model=server.chat, messages=ASK, response_format=Weather, tools=[openai.pydantic_function_tool(Weather)]
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Weather) or message.tool_calls


@check("openai", "completions")
def openai_completions(server: Server) -> None:
    answer = openai_client(server).completions.create(model=server.chat, prompt=["Once", "Twice"], **SHORT, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs.tokens


@check("openai", "embeddings")
def openai_embeddings(server: Server) -> None:
    client = openai_client(server)
    packed = client.embeddings.create(model=server.embedder, input=TEXTS)  # base64, the package's own choice
    plain = client.embeddings.create(model=server.embedder, input=TEXTS, encoding_format="float")
    assert [len(item.embedding) for item in packed.data] == [server.dimension] * 2
    assert all(abs(a - b) < 1e-4 for a, b in zip(packed.data[0].embedding, plain.data[0].embedding, strict=True))


@check("openai", "embeddings, fewer dimensions")
def openai_dimensions(server: Server) -> None:
    answer = openai_client(server).embeddings.create(model=server.embedder, input="a text", dimensions=64)
    assert len(answer.data[0].embedding) == 64


@check("openai", "embeddings, input type")
def openai_input_type(server: Server) -> None:
    answer = openai_client(server).embeddings.create(
        model=server.embedder, input="a text", extra_body={"input_type": "query"}
    )
    assert len(answer.data[0].embedding) == server.dimension


@check("openai", "responses")
def openai_responses(server: Server) -> None:
    answer = openai_client(server).responses.create(
        model=server.chat, instructions="Be short.", input="Say hello.", max_output_tokens=16, temperature=0
    )
    assert answer.output_text


@check("openai", "responses, streamed")
def openai_response_stream(server: Server) -> None:
    with openai_client(server).responses.stream(
        model=server.chat, input="Say hello.", max_output_tokens=16, temperature=0
    ) as stream:
        events = list(stream)
    assert events[-1].type in ("response.completed", "response.incomplete")
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == events[-1].response.output_text


@check("openai", "responses, tools")
def openai_response_tools(server: Server) -> None:
    answer = openai_client(server).responses.create(
        model=server.chat,
        input="What is the weather in Rome?",
        tools=[{"type": "function", "strict": False, **WEATHER}],
        tool_choice="required",
        temperature=0,
    )
    assert json.loads(answer.output[0].arguments)["city"] in ("Rome", "Paris")


@check("openai", "responses, structured parse")
def openai_response_parse(server: Server) -> None:
    answer = openai_client(server).responses.parse(model=server.chat, input="The weather in Rome?", text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)


@check("openai", "an error")
def openai_error(server: Server) -> None:
    import openai

    try:
        openai_client(server).chat.completions.create(model=server.embedder, messages=HI)
    except openai.BadRequestError as error:
        assert server.embedder in error.message
    else:
        raise AssertionError("an embedding model took part in a chat")


# anthropic

COLD: Any = {"extra_body": {"temperature": 0}}  # the package has no parameter for it any more


def anthropic_client(server: Server) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


@check("anthropic", "messages")
def anthropic_messages(server: Server) -> None:
    answer = anthropic_client(server).messages.create(
        model=server.chat, system="Be short.", messages=HI, max_tokens=8, **COLD
    )
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 8


@check("anthropic", "stream")
def anthropic_stream(server: Server) -> None:
    with anthropic_client(server).messages.stream(model=server.chat, messages=HI, max_tokens=8, **COLD) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_message().content[0].text


@check("anthropic", "tools")
def anthropic_tools(server: Server) -> None:
    client = anthropic_client(server)
    tools = [{"name": "weather", "description": "The weather of a city", "input_schema": WEATHER["parameters"]}]
    answer = client.messages.create(
        model=server.chat, messages=ASK, max_tokens=64, tools=tools, tool_choice={"type": "any"}, **COLD
    )
    call = next(block for block in answer.content if block.type == "tool_use")
    assert call.input["city"] in ("Rome", "Paris")
    assert answer.stop_reason == "tool_use"
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": weather("Rome")}]}
    following = [*ASK, {"role": "assistant", "content": answer.content}, result]
    assert client.messages.create(model=server.chat, messages=following, max_tokens=8, **COLD, tools=tools).content


@check("anthropic", "thinking")
def anthropic_thinking(server: Server) -> None:
    answer = anthropic_client(server).messages.create(
        model=server.chat,
        messages=HI,
        max_tokens=1100,
        stop_sequences=["!"],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert answer.content


@check("anthropic", "count tokens")
def anthropic_count(server: Server) -> None:
    assert anthropic_client(server).messages.count_tokens(model=server.chat, messages=HI).input_tokens > 3


# cohere


def cohere_clients(server: Server) -> tuple[Any, Any]:
    import cohere

    return cohere.Client(api_key=KEY, base_url=server.url), cohere.ClientV2(api_key=KEY, base_url=server.url)


@check("cohere v1", "rerank")
def cohere_rerank(server: Server) -> None:
    client, _ = cohere_clients(server)
    assert_ranked(client.rerank(model=server.embedder, query=QUERY, documents=TEXTS, return_documents=True).results)


@check("cohere v1", "embed")
def cohere_embed(server: Server) -> None:
    client, _ = cohere_clients(server)
    found = client.embed(texts=TEXTS, model=server.embedder, input_type="search_document").embeddings
    assert [len(vector) for vector in found] == [server.dimension] * 2


@check("cohere v2", "rerank")
def cohere_v2_rerank(server: Server) -> None:
    _, client = cohere_clients(server)
    assert_ranked(client.rerank(model=server.embedder, query=QUERY, documents=TEXTS, top_n=2).results)


@check("cohere v2", "embed")
def cohere_v2_embed(server: Server) -> None:
    _, client = cohere_clients(server)
    found = client.embed(
        texts=TEXTS, model=server.embedder, input_type="search_query", embedding_types=["float"]
    ).embeddings.float_
    assert [len(vector) for vector in found] == [server.dimension] * 2


# huggingface_hub, and the routes of Text Embeddings Inference


@check("huggingface_hub", "chat")
def hub_chat(server: Server) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=server.v1, api_key=KEY)
    assert client.chat_completion(HI, model=server.chat, **SHORT).choices[0].message.content


@check("tei", "embed (huggingface_hub)")
def tei_embed(server: Server) -> None:
    from huggingface_hub import InferenceClient

    found = InferenceClient().feature_extraction("a text", model=f"{server.url}/embed", normalize=True, truncate=True)
    assert found.shape == (1, server.dimension)


@check("tei", "info (huggingface_hub)")
def tei_info(server: Server) -> None:
    from huggingface_hub import InferenceClient

    assert InferenceClient(server.url, provider="hf-inference").get_endpoint_info()["model_id"]


@check("tei", "rerank")
def tei_rerank(server: Server) -> None:
    found = json.loads(request(server, "/rerank", {"query": QUERY, "texts": TEXTS, "return_text": True}))
    assert [result["index"] for result in found] == [1, 0]
    assert (found[0]["text"], found[0]["score"] > found[1]["score"]) == (TEXTS[1], True)


@check("tei", "predict says what it needs")
def tei_predict(server: Server) -> None:
    """No built-in model is a classifier, so the answer is a refusal in TEI's form, not a missing route."""
    try:
        request(server, "/predict", {"inputs": "I like you."})
    except RuntimeError as error:
        assert "classif" in str(error), error
    else:
        raise AssertionError("an embedding model classified a text")


# ollama

OLLAMA_SHORT = {"num_predict": 8, "temperature": 0}


def ollama_client(server: Server) -> Any:
    import ollama

    return ollama.Client(host=server.url)


@check("ollama", "list, show")
def ollama_models(server: Server) -> None:
    client = ollama_client(server)
    assert any(model.model.startswith(server.chat) for model in client.list().models)
    assert client.show(server.chat).details


@check("ollama", "chat")
def ollama_chat(server: Server) -> None:
    answer = ollama_client(server).chat(model=server.chat, messages=HI, options=OLLAMA_SHORT)
    assert answer.message.content
    assert answer.eval_count <= 8


@check("ollama", "chat, streamed")
def ollama_stream(server: Server) -> None:
    parts = list(ollama_client(server).chat(model=server.chat, messages=HI, stream=True, options=OLLAMA_SHORT))
    assert "".join(part.message.content or "" for part in parts)
    assert [part.done for part in parts][-2:] == [False, True]


@check("ollama", "chat, a schema")
def ollama_schema(server: Server) -> None:
    answer = ollama_client(server).chat(model=server.chat, messages=ASK, format=Weather.model_json_schema())
    Weather.model_validate_json(answer.message.content)


@check("ollama", "chat, tools")
def ollama_tools(server: Server) -> None:
    """Ollama has no way to ask for a call, so a text is right too."""
    message = (
        ollama_client(server)
        .chat(model=server.chat, messages=ASK, tools=[weather], options={"num_predict": 64, "temperature": 0})
        .message
    )
    assert message.content or message.tool_calls


@check("ollama", "generate")
def ollama_generate(server: Server) -> None:
    answer = ollama_client(server).generate(model=server.chat, prompt="Say hello.", options=OLLAMA_SHORT)
    assert answer.response
    assert answer.done


@check("ollama", "embed")
def ollama_embed(server: Server) -> None:
    found = ollama_client(server).embed(model=server.embedder, input=TEXTS).embeddings
    assert [len(vector) for vector in found] == [server.dimension] * 2
