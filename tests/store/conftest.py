from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from archerfish.config import HubConfig
from tests.store.models import convert, write_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


@pytest.fixture
def converted(tmp_path: Path, source: Path) -> Path:
    """A converted directory in float32 with both files."""
    return convert(source, tmp_path / "converted", dtype="float32").directory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubConfig:
    """Empty caches of archerfish and of huggingface_hub."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return HubConfig(cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def smollm2_gguf() -> Path:
    """The real GGUF of SmolLM2; tests that need it are skipped until it has been pulled."""
    path = HubConfig().cache_path() / "sources" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip("smollm2-135m-instruct is not in the cache")
    return path
