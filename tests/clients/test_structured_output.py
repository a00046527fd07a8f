"""Structured output through the real clients: a format alone, and a format together with a tool that is called
first."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from archerfish.params import SamplingParams
from archerfish.serve.wire import GenerationRequest
from archerfish.text.grammar import CompiledGrammar
from scripts.check_json_schemas import byte_vocabulary, takes
from tests.serve.client import running
from tests.serve.fake_backend import KEY, LIMIT_S, MODEL, FakeBackend, keyed_app

pytestmark = pytest.mark.client
CALL = '<tool_call>\n{"name": "age_of", "arguments": {"name": "Ada"}}\n</tool_call>'
FORM = '{"name": "Ada", "age": 36}'
VOCABULARY = byte_vocabulary()


class Person(BaseModel):
    """What the clients ask for."""

    name: str
    age: int


ADA = Person(name="Ada", age=36)


def reply(request: GenerationRequest) -> str:
    """A call, and after its result the form; each if the request's grammar allows it."""
    text = bytes(i for i in request.token_ids or [] if i < 256).decode()
    wanted = CALL if "age_of" in text and "thirty-six" not in text else FORM
    grammar = SamplingParams(grammar=request.params["grammar"]).grammar
    assert grammar is not None
    compiled = CompiledGrammar(VOCABULARY, grammar["kind"], grammar["value"])
    others = [one for one in (FORM, CALL) if takes(compiled, one)]
    return wanted if wanted in others else f"The grammar allows {others} only."


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(keyed_app(FakeBackend(reply, max_length=8000))) as served:
        yield f"{served.url}/v1"


def test_openai_parse(address: str) -> None:
    with OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=LIMIT_S) as client:
        question: Any = [{"role": "user", "content": "Who is Ada?"}]
        answer = client.chat.completions.parse(model=MODEL, messages=question, response_format=Person)
        assert answer.choices[0].message.parsed == ADA
        assert client.responses.parse(model=MODEL, input="Who is Ada?", text_format=Person).output_parsed == ADA


def test_instructor(address: str) -> None:
    instructor = pytest.importorskip("instructor")
    with OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=LIMIT_S) as client:
        for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
            wrapped = instructor.from_openai(client, mode=mode)
            messages = [{"role": "user", "content": "Who is Ada?"}]
            given = wrapped.chat.completions.create(
                model=MODEL, response_model=Person, messages=messages, max_retries=0
            )
            assert (given.name, given.age) == ("Ada", 36)


def test_pydantic_ai_native_output_with_a_tool(address: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models, providers = import_module("pydantic_ai.models.openai"), import_module("pydantic_ai.providers.openai")

    def age_of(name: str) -> str:
        """The age of a person."""
        return "thirty-six"

    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        model = kind(MODEL, provider=providers.OpenAIProvider(base_url=address, api_key=KEY))
        agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Person), tools=[age_of])
        assert agent.run_sync("Who is Ada?").output == ADA


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_agents_with_a_tool(address: str, is_streamed: bool) -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    @agents.function_tool  # type: ignore[untyped-decorator]
    def age_of(name: str) -> str:
        """The age of a person."""
        return "thirty-six"

    async def main() -> Any:
        async with AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=LIMIT_S) as client:
            for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
                agent = agents.Agent(name="a", model=kind(MODEL, client), tools=[age_of], output_type=Person)
                if is_streamed:
                    result = agents.Runner.run_streamed(agent, "Who is Ada?")
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, "Who is Ada?")
                assert result.final_output == ADA

    asyncio.run(main())


def test_llm_with_a_schema(address: str, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: writer\n  model_name: {MODEL}\n  api_base: {address}\n  supports_schema: true\n"
        "  api_key_name: writer\n"
    )
    given = subprocess.run(
        [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "writer",
            "--no-stream",
            "--key",
            KEY,
            "--schema",
            "name, age int",
            "Who is Ada?",
        ],
        env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert given.returncode == 0, given.stderr
    assert Person.model_validate_json(given.stdout) == ADA
