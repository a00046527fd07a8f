"""LoRA adapters over HTTP: named as models on every route, loaded and unloaded, found on demand, and hidden from who
may not use them."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request

from archerfish.config import HubConfig, ServeConfig
from archerfish.engine.adapters import AdapterLibrary
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import ArcherfishError, InvalidInputError, InvalidOptionError
from archerfish.params import SamplingParams
from archerfish.sequence import Namespace
from archerfish.serve.adapter_changes import load_adapters, note_changes, read_changes
from archerfish.serve.adapter_routes import AdapterRoutes, LoadBody, UnloadBody
from archerfish.serve.catalog import Catalog
from archerfish.serve.client import RemoteError
from archerfish.serve.processes import ModelSpec
from archerfish.serve.routing import namespace_of
from archerfish.serve.run import host_config
from archerfish.serve.tenants import ANONYMOUS, Tenants, add_key
from archerfish.serve.wire import ChangeAdapter, GenerationRequest, Query, Report
from archerfish.store.adapters import MapShape, read_adapter
from tests.engine.tiny_llama import tiny_config
from tests.models.adapter_files import random_adapter

from .client import LIMIT_S, PASS, error_of, serving
from .fake_backend import TEMPLATE
from .hosting import add_llm, make_host, whole

pytestmark = pytest.mark.anyio
SHAPES = {
    f"model.layers.{i}.self_attn.{name}": (rows, 32) for i in (0, 1) for name, rows in (("q_proj", 32), ("v_proj", 16))
}
PROMPT = "the cat sat on the mat and on the mat and on the mat"
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@asynccontextmanager
async def service(
    place: Path, keys: Path | None = None, adapters_file: str = "", **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A tiny Llama with adapters `one` and `two` in its directory, the first of which is loaded."""
    for seed, name in enumerate(("one", "two"), 1):
        if not (place / "lora" / name).exists():
            (place / "lora").mkdir(exist_ok=True)
            random_adapter(place / "lora" / name, SHAPES, seed, std=2.0)
    host = make_host(place, front_end_pass=PASS, api_keys_file=str(keys or ""), adapters_file=adapters_file)
    loras: dict[str, Any] = {
        "max_loras": 1,
        "lora_dir": str(place / "lora"),
        "lora_modules": f"one={place / 'lora' / 'one'}",
    }
    add_llm(host, place, has_text=True, max_len=192, enable_lora=True, **loras)
    (place / "tiny" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tenants = None if keys is None else Tenants.from_file(keys)
    async with serving(host, tenants=tenants, **{"allow_lora_updates": True, **options}) as client:
        yield client


async def text(client: httpx.AsyncClient, model: str, **options: Any) -> str:
    answer = await client.post("/v1/completions", json={**ASK, "model": model}, **options)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


async def names(client: httpx.AsyncClient, **options: Any) -> list[str]:
    return [model["id"] for model in (await client.get("/v1/models", **options)).json()["data"]]


async def ask(
    client: httpx.AsyncClient, path: str, body: dict[str, Any] | None, model: str, headers: dict[str, str]
) -> httpx.Response:
    """A request that names a model in its body, in its query or in its path."""
    if body is not None:
        return await client.post(path, json={**body, "model": model}, headers=headers)
    if path == "/v1/models":
        return await client.get(f"{path}/{model}", headers=headers)
    return await client.get(path, params={"model": model}, headers=headers)


async def test_an_adapter_is_a_model_on_every_route(tmp_path: Path) -> None:
    async with service(tmp_path) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent"), model.get("root")) for model in listed] == [
            ("tiny", None, None),
            ("one", "tiny", str(tmp_path / "lora" / "one")),
        ]
        assert (await client.get("/v1/models/one")).json()["parent"] == "tiny"
        found = {model: await text(client, model) for model in ("tiny", "one")}
        assert found["tiny"] != found["one"] == await text(client, "one")
        messages = [{"role": "user", "content": "Hello"}]
        for path, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "Hello"}),
            ("/v1/messages", {"messages": messages, "max_tokens": 16}),
            ("/api/chat", {"messages": messages, "stream": False}),
        ):
            answers = [await client.post(path, json={**body, "model": model}) for model in ("one", "tiny")]
            assert [answer.json()["model"] for answer in answers] == ["one", "tiny"], answers[0].text
        asked = [{"model": model, "prompt": PROMPT} for model in ("one", "tiny", "two")]
        explained = [(await client.post("/v1/cache/explain", json=body)).json() for body in asked]
        assert [one["reason"] for one in explained][2] == "adapter_differs" and explained[0][
            "reason"
        ] != "adapter_differs"
        metrics = (await client.get("/metrics")).text
        assert 'archerfish_adapter_requests_total{adapter="one",model_name="tiny"}' in metrics
        assert 'archerfish_adapter_loads_total{model_name="tiny"}' in metrics
        backend = client._transport.app.state.catalog.backend  # type: ignore[attr-defined]
        with pytest.raises(RemoteError, match="no adapter"):
            await whole(backend, prompt=PROMPT, adapter="nothing", credentials=PASS)
        assert 'adapter="nothing"' not in (await client.get("/metrics")).text, "a name that is none is not counted"


async def test_load_unload_and_reload(tmp_path: Path) -> None:
    async with service(tmp_path) as client:
        base, one, two = [await text(client, model) for model in ("tiny", "one", "two")]
        assert len({base, one, two}) == 3
        assert await names(client) == ["tiny", "one", "two"], "an unknown name was found in the directory"
        shutil.copytree(tmp_path / "lora" / "one", tmp_path / "lora" / "copy")
        loaded = await client.post(LOAD, json={"lora_name": "mine", "lora_path": "copy"})
        assert loaded.status_code == 200 and loaded.json()["rank"] == 4, loaded.text
        assert await text(client, "mine") == one
        again = await client.post(LOAD, json={"lora_name": "mine", "lora_path": "two"})
        assert again.status_code == 400 and "mine" in error_of(again)["message"]
        again = await client.post(LOAD, json={"lora_name": "mine", "lora_path": "two", "load_inplace": True})
        assert again.status_code == 200
        assert await text(client, "mine") == two, "no context of the old content"
        assert (await client.post(UNLOAD, json={"lora_name": "mine"})).json()["status"] == "unloaded"
        gone = await client.post("/v1/completions", json={**ASK, "model": "mine"})
        assert gone.status_code == 404 and error_of(gone)["code"] == "model_not_found"
        assert (await client.post(UNLOAD, json={"lora_name": "mine"})).status_code == 404
        for path, message in (
            ("../tiny", "outside of the directory"),
            ("/etc", "outside of the directory"),
            ("nothing", "no adapter at"),
        ):
            refused = await client.post(LOAD, json={"lora_name": "x", "lora_path": path})
            assert refused.status_code == 400 and message in error_of(refused)["message"], refused.text
        taken = await client.post(LOAD, json={"lora_name": "tiny", "lora_path": "two"})
        assert taken.status_code == 400 and "name of a model" in error_of(taken)["message"]
        for name in ("../lora/one", "lora/one", "nothing", "~nobody", "x" * 256):
            assert (await client.post("/v1/completions", json={**ASK, "model": name})).status_code == 404


async def test_a_process_that_is_started_again_makes_the_changes_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(tmp_path / "adapters.json")
    async with service(tmp_path, adapters_file=file) as client:
        for change in ({"lora_name": "mine", "lora_path": "two"}, {"lora_name": "gone", "lora_path": "two"}):
            assert (await client.post(LOAD, json=change)).status_code == 200
        answer = await text(client, "mine")
        for name in ("gone", "one"):
            assert (await client.post(UNLOAD, json={"lora_name": name})).status_code == 200
    modules = {"one": str(tmp_path / "lora" / "one")}
    with LLMEngine(tiny_config(tmp_path / "tiny", enable_lora=True)) as engine:
        assert engine.adapters is not None
        load_adapters(engine.adapters, engine.model_name, modules, file, is_only=True)
        assert [one.name for one in engine.adapters.list()] == ["mine"]
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        assert engine.generate(PROMPT, params, adapter="mine")[0].text == answer
        load_adapters(engine.adapters, "another", {"bad": str(tmp_path / "tiny")}, file, is_only=False)
        assert "another is served without the adapter bad" in caplog.text
        with pytest.raises(ArcherfishError, match="adapter_model"):
            load_adapters(engine.adapters, "a third", {"bad": str(tmp_path / "tiny")}, file, is_only=True)
        engine.adapters.unload("mine")
        load_adapters(engine.adapters, "a fourth", {**modules, "mine": modules["one"]}, file, is_only=True)
        assert [one.name for one in engine.adapters.list()] == ["one"]  # "mine" is another model's
        for name in ("one", "two"):
            shutil.rmtree(tmp_path / "lora" / name)
        load_adapters(engine.adapters, engine.model_name, modules, file, is_only=True)  # it has been served: no error
    assert "without the adapter mine" in caplog.text


def test_changes_need_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"no directory from which.*--lora-dir"):
        host_config(ServeConfig(allow_lora_updates=True), (ModelSpec(kind="generation"),), HubConfig(), str(tmp_path))


def test_changes_at_once_are_all_noted(tmp_path: Path) -> None:
    file, names = str(tmp_path / "adapters.json"), [f"adapter-{number}" for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: note_changes(file, "model", {name: "path"}), names))
    assert sorted(read_changes(file)["model"]) == sorted(names)


class TwoModels:
    """A backend of two models with adapters, of which the second takes what the first cannot."""

    def __init__(self) -> None:
        self.cards: list[dict[str, Any]] = [
            {"id": name, "kind": "generation", "max_length": 9, "adapters": [], "finds_adapters": True}
            for name in ("a", "b")
        ]
        self.changes: list[tuple[str, str]] = []

    async def ask(self, message: Any) -> Report:
        if isinstance(message, ChangeAdapter):
            self.changes.append((message.model, message.name))
            if message.model == "a":
                raise RemoteError("It does not fit.", code="invalid_adapter", status=400)
            self.cards[1]["adapters"] = [{"name": message.name, "path": "/x", "digest": "1"}]
        return Report(request_id="", values={"models": self.cards, "path": "/x", "rank": 4})


async def test_adapters_of_several_models() -> None:
    backend: Any = TwoModels()
    catalog = Catalog(backend)
    assert (await catalog.find("mine:latest", "generation")).parent == "b"
    assert backend.changes == [("a", "mine"), ("b", "mine")]
    routes, request = AdapterRoutes(catalog, ServeConfig(allow_lora_updates=True)), cast(Request, SimpleNamespace())
    with pytest.raises(InvalidInputError, match="b has an adapter 'mine'"):
        await routes.load(request, LoadBody.model_validate({"lora_name": "mine", "lora_path": "y", "model": "a"}))
    with pytest.raises(InvalidInputError, match="name of a model"):
        await routes.load(request, LoadBody.model_validate({"lora_name": "a:latest", "lora_path": "y"}))
    await routes.unload(request, UnloadBody.model_validate({"lora_name": "mine"}))
    assert backend.changes[-1] == ("b", "mine")
    await routes.load(request, LoadBody.model_validate({"lora_name": "new", "lora_path": "y"}))
    assert backend.changes[-2:] == [("a", "new"), ("b", "new")]
    backend.cards[1]["finds_adapters"] = False
    catalog.expire()
    with pytest.raises(RemoteError, match="does not fit"):
        await catalog.find("other", "generation")


async def test_routers_look_for_contexts_of_the_content(tmp_path: Path) -> None:
    """What a router hashes for a request is what the engine keeps its context under."""
    async with service(tmp_path) as client:
        catalog = client._transport.app.state.catalog  # type: ignore[attr-defined]
        card = await catalog.find("one", "generation")
        for credentials, is_shown in ((PASS, True), ("", False), ("a key", False)):
            query = Query(request_id="", about="models", credentials=credentials)
            [shown] = (await catalog.backend.ask(query)).values["models"]
            assert ("adapters" in shown, "finds_adapters" in shown) == (is_shown, is_shown), "for front ends alone"
        request = SimpleNamespace(state=SimpleNamespace(tenant=ANONYMOUS, log={}))
        sent = GenerationRequest(**catalog.address(request, card))
        assert (sent.model, sent.adapter) == ("tiny", "one")
        maps = {name.removeprefix("model."): MapShape(*shape) for name, shape in SHAPES.items()}
        assert namespace_of(sent) == Namespace("", read_adapter(tmp_path / "lora" / "one", maps).digest)


async def test_texts_are_read_while_adapters_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, read = threading.Event(), AdapterLibrary._read
    async with service(tmp_path) as client:
        catalog = client._transport.app.state.catalog  # type: ignore[attr-defined]
        monkeypatch.setattr(AdapterLibrary, "_read", lambda *args: gate.wait(LIMIT_S) and read(*args))
        changes = [ChangeAdapter(request_id=each, model="tiny", name=each, action="load", path="two") for each in "ab"]
        tasks = [asyncio.create_task(catalog.report(change)) for change in changes]
        await asyncio.sleep(0)  # they are sent before
        answered = asyncio.create_task(whole(catalog.backend, prompt=PROMPT, adapter="one", credentials=PASS))
        await asyncio.wait([answered, *tasks], return_when=asyncio.FIRST_COMPLETED)
        assert answered.done() and not any(task.done() for task in tasks)
        gate.set()
        assert [values["name"] for values in await asyncio.gather(*tasks)] == ["a", "b"]


async def test_answers_of_another_content_are_not_kept(tmp_path: Path) -> None:
    """An adapter is loaded in place while this front end still knows the old content under its name."""
    async with service(tmp_path, result_cache_mib=1) as client:
        catalog = client._transport.app.state.catalog  # type: ignore[attr-defined]
        one, two = [await text(client, model, headers={"Cache-Control": "no-store"}) for model in ("one", "two")]
        for path, expected, num_hits in (("two", two, 0), ("one", one, 0), ("one", one, 1)):
            change = ChangeAdapter(request_id="", model="tiny", name="one", action="load", path=path, in_place=True)
            await catalog.report(change)
            assert await text(client, "one") == expected
            metrics = (await client.get("/metrics")).text
            assert f"archerfish_result_cache_hits_total {num_hits}" in metrics, path


async def test_updates_are_off_unless_allowed(tmp_path: Path) -> None:
    async with service(tmp_path, allow_lora_updates=False) as client:
        refused = await client.post(LOAD, json={"lora_name": "mine", "lora_path": "two"})
        assert refused.status_code == 403 and error_of(refused)["code"] == "lora_updates_disabled"
        assert "--allow-lora-updates" in error_of(refused)["message"]


async def test_tenants_see_only_adapters_that_they_may_use(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    every: dict[str, dict[str, Any]] = {
        "alice": {},
        "bob": {"adapters": ["two"]},
        "carl": {"adapters": ["one"]},
        "boss": {"is_operator": True},
    }
    headers = {name: {"Authorization": f"Bearer {add_key(keys, name, **more)}"} for name, more in every.items()}
    async with service(tmp_path, keys) as client:
        assert await names(client, headers=headers["alice"]) == ["tiny", "one"]
        assert await names(client, headers=headers["bob"]) == ["tiny"]
        await text(client, "one", headers=headers["alice"])
        for path, body in (
            ("/v1/completions", ASK),
            ("/v1/tts/tokens", {"text": "a"}),
            ("/v1/cache/view", None),
            ("/v1/models", None),
        ):
            for tenant, hidden in (("bob", "one"), ("carl", "two")):
                answers = [await ask(client, path, body, name, headers[tenant]) for name in (hidden, "eno")]
                assert [answer.status_code for answer in answers] == [404, 404], "as if it were not here"
                found, unknown = [error_of(answer)["message"] for answer in answers]
                assert found.replace(hidden, "eno") == unknown
        assert await names(client, headers=headers["alice"]) == ["tiny", "one"], "what is hidden is not loaded either"
        assert (await ask(client, "/v1/cache/view", None, "one", headers["alice"])).json()["model"] == "one"
        await text(client, "two", headers=headers["bob"])
        refused = await client.post(LOAD, json={"lora_name": "x", "lora_path": "two"}, headers=headers["alice"])
        assert refused.status_code == 403 and error_of(refused)["code"] == "not_an_operator"
        allowed = await client.post(LOAD, json={"lora_name": "x", "lora_path": "two"}, headers=headers["boss"])
        assert allowed.status_code == 200
