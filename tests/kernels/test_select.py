"""Which type is computed in, and by which backend."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from archerfish.config import EmbedConfig, EngineConfig
from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.inference_core import InferenceCore
from archerfish.errors import DeviceError
from archerfish.kernels import select
from archerfish.kernels.select import OpsBackend, choose_device, choose_dtype, choose_ops, fast_paths, register_backend
from archerfish.kernels.torch.reference import TorchOps


@pytest.mark.parametrize("wanted", ["bfloat16", "float16"])
def test_cpu_without_the_native_backend_falls_back_to_float32(
    wanted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "native_error", lambda: "it was not compiled")
    with caplog.at_level(logging.WARNING, "archerfish.kernels"):
        assert choose_dtype(wanted, "cpu") == "float32"
    assert wanted in caplog.text and "float32" in caplog.text
    caplog.clear()
    assert choose_dtype("float32", "cpu") == "float32"
    assert choose_dtype(wanted, "cuda") == wanted
    monkeypatch.setattr(select, "native_error", lambda: "")
    assert choose_dtype(wanted, "cpu") == wanted
    assert not caplog.text


def test_registered_backend_is_preferred_where_it_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherOps(TorchOps):
        name = "other"

    monkeypatch.setattr(select, "BACKENDS", list(select.BACKENDS))
    why_not = "it computes in float32"
    register_backend(
        OpsBackend("other", lambda device, dtype: "" if dtype == "float32" else why_not, OtherOps, "no Python")
    )
    assert choose_ops("cpu", "float32").name == "other"
    assert choose_ops("cpu", "float16").name != "other"
    monkeypatch.setattr(select, "choose_dtype", lambda wanted, device: "float16")
    states = {path.name: path for path in fast_paths()}
    assert (states["backend other"].is_on, states["backend other"].reason) == (False, why_not)
    assert states["backend torch reference"].is_on


@pytest.fixture
def fake_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets whether there is a driver, and what this torch is built for and sees."""

    def fake(*, has_driver: bool, built_for: str | None, has_card: bool) -> None:
        monkeypatch.setattr(select, "CARD_DRIVERS", (str(tmp_path if has_driver else tmp_path / "none"),))
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        card = SimpleNamespace(name="NVIDIA H200", total_memory=150_020_000_000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)

    return fake


def test_auto_takes_a_card_where_there_is_one_and_says_why(fake_machine: Callable[..., None]) -> None:
    fake_machine(has_driver=True, built_for="12.8", has_card=True)
    assert str(choose_device("auto")) == str(choose_device("cuda")) == "cuda: NVIDIA H200, 139 GiB"
    assert choose_device("cpu").name == "cpu"
    fake_machine(has_driver=True, built_for=None, has_card=False)
    assert str(choose_device("auto")) == f"cpu: this torch ({torch.__version__}) has no CUDA"
    fake_machine(has_driver=False, built_for="12.8", has_card=False)
    assert str(choose_device("auto")) == "cpu: no CUDA device"
    with pytest.raises(DeviceError, match="'cuda' was asked for"):
        choose_device("cuda")


def test_every_engine_has_device_auto_by_default() -> None:
    assert EngineConfig().device == EmbedConfig().device == "auto"
    for engine in (ArrowEngine, InferenceCore):
        assert inspect.signature(engine).parameters["device"].default == "auto"


def test_backend_without_torch_is_chosen_without_importing_torch() -> None:
    code = """if True:
        import sys
        from archerfish.kernels import select
        select.CARD_DRIVERS = ()
        select.register_backend(select.OpsBackend("native", lambda device, dtype: "", lambda device, dtype: "loaded", ""))
        assert select.choose_ops(select.choose_device("auto").name, select.choose_dtype("auto", "cpu")) == "loaded"
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)
