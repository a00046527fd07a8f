"""Options: one declaration, four ways in, unknown names refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from archerfish import config
from archerfish.config import ConversionConfig, EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.errors import InvalidOptionError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cast(Any, EmbedConfig)(devise="cpu"), "Did you mean 'device'"),
        (lambda: EmbedConfig().replace(max_batchsize=1), "Did you mean 'max_batch_size'"),
        (lambda: EmbedConfig(device="tpu"), "cpu, cuda, mps, auto"),
        (lambda: config.resolve(ServeConfig), "Did you mean 'ARCHERFISH_SERVE_PORT'"),
        (lambda: config.resolve(ServeConfig, config_file="none.toml"), "cannot be read"),
    ],
)
def test_bad_options_are_refused(make: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHERFISH_SERVE_PROT", "1")
    with pytest.raises(InvalidOptionError, match=message):
        make()


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


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        EmbedConfig().device = "cuda"  # type: ignore[misc]
    assert EmbedConfig().replace(device="cuda").device == "cuda"
    assert EngineConfig(max_batch_size=32).replace(max_num_seqs=4).max_num_seqs == 4


def test_stored_dtype() -> None:
    assert ConversionConfig().stored_dtype() == "float16"
    assert ConversionConfig(use_float16=False).stored_dtype() == "float32"
    assert ConversionConfig(dtype="bfloat16").stored_dtype() == "bfloat16"


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert HubConfig().cache_path() == Path("/elsewhere/archerfish")
    assert HubConfig(cache_dir="/here").cache_path() == Path("/here")
