"""Checks through the frameworks that build on those routes, each pointed at the server as its documentation says."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.clients.checks import (
    ASK,
    HI,
    KEY,
    QUERY,
    SHORT,
    TEXTS,
    TOOL,
    Server,
    SkipError,
    Weather,
    check,
    command,
    weather,
)

PROMPT = "Say hello."
WEATHER_PROMPT = "What is the weather in Rome?"


# langchain-openai


def langchain_chat(server: Server, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=server.v1, api_key=KEY, model=server.chat, max_retries=0, **options)


@check("langchain-openai", "chat")
def langchain_invoke(server: Server) -> None:
    answer = langchain_chat(server, **SHORT).invoke(PROMPT)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 8


@check("langchain-openai", "stream")
def langchain_stream(server: Server) -> None:
    assert "".join(chunk.content for chunk in langchain_chat(server, **SHORT).stream(PROMPT))


@check("langchain-openai", "tools")
def langchain_tools(server: Server) -> None:
    answer = langchain_chat(server, temperature=0).bind_tools([TOOL], tool_choice="weather").invoke(WEATHER_PROMPT)
    assert answer.tool_calls[0]["args"]["city"] in ("Rome", "Paris")


@check("langchain-openai", "structured output")
def langchain_structured(server: Server) -> None:
    assert isinstance(
        langchain_chat(server, temperature=0).with_structured_output(Weather).invoke(WEATHER_PROMPT), Weather
    )


def langchain_embeddings(server: Server, **options: Any) -> Any:
    from langchain_openai import OpenAIEmbeddings

    return OpenAIEmbeddings(base_url=server.v1, api_key=KEY, model=server.embedder, max_retries=0, **options)


@check("langchain-openai", "embeddings, texts")
def langchain_texts(server: Server) -> None:
    found = langchain_embeddings(server, check_embedding_ctx_length=False).embed_documents(TEXTS)
    assert [len(vector) for vector in found] == [server.dimension] * 2


@check("langchain-openai", "embeddings, token ids")
def langchain_token_ids(server: Server) -> None:
    """Its default: ids of OpenAI's vocabulary. No server can tell them from its own, but those beyond its own are
    refused."""
    import openai

    embeddings = langchain_embeddings(server)
    assert len(embeddings.embed_query("Hello world")) == server.dimension
    try:
        embeddings.embed_query("A kitten")
    except openai.BadRequestError as error:
        assert "vocabulary" in error.message
    else:
        raise AssertionError("an id beyond the vocabulary was taken")


# litellm


def litellm_module() -> Any:
    import litellm

    litellm.suppress_debug_info = True
    return litellm


@check("litellm", "chat")
def litellm_chat(server: Server) -> None:
    answer = litellm_module().completion(
        model=f"openai/{server.chat}", messages=HI, api_base=server.v1, api_key=KEY, **SHORT
    )
    assert answer.choices[0].message.content


@check("litellm", "stream")
def litellm_stream(server: Server) -> None:
    chunks = litellm_module().completion(
        model=f"hosted_vllm/{server.chat}", messages=HI, api_base=server.v1, api_key=KEY, **SHORT, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("litellm", "anthropic messages")
def litellm_anthropic(server: Server) -> None:
    answer = litellm_module().completion(
        model=f"anthropic/{server.chat}", messages=HI, api_base=server.url, api_key=KEY, **SHORT
    )
    assert answer.choices[0].message.content


@check("litellm", "ollama chat")
def litellm_ollama(server: Server) -> None:
    answer = litellm_module().completion(model=f"ollama_chat/{server.chat}", messages=HI, api_base=server.url, **SHORT)
    assert answer.choices[0].message.content


@check("litellm", "embeddings")
def litellm_embeddings(server: Server) -> None:
    answer = litellm_module().embedding(
        model=f"openai/{server.embedder}", input=TEXTS, api_base=server.v1, api_key=KEY, encoding_format="float"
    )
    assert [len(item["embedding"]) for item in answer.data] == [server.dimension] * 2


@check("litellm", "rerank")
def litellm_rerank(server: Server) -> None:
    answer = litellm_module().rerank(
        model=f"hosted_vllm/{server.embedder}", query=QUERY, documents=TEXTS, api_base=server.url, api_key=KEY
    )
    assert [result["index"] for result in answer.results] == [1, 0]


# llm

SHORT_OPTIONS = [text for name, value in SHORT.items() for text in ("-o", name, str(value))]


def llm_command(server: Server, *args: str) -> str:
    """The command line of `llm` with a folder of its own that knows the server as the model `fish`."""
    with tempfile.TemporaryDirectory() as folder:
        known = {"model_id": "fish", "model_name": server.chat, "api_base": server.v1, "supports_schema": True}
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([known]), encoding="utf-8")  # JSON is YAML
        environment = os.environ | {"LLM_USER_PATH": folder}
        return command(str(Path(sys.executable).parent / "llm"), "-m", "fish", *args, env=environment)


@check("llm", "prompt")
def llm_prompt(server: Server) -> None:
    assert llm_command(server, PROMPT, *SHORT_OPTIONS).strip()


@check("llm", "prompt, not streamed")
def llm_whole(server: Server) -> None:
    assert llm_command(server, PROMPT, "--no-stream", *SHORT_OPTIONS).strip()


@check("llm", "--schema")
def llm_schema(server: Server) -> None:
    found = json.loads(llm_command(server, "Invent a dog", "--schema", "name, age int", "-o", "temperature", "0"))
    assert (set(found), type(found["age"])) == ({"name", "age"}, int)


# llama-index


def llama_index_model(server: Server) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=server.chat,
        api_base=server.v1,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=32,
        temperature=0,
        max_retries=0,
    )


@check("llama-index", "complete")
def llama_index_complete(server: Server) -> None:
    assert llama_index_model(server).complete(PROMPT).text


@check("llama-index", "chat, streamed")
def llama_index_stream(server: Server) -> None:
    from llama_index.core.llms import ChatMessage

    parts = llama_index_model(server).stream_chat([ChatMessage(role="user", content=PROMPT)])
    assert "".join(part.delta or "" for part in parts)


@check("llama-index", "structured output")
def llama_index_structured(server: Server) -> None:
    assert isinstance(llama_index_model(server).as_structured_llm(Weather).complete(WEATHER_PROMPT).raw, Weather)


@check("llama-index", "embeddings")
def llama_index_embeddings(server: Server) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embedder = OpenAILikeEmbedding(model_name=server.embedder, api_base=server.v1, api_key=KEY, max_retries=0)
    assert [len(vector) for vector in embedder.get_text_embedding_batch(TEXTS)] == [server.dimension] * 2


# pydantic-ai


def pydantic_agent(server: Server, output: Any = str, tools: Any = ()) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(server.chat, provider=OpenAIProvider(base_url=server.v1, api_key=KEY))
    return Agent(model, output_type=output, tools=tools, model_settings={"max_tokens": 64, "temperature": 0.0})


@check("pydantic-ai", "run")
def pydantic_run(server: Server) -> None:
    assert pydantic_agent(server).run_sync(PROMPT).output


@check("pydantic-ai", "stream")
def pydantic_stream(server: Server) -> None:
    async def read() -> str:
        async with pydantic_agent(server).run_stream(PROMPT) as answer:
            return "".join([part async for part in answer.stream_text(delta=True)])

    assert asyncio.run(read())


@check("pydantic-ai", "output by a tool")
def pydantic_output(server: Server) -> None:
    assert isinstance(pydantic_agent(server, Weather).run_sync(WEATHER_PROMPT).output, Weather)


@check("pydantic-ai", "NativeOutput")
def pydantic_native(server: Server) -> None:
    from pydantic_ai import NativeOutput

    assert isinstance(pydantic_agent(server, NativeOutput(Weather)).run_sync(WEATHER_PROMPT).output, Weather)


@check("pydantic-ai", "NativeOutput with a tool")
def pydantic_native_with_tool(server: Server) -> None:
    """The model may call the tool first; a small one would do so for ever, so one request is enough."""
    from pydantic_ai import NativeOutput, UsageLimitExceeded, UsageLimits

    called: list[str] = []

    def weather_of(city: str) -> str:
        called.append(city)
        return weather(city)

    agent = pydantic_agent(server, NativeOutput(Weather), tools=[weather_of])
    try:
        assert isinstance(agent.run_sync(WEATHER_PROMPT, usage_limits=UsageLimits(request_limit=1)).output, Weather)
    except UsageLimitExceeded:
        assert called


# openai-agents


def run_agent(server: Server, **options: Any) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0)
    settings = agents.ModelSettings(max_tokens=64, temperature=0.0, tool_choice=options.pop("tool_choice", None))
    model = options.pop("model", agents.OpenAIChatCompletionsModel)(model=server.chat, openai_client=client)
    agent = agents.Agent(name="Fish", instructions="Be short.", model=model, model_settings=settings, **options)
    return agents.Runner.run_sync(agent, WEATHER_PROMPT, max_turns=5).final_output


def agent_tool() -> Any:
    import agents

    return agents.function_tool(weather)


@check("openai-agents", "chat completions")
def agents_chat(server: Server) -> None:
    assert run_agent(server)


@check("openai-agents", "responses")
def agents_responses(server: Server) -> None:
    import agents

    assert run_agent(server, model=agents.OpenAIResponsesModel)


@check("openai-agents", "tools")
def agents_tools(server: Server) -> None:
    found = run_agent(server, tools=[agent_tool()], tool_choice="required", tool_use_behavior="stop_on_first_tool")
    assert found.endswith("clear and cold")


@check("openai-agents", "output type")
def agents_output(server: Server) -> None:
    assert isinstance(run_agent(server, output_type=Weather), Weather)


@check("openai-agents", "tools and output type")
def agents_tools_and_output(server: Server) -> None:
    found = run_agent(server, output_type=Weather, tools=[agent_tool()], tool_use_behavior="stop_on_first_tool")
    assert isinstance(found, Weather) or found.endswith("clear and cold")


# instructor


def instruct(server: Server, mode: str) -> Any:
    import instructor
    import openai

    client = instructor.from_openai(
        openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0), mode=instructor.Mode[mode]
    )
    return client.create(
        model=server.chat, messages=ASK, response_model=Weather, max_retries=0, max_tokens=64, temperature=0
    )


@check("instructor", "tools")
def instructor_tools(server: Server) -> None:
    assert isinstance(instruct(server, "TOOLS"), Weather)


@check("instructor", "JSON schema")
def instructor_schema(server: Server) -> None:
    assert isinstance(instruct(server, "JSON_SCHEMA"), Weather)


# Vercel AI SDK

VERCEL_HEAD = """
import { generateText, streamText, embedMany, tool, Output } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";
import assert from "node:assert";
const server = JSON.parse(process.env.ARCHERFISH_SERVER);
const provider = createOpenAICompatible({
  name: "archerfish", baseURL: server.url + "/v1", apiKey: "none", supportsStructuredOutputs: true });
const asked = {
  model: provider(server.chat), prompt: "What is the weather in Rome?", maxOutputTokens: 64, temperature: 0, maxRetries: 0 };
"""


def vercel(server: Server, code: str) -> None:
    node, folder = shutil.which("node"), Path(sys.prefix)
    if node is None or not (folder / "node_modules" / "ai").is_dir():
        raise SkipError("needs node and npm, and then `make test-clients` again")
    environment = os.environ | {"ARCHERFISH_SERVER": json.dumps(vars(server))}
    command(node, "--input-type=module", "--eval", VERCEL_HEAD + code, cwd=folder, env=environment)


@check("Vercel AI SDK", "generateText")
def vercel_generate(server: Server) -> None:
    vercel(server, "assert((await generateText(asked)).text);")


@check("Vercel AI SDK", "streamText")
def vercel_stream(server: Server) -> None:
    vercel(
        server,
        """
let text = "";
for await (const part of streamText(asked).textStream) text += part;
assert(text);""",
    )


@check("Vercel AI SDK", "tools")
def vercel_tools(server: Server) -> None:
    vercel(
        server,
        """
const weather = tool({
  description: "The weather", inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }), execute: async () => "clear" });
const answer = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
assert.equal(answer.toolResults[0].output, "clear");""",
    )


@check("Vercel AI SDK", "structured output")
def vercel_structured(server: Server) -> None:
    vercel(
        server,
        """
const output = Output.object({ schema: z.object({ sky: z.enum(["clear", "cloudy"]), isCold: z.boolean() }) });
assert.equal(typeof (await generateText({ ...asked, output })).output.isCold, "boolean");""",
    )


@check("Vercel AI SDK", "embedMany")
def vercel_embed(server: Server) -> None:
    vercel(
        server,
        """
const { embeddings } = await embedMany({
  model: provider.embeddingModel(server.embedder), values: ["one", "two"], maxRetries: 0 });
assert.deepEqual(embeddings.map(vector => vector.length), [server.dimension, server.dimension]);""",
    )
