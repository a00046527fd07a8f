"""Options of commands, and the commands serve and keys."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archerfish.cli.commands import COMMANDS
from archerfish.cli.main import main
from archerfish.cli.options import Parser, add_common, add_options, section
from archerfish.cli.serve import LIMITS
from archerfish.config import (
    SECTIONS,
    ConversionConfig,
    EmbedConfig,
    EngineConfig,
    HubConfig,
    Options,
    ServeConfig,
    env_name,
)
from archerfish.errors import InvalidOptionError, UnknownOptionError
from archerfish.serve.model_tables import ModelConfig
from archerfish.serve.tenants import Tenant, Tenants
from scripts import options_page

ALL = [(cls, spec) for cls in SECTIONS for spec in dataclasses.fields(cls)]
IDS = [f"{cls.section}-{spec.name}" for cls, spec in ALL]


def other_value(spec: dataclasses.Field[Any]) -> Any:
    """A permitted value that is not the default."""
    default: Any = spec.default
    if isinstance(default, bool):
        return not default
    if spec.metadata["choices"]:
        return next(choice for choice in spec.metadata["choices"] if choice != default)
    if isinstance(default, str):
        return "something"
    maximum = spec.metadata["maximum"]
    if maximum is not None and default + 1 > maximum:
        return spec.metadata["minimum"] if spec.metadata["minimum"] is not None else default
    return type(default)(default + 1 if default < 65535 else default - 1)


def parser_for(*sections: type[Options]) -> Parser:
    parser = Parser(prog="archerfish test")
    add_common(parser)
    add_options(parser, *sections)
    return parser


@pytest.mark.parametrize(("cls", "spec"), ALL, ids=IDS)
def test_every_option_is_keyword_flag_variable_and_key(
    cls: type[Options], spec: dataclasses.Field[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = other_value(spec)
    name = "max_num_seqs" if spec.name == "max_batch_size" and cls is EngineConfig else spec.name
    flag = "--" + spec.name.replace("_", "-")
    if isinstance(wanted, bool):
        given = [flag if wanted else flag.replace("--", "--no-", 1)]
    else:
        given = [flag, str(wanted)]
    assert getattr(section(cls, parser_for(cls).parse(given)), name) == wanted
    assert getattr(cls(**{spec.name: wanted}), name) == wanted

    text = str(wanted).lower() if isinstance(wanted, bool) else f'"{wanted}"' if isinstance(wanted, str) else wanted
    file = tmp_path / "options.toml"
    file.write_text(f"[{cls.section}]\n{spec.name} = {text}\n")
    assert getattr(section(cls, parser_for(cls).parse(["--config", str(file)])), name) == wanted

    monkeypatch.setenv(env_name(cls, spec.name), str(wanted))
    assert getattr(section(cls, parser_for(cls).parse([])), name) == wanted


def test_flag_beats_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "options.toml"
    file.write_text("[embed]\nmax_length = 10\nnum_threads = 10\nmax_batch_size = 10\n")
    monkeypatch.setenv("ARCHERFISH_CONFIG", str(file))
    monkeypatch.setenv("ARCHERFISH_EMBED_MAX_LENGTH", "20")
    monkeypatch.setenv("ARCHERFISH_EMBED_NUM_THREADS", "20")
    config = section(EmbedConfig, parser_for(EmbedConfig).parse(["--max-length", "30"]))
    assert (config.max_length, config.num_threads, config.max_batch_size, config.device) == (30, 20, 10, "auto")
    with pytest.raises(InvalidOptionError, match=r"\[embed\] max_batch_size cannot be 0"):
        section(EmbedConfig, parser_for(EmbedConfig).parse(["--max-batch-size", "0"]))


def test_colliding_names_get_their_section() -> None:
    parser = parser_for(EmbedConfig, ConversionConfig, HubConfig, ServeConfig)
    parsed = parser.parse(["--dtype", "float32", "--convert-dtype", "bfloat16"])
    assert section(EmbedConfig, parsed).dtype == "float32"
    assert section(ConversionConfig, parsed).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("given", "suggestion"),
    [
        ("--max-batchsize", "--max-batch-size"),
        ("--max-batch", "--max-batch-size"),
        ("--of-line", "--offline"),
        ("--dtpye=x", "--dtype"),
    ],
)
def test_unknown_flag_suggests_the_nearest(given: str, suggestion: str) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        parser_for(EmbedConfig, HubConfig).parse([given, "8"])
    assert suggestion in caught.value.hint


def test_texts_and_flags_mix() -> None:
    parser = Parser(prog="archerfish test")
    parser.add_argument("texts", nargs="*")
    add_common(parser)
    assert parser.parse(["a", "--json", "b"]).texts == ["a", "b"]
    assert parser.parse(["--", "--not-a-flag"]).texts == ["--not-a-flag"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: archerfish {command.name}")
    reports = ("--output", "--baseline", "--save-baseline", "--tolerance") if command.module == "bench" else ()
    assert all(flag in shown for flag in ("--config", "--json", "--quiet", "--debug", "--version", *reports))


def test_options_page_is_up_to_date(tmp_path: Path) -> None:
    assert options_page.main(["--check"]) == 0, f"run `{options_page.COMMAND}`"
    page = tmp_path / "options.md"
    assert options_page.main(["--check"], page) == 1
    assert options_page.main([], page) == options_page.main(["--check"], page) == 0
    page.write_text("something else")
    assert options_page.main(["--check"], page) == 1


# `archerfish serve` passes its options on; `archerfish keys` shows a key once, and the service finds it by its hash


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
        ServeConfig(port=0, latency_budget_ms=1.5, served_model_name="a,b,c"),
        EngineConfig(model="m"),
        EmbedConfig(model="e"),
        HubConfig(offline=True),
        [ModelConfig(model="n")],
    ]
    assert capsys.readouterr().out == "it serves\n"
    assert main(["--quiet", "serve", *flags]) == 0
    assert capsys.readouterr().out == ""


def test_serve_takes_models_without_flags(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any, llama: Path, hub: HubConfig
) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(
        sys.modules, "archerfish.serve.run", SimpleNamespace(serve=lambda *given, **_: seen.extend(given))
    )
    ranker = str(tiny_model("Bert", head="ForSequenceClassification", config={"num_labels": 1}))
    vectors = str(tiny_model())
    assert main(["serve", str(llama), vectors, ranker, "--port", "0"]) == 0
    service, engine, embed = seen[:3]
    assert (engine.model, embed.model, service.rerank_model, service.port) == (str(llama), vectors, ranker, 0)


@pytest.mark.parametrize(
    ("kinds", "flag", "other"), [("embedding", "--model", "--embed-model"), ("generation", "--embed-model", "--model")]
)
def test_serve_refuses_a_model_of_another_kind(
    kinds: str, flag: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
