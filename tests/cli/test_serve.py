"""`archerfish serve` passes its options on; `archerfish keys` shows a key once, and the service finds it by its hash."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archerfish.cli.main import main
from archerfish.cli.serve import LIMITS
from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ModelConfig, ServeConfig
from archerfish.errors import InvalidOptionError
from archerfish.serve.tenants import Tenant, Tenants


def test_serve_passes_all_sections(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def fake_serve(*sections: Any, models: list[ModelConfig], announce: Any) -> None:
        seen.extend([*sections[:4], models])
        announce("it serves")

    monkeypatch.setitem(sys.modules, "archerfish.serve.run", SimpleNamespace(serve=fake_serve))
    flags = ["--port", "0", "--kinds", "all", "--model", "m", "--model", "n", "--embed-model", "e", "--offline"]
    names = ["--served-model-name", "a,b", "--served-model-name", "c"]
    assert main(["serve", *flags, *names, "--latency-budget-ms", "1.5"]) == 0
    assert seen == [
        ServeConfig(port=0, latency_budget_ms=1.5, served_model_name="a,b,c"), EngineConfig(model="m"), EmbedConfig(model="e"),
        HubConfig(offline=True), [ModelConfig(model="n")],
    ]  # fmt: skip
    assert capsys.readouterr().out == "it serves\n"
    assert main(["--quiet", "serve", *flags]) == 0
    assert capsys.readouterr().out == ""


def test_serve_takes_models_without_flags(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any, llama: Path, hub: HubConfig
) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(sys.modules, "archerfish.serve.run", SimpleNamespace(serve=lambda *given, **_: seen.extend(given)))
    ranker = str(tiny_model("Bert", head="ForSequenceClassification", config={"num_labels": 1}))
    vectors = str(tiny_model())
    assert main(["serve", str(llama), vectors, ranker, "--port", "0"]) == 0
    service, engine, embed = seen[:3]
    assert (engine.model, embed.model, service.rerank_model, service.port) == (str(llama), vectors, ranker, 0)


@pytest.mark.parametrize(
    ("kinds", "flag", "other"), [("embedding", "--model", "--embed-model"), ("generation", "--embed-model", "--model")]
)
def test_serve_refuses_a_model_of_another_kind(kinds: str, flag: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--kinds", kinds, flag, "m"]) == InvalidOptionError.exit_code
    told = capsys.readouterr().err
    assert f"{flag} names a model of" in told and f"with {other}" in told


def test_new_key_is_found_by_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", str(file), "no spaces", "--json"]) == 2 and not file.exists()
    capsys.readouterr()
    assert main(["keys", str(file), "alice", "--tokens-per-minute", "300", "--weight", "2", "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert main(["keys", str(file), "root", "--operator"]) == 0
    shown = capsys.readouterr()
    tenants = Tenants.from_file(file)
    alice, root = tenants.find(key), tenants.find(shown.out.strip())
    assert (alice.name, alice.tokens_per_minute, alice.weight, alice.is_operator) == ("alice", 300, 2, False)
    assert (root.name, root.is_operator) == ("root", True)
    assert key not in file.read_text(encoding="utf-8") and "only this once" in shown.err


def test_help_of_keys_shows_defaults() -> None:
    plain = Tenant(name="x")
    for name, (_, description) in LIMITS.items():
        default = getattr(plain, name)
        shown = "no limit" if name.endswith("_minute") and not default else f"{default:g}"
        assert description.endswith(f"(default: {shown})")
