"""Which type is computed in, and by which backend."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from archerfish.kernels import select
from archerfish.kernels.select import Backend, choose_dtype, choose_ops, fast_paths, register_backend
from archerfish.kernels.torch import cpu as torch_cpu
from archerfish.kernels.torch.reference import TorchOps


@pytest.mark.parametrize("wanted", ["bfloat16", "float16"])
def test_cpu_falls_back_to_float32(
    wanted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_cpu, "is_available", lambda dtype: dtype == "float32")
    with caplog.at_level(logging.WARNING, "archerfish.kernels"):
        assert choose_dtype(wanted, "cpu") == "float32"
    assert wanted in caplog.text and "float32" in caplog.text
    caplog.clear()
    assert choose_dtype("float32", "cpu") == "float32"
    assert choose_dtype(wanted, "cuda") == wanted
    monkeypatch.setattr(torch_cpu, "is_available", lambda dtype: True)
    assert choose_dtype(wanted, "cpu") == wanted
    assert not caplog.text


def test_registered_backend_is_preferred_where_it_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    class NativeOps(TorchOps):
        name = "native"

    monkeypatch.setattr(select, "BACKENDS", list(select.BACKENDS))
    why_not = "it computes in float32"
    register_backend(Backend("native", lambda device, dtype: "" if dtype == "float32" else why_not, NativeOps, "no Python"))
    assert choose_ops("cpu", "float32").name == "native"
    assert choose_ops("cpu", "float16").name != "native"
    monkeypatch.setattr(select, "choose_dtype", lambda wanted, device: "float16")
    states = {path.name: path for path in fast_paths()}
    assert (states["backend native"].is_on, states["backend native"].reason) == (False, why_not)
    assert states["backend torch reference"].is_on


def test_backend_without_torch_is_chosen_without_importing_torch() -> None:
    code = """if True:
        import sys
        from archerfish.kernels import select
        select.register_backend(select.Backend("native", lambda device, dtype: "", lambda device, dtype: "loaded", ""))
        assert select.choose_ops(select.choose_device("cpu"), select.choose_dtype("auto", "cpu")) == "loaded"
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)
