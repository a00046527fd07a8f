"""Models of the Hugging Face hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from archerfish.config import HubConfig
from archerfish.errors import ModelNotFoundError, UnreachableError, WriteError
from archerfish.store import names
from archerfish.store.names import choose_files, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SENTENCE_MODEL = [
    "config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "rust_model.ot", "modules.json", "tokenizer.json",
    "vocab.txt", "1_Pooling/config.json", "onnx/model.onnx", "onnx/config.json", "openvino/x.json", "README.md",
]  # fmt: skip


class FakeHub:
    """Stands for the two calls that are made of huggingface_hub."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = list(SENTENCE_MODEL)
        self.error: Exception | None = None
        self.asked: list[str] = []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repo: str, **_: Any) -> Any:
        if self.error:
            raise self.error
        return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name, size=3) for name in self.files])

    def snapshot_download(self, repo: str, *, revision: str, allow_patterns: list[str]) -> str:
        self.asked = allow_patterns
        directory = names.hub_cache_path() / f"models--{repo.replace('/', '--')}"
        for name in allow_patterns:
            path = directory / "snapshots" / revision / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"abc")
        (directory / "refs").mkdir(exist_ok=True)
        (directory / "refs" / "main").write_text(revision)
        return str(directory / "snapshots" / revision)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, hub: HubConfig) -> FakeHub:
    return FakeHub(monkeypatch)


def test_only_needed_files_are_downloaded(fake: FakeHub, hub: HubConfig) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve_model("org/name", hub, lambda done, total, what: seen.append((done, total)))
    wanted = {"1_Pooling/config.json", "config.json", "model.safetensors", "modules.json", "tokenizer.json", "vocab.txt"}
    assert set(fake.asked) == wanted
    assert (path / "model.safetensors").exists()
    assert seen[-1] == (18, 18)


def test_offline_or_unreachable_uses_the_cache(fake: FakeHub, hub: HubConfig) -> None:
    offline = hub.replace(offline=True)
    with pytest.raises(UnreachableError, match="offline mode is on"):
        resolve_model("org/name", offline)
    path = resolve_model("org/name", hub)
    fake.error = AssertionError("the network was used")
    assert resolve_model("org/name", offline) == resolve_model("org/name", hub.replace(revision=COMMIT)) == path
    fake.error = httpx.ConnectError("no route")
    assert resolve_model("org/name", hub) == path
    (path / "model.safetensors").unlink()
    with pytest.raises(UnreachableError):
        resolve_model("org/name", offline)


def test_unreachable_hub_suggests_a_builtin_model(fake: FakeHub, hub: HubConfig) -> None:
    fake.error = httpx.ConnectError("no route")
    with pytest.raises(UnreachableError, match="The built-in model 'all-minilm-l6-v2' needs only a package index"):
        resolve_model("other/all-MiniLM-L6-v2", hub)


def http_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    response: Any = httpx.Response(404, request=httpx.Request("GET", "http://hub"))
    return kind("no", response=response)


@pytest.mark.parametrize(("error", "kind", "message"), [
    (http_error(errors.RepositoryNotFoundError), ModelNotFoundError, "no Hugging Face model 'org/name'"),
    (http_error(errors.GatedRepoError), ModelNotFoundError, "gated"),
    (http_error(errors.RevisionNotFoundError), ModelNotFoundError, "no revision 'main'"),
    (http_error(errors.HfHubHTTPError), UnreachableError, "did not give it"),
    (OSError(28, "No space left on device"), WriteError, "No space left"), (TimeoutError(), UnreachableError, "TimeoutError"),
])  # fmt: skip
def test_hub_errors(fake: FakeHub, hub: HubConfig, error: Exception, kind: type[Exception], message: str) -> None:
    fake.error = error
    with pytest.raises(kind, match=message):
        resolve_model("org/name", hub)


def test_single_file_of_a_repository(fake: FakeHub, hub: HubConfig) -> None:
    fake.files = ["a.Q4_0.gguf", "a.Q8_0.gguf"]
    assert resolve_model("org/name:a.Q8_0.gguf", hub).name == "a.Q8_0.gguf"
    assert fake.asked == ["a.Q8_0.gguf"]
    assert resolve_model("org/name:a.Q8_0.gguf", hub.replace(offline=True)).name == "a.Q8_0.gguf"
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'a.Q4_0.gguf'"):
        resolve_model("org/name:a.Q4_1.gguf", hub)
    with pytest.raises(ModelNotFoundError, match=r"Choose one: org/name:a.Q4_0.gguf, org/name:a.Q8_0.gguf"):
        resolve_model("org/name", hub)
    fake.files = ["a.Q4_0.gguf", "README.md"]
    assert resolve_model("org/name", hub).name == "a.Q4_0.gguf"


def test_choice_of_weights() -> None:
    assert choose_files("r", ["config.json", "pytorch_model.bin", "training_args.bin"]) == ["config.json", "pytorch_model.bin"]
    sharded = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert set(choose_files("r", [*sharded, "consolidated.safetensors"])) == set(sharded)
    dense = ["model.safetensors", "2_Dense/model.safetensors", "2_Dense/config.json"]
    assert set(choose_files("r", dense)) == set(dense)
    with pytest.raises(ModelNotFoundError, match="no weights"):
        choose_files("r", ["config.json", "onnx/model.onnx"])
