"""Several generation models on one server: named by flags or by the TOML file, listed, loaded and asked for by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.cli.main import find_command, make_parser
from archerfish.cli.serve import add_serve_arguments, take_models
from archerfish.config import EmbedConfig, EngineConfig, ModelConfig, ServeConfig, read_models
from archerfish.errors import InvalidOptionError, UnknownOptionError
from archerfish.serve import run
from archerfish.serve.hosted_llm import HostedLLM
from tests.engine.tiny_llama import save_tiny_llama
from tests.text.tiny_tokenizers import byte_fallback

from .client import PASS, app_of, error_of, with_app
from .hosting import make_host

TOML = """
[engine]
max_num_seqs = 4
max_cache_tokens = 2048
dtype = "float32"
load_format = "dummy"
[[models]]
model = "{directory}/first"
max_num_seqs = 2
[[models]]
model = "{directory}/second"
loads = "demand"
[[models]]
model = "{directory}/third"
loads = "idle"
"""


def save_models(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir()
        save_tiny_llama(directory / name, max_position_embeddings=256, vocab_size=288)
        byte_fallback(directory / name)


def test_models_of_the_file_are_listed_loaded_as_configured_and_answer_by_name(tmp_path: Path) -> None:
    save_models(tmp_path, "first", "second", "third")
    config_file = tmp_path / "config.toml"
    config_file.write_text(TOML.format(directory=tmp_path))
    engine = EngineConfig(max_num_seqs=4, max_cache_tokens=2048, dtype="float32", load_format="dummy")
    specs = run.models_of(ServeConfig(kinds="generation"), engine, EmbedConfig(), read_models(config_file))
    host = make_host(tmp_path, front_end_pass=PASS, models=specs, hub={"offline": True})
    host.load_models()
    assert [entry.hosted is not None for entry in host.models.entries] == [True, False, False]

    async def test(client: httpx.AsyncClient) -> None:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_length"]) for model in listed] == [(n, 256) for n in ("first", "second", "third")]
        for name in ("first", "second", "third", None):
            body: dict[str, Any] = {"prompt": "a b", "max_tokens": 3, "temperature": 0} | ({"model": name} if name else {})
            answer = await client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["model"]) == (200, name or "first"), answer.text
        unknown = await client.post("/v1/completions", json={"model": "fourth", "prompt": "a"})
        assert unknown.status_code == 404 and "first" in error_of(unknown)["message"]

    with host:
        with_app(test, app_of(host))
    engines = [entry.hosted.engine for entry in host.models.entries if isinstance(entry.hosted, HostedLLM)]
    assert [engine.config.max_num_seqs for engine in engines] == [2, 4, 4]


def test_repeated_flags_name_more_models(tmp_path: Path) -> None:
    config_file = tmp_path / "config.toml"
    config_file.write_text('[[models]]\nmodel = "pairs"\nkind = "cross-encoder"\nnum_threads = 2\n')
    flags = ["--model", "a", "--model", "b", "--embed-model", "c", "--config", str(config_file)]
    parser = make_parser(find_command(["serve"])[0])
    add_serve_arguments(parser)
    arguments = parser.parse(flags)
    models = take_models(arguments)
    assert models == [ModelConfig(model="b"), ModelConfig(model="pairs", kind="cross-encoder", options={"num_threads": 2})]
    specs = run.models_of(ServeConfig(), EngineConfig(model="a"), EmbedConfig(model="c"), models)
    assert [(spec.model, spec.kind) for spec in specs] == [
        ("a", "generation"), ("c", "embedding"), ("b", "generation"), ("pairs", "cross-encoder"),
    ]  # fmt: skip
    assert specs[3].options["num_threads"] == 2


def test_listed_models_replace_the_default_of_their_kind() -> None:
    specs = run.models_of(ServeConfig(), EngineConfig(), EmbedConfig(), [ModelConfig(model="own", loads="idle")])
    assert [(spec.model, spec.loads) for spec in specs] == [(EmbedConfig.model, "start"), ("own", "idle")]


@pytest.mark.parametrize(
    ("text", "error"),
    [("models = 3", InvalidOptionError), ("[[models]]\nkind = 'generation'", InvalidOptionError),
     ("[[models]]\nmodel = 'a'\nkind = 'poem'", InvalidOptionError),
     ("[[models]]\nmodel = 'a'\nlods = 'idle'", UnknownOptionError),
     ("[[models]]\nmodel = 'a'\nloads = 'never'", InvalidOptionError)],
)  # fmt: skip
def test_faulty_tables_are_refused(tmp_path: Path, text: str, error: type[Exception]) -> None:
    config_file = tmp_path / "config.toml"
    config_file.write_text(text)
    with pytest.raises(error):
        read_models(config_file)
