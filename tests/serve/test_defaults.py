"""What the service does without being asked: sampling parameters of the model, limits that fit, and remarks about them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .fake_backend import MODEL, FakeBackend, client_of, fake_app, post

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI}, TEXT: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}, MESSAGES: {"messages": HI, "max_tokens": 20}
}
STATED = {"temperature": 0.0, "top_k": 5, "repetition_penalty": 1.5}


@pytest.mark.parametrize("route", BODIES)
def test_the_parameters_of_the_model_hold_unless_the_body_states_them(route: str) -> None:
    backend = FakeBackend()
    backend.default_sampling = STATED
    assert post(backend, route, BODIES[route]).status_code == 200
    assert backend.params().items() >= STATED.items()
    assert post(backend, route, {**BODIES[route], "temperature": 0.5, "top_k": -1}).status_code == 200
    assert backend.params()["temperature"] == 0.5 and backend.params()["repetition_penalty"] == 1.5
    assert "top_k" not in backend.params()


def test_several_choices_are_allowed_where_the_model_states_temperature_0() -> None:
    backend = FakeBackend()
    backend.default_sampling = STATED
    assert post(backend, CHAT, {**BODIES[CHAT], "n": 2}).status_code == 200
    assert "temperature" not in backend.params() and backend.params()["top_k"] == 5
    assert post(backend, CHAT, {**BODIES[CHAT], "n": 2, "temperature": 0}).status_code == 400


def test_models_show_their_parameters() -> None:
    backend = FakeBackend()
    backend.default_sampling = STATED

    async def main() -> Any:
        async with client_of(fake_app(backend)) as client:
            return (await client.get("/v1/models")).json()["data"]

    shown = {model["id"]: model.get("default_sampling") for model in asyncio.run(main())}
    assert shown == {MODEL: STATED, "lab/bare": {}, "lab/vectors": None}
