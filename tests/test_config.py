"""Options: one declaration, four ways in, unknown names refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from archerfish import config
from archerfish.config import ConversionConfig, EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.errors import InvalidOptionError, UnknownOptionError


def test_max_batch_size_bounds_a_step_and_max_concurrent_requests_the_requests_held() -> None:
    config = EngineConfig(max_batch_size=32, max_concurrent_requests=64)
    assert (config.max_num_seqs, config.max_concurrent_requests) == (32, 64)
    assert config.replace(max_num_seqs=4).max_num_seqs == 4


def test_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[serve]\nport = 1\nhost = 'a'\nlatency_budget_ms = 3\n", encoding="utf-8")
    monkeypatch.setenv("ARCHERFISH_CONFIG", str(file))
    monkeypatch.setenv("ARCHERFISH_SERVE_PORT", "2")
    monkeypatch.setenv("ARCHERFISH_SERVE_HOST", "b")
    found = config.resolve(ServeConfig, {"port": 3})
    assert (found.port, found.host, found.latency_budget_ms, found.log_level) == (3, "b", 3.0, "info")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cast(Any, EmbedConfig)(devise="cpu"), "Did you mean 'device'"),
        (lambda: EmbedConfig().replace(max_batchsize=1), "Did you mean 'max_batch_size'"),
    ],
)
def test_unknown_keyword_suggests_the_nearest(make: Any, message: str) -> None:
    with pytest.raises(UnknownOptionError, match=message):
        make()


def test_unknown_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHERFISH_SERVE_PROT", "1")
    with pytest.raises(UnknownOptionError, match="Did you mean 'ARCHERFISH_SERVE_PORT'"):
        config.resolve(ServeConfig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serv]\nport = 1\n", "Did you mean 'serve'"),
        ("[serve]\nprot = 1\n", "Did you mean 'port'"),
        ("serve = 1\n", "must be a section"),
        ("[serve\n", "not valid TOML"),
        ("[serve]\nport = 'x'\n", "must be a number"),
        ("[serve]\nport = true\n", "must be int"),
        ("[serve]\nport = 70000\n", "from 0 to 65535"),
    ],
)
def test_bad_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidOptionError, match=message):
        config.resolve(ServeConfig, config_file=file)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        config.resolve(ServeConfig, config_file=tmp_path / "none.toml")


def test_wrong_choice_lists_the_choices() -> None:
    with pytest.raises(InvalidOptionError, match="cpu, cuda, mps, auto"):
        EmbedConfig(device="tpu")


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        EmbedConfig().device = "cuda"  # type: ignore[misc]
    assert EmbedConfig().replace(device="cuda").device == "cuda"


def test_stored_dtype() -> None:
    assert ConversionConfig().stored_dtype() == "float16"
    assert ConversionConfig(use_float16=False).stored_dtype() == "float32"
    assert ConversionConfig(dtype="bfloat16").stored_dtype() == "bfloat16"


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert HubConfig().cache_path() == Path("/elsewhere/archerfish")
    assert HubConfig(cache_dir="/here").cache_path() == Path("/here")
