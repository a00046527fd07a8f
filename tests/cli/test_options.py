"""Flags come from the option dataclasses; red when an option cannot be reached, or an unknown one is let through."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from archerfish.cli.main import COMMANDS, main
from archerfish.cli.options import Parser, add_common, add_options, section
from archerfish.config import SECTIONS, ConversionConfig, EmbedConfig, EngineConfig, HubConfig, Options, ServeConfig, env_name
from archerfish.errors import InvalidOptionError, UnknownOptionError
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
        ("--max-batchsize", "--max-batch-size"), ("--max-batch", "--max-batch-size"), ("--of-line", "--offline"),
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
