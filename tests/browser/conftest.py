"""Chromium, and servers for it: scripted ones, and a real one with the built-in models."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.serve.wire import GenerationRequest
from tests.serve.client import running
from tests.serve.fake_backend import FakeBackend, fake_app

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="run with `make test-browser`")
expect = sync_api.expect
expect.set_options(timeout=30_000)  # the machine may be busy
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MODELS = ("story-rwkv7", "smollm2-135m-instruct", "all-minilm-l6-v2")
READY_S = 120
FIELD = "textarea[aria-label='Your message']"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    found = shutil.which("chromium") or pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(ARGS))
        yield browser
        browser.close()


class Chat:
    """A page of a server, as a user sees it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url

    def open(self, tab: str = "chat") -> Chat:
        self.page.goto(f"{self.url}/#{tab}")
        if tab == "chat":
            self.page.locator(FIELD).wait_for()
        return self

    def send(self, text: str) -> Chat:
        self.page.fill(FIELD, text)
        self.page.keyboard.press("Enter")
        return self

    def wait(self) -> Chat:
        """Wait for the end of the answer."""
        expect(self.page.locator(".composer button[aria-label=Send]")).to_be_visible(timeout=120_000)
        return self

    def say(self, text: str) -> Chat:
        return self.send(text).wait()

    def texts(self, role: str = "assistant") -> list[str]:
        found: list[str] = self.page.locator(f".message.{role} .body").all_inner_texts()
        return found

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True).last

    def set(self, **params: Any) -> Chat:
        """Parameters that new conversations begin with."""
        self.page.evaluate("(value) => localStorage.setItem('archerfish.params', JSON.stringify(value))", params)
        self.page.reload()
        self.page.locator(FIELD).wait_for()
        return self


@contextmanager
def visiting(chromium: Any, url: str, **options: Any) -> Iterator[Chat]:
    """A page in a fresh profile. It may ask no other host for anything, break no policy and throw no error."""
    wrong: list[str] = []
    context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page = context.new_page()
    page.on("request", lambda one: wrong.append(one.url) if not one.url.startswith((url, "blob:", "data:")) else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda one: wrong.append(one.text) if one.type == "error" and "Failed to load" not in one.text else None,
    )
    try:
        yield Chat(page, url)
        assert not wrong
    finally:
        context.close()


@pytest.fixture
def backend() -> FakeBackend:
    """Answers with what the test puts into `reply`."""
    made = FakeBackend(max_length=100_000)
    made.tokens_per_chunk = 4
    return made


@pytest.fixture
def scripted(backend: FakeBackend) -> Iterator[str]:
    with running(fake_app(backend)) as served:
        yield served.url


@pytest.fixture
def chat(chromium: Any, scripted: str) -> Iterator[Chat]:
    with visiting(chromium, scripted) as made:
        yield made.open()


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`archerfish serve` with the built-in models."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = (tmp_path_factory.mktemp("serve") / "log").open("w")
    words = [sys.executable, "-m", "archerfish", "serve", *MODELS, "--port", str(port)]
    server = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ)
    try:
        wait_for(url, Path(log.name))
        yield url
    finally:
        server.terminate()
        server.wait(READY_S)


def wait_for(url: str, log: Path) -> None:
    for _ in range(READY_S * 5):
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def said(request: GenerationRequest) -> str:
    """The last message of the user in a prompt."""
    prompt = bytes(i if i < 256 else 0 for i in request.token_ids or []).decode(errors="replace")
    found = re.findall(r"user\n(.*?)\0", prompt, flags=re.DOTALL)
    return str(found[-1]) if found else ""
