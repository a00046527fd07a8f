"""What a check of a client is, and what the checks share.

A check uses its client as that client's documentation says, and looks at the form of the answer, not at how clever it
is: the built-in models are small. A check imports its client itself, so that one which is not installed turns only its
own rows red.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

KEY = "none"
HI: Any = [{"role": "user", "content": "Say hello."}]
SHORT: Any = {"max_tokens": 8, "temperature": 0}  # the same text each time, and some
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "The weather of a city", "parameters": CITY}
TOOL: Any = {"type": "function", "function": WEATHER}
TEXTS = ["Bread is baked in an oven.", "A kitten is a young cat."]
QUERY = "What is a baby cat called?"
COMMAND_LIMIT_S = 100


class Weather(BaseModel):
    """The form that checks of structured output ask for."""

    sky: Literal["clear", "cloudy"]
    is_cold: bool


@dataclass(frozen=True)
class Server:
    url: str
    chat: str
    embedder: str
    dimension: int

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


class SkipError(Exception):
    """The check needs something that this machine does not have."""


@dataclass(frozen=True)
class Check:
    client: str
    name: str
    run: Callable[[Server], None]


CHECKS: list[Check] = []


def check(client: str, name: str) -> Callable[[Callable[[Server], None]], Callable[[Server], None]]:
    def add(run: Callable[[Server], None]) -> Callable[[Server], None]:
        CHECKS.append(Check(client, name, run))
        return run

    return add


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: clear and cold"


def command(*args: str, **options: Any) -> str:
    done = subprocess.run(args, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False, **options)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip() or f"exit code {done.returncode}")
    return str(done.stdout)
