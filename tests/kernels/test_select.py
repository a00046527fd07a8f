"""Which type is computed in."""

from __future__ import annotations

import logging

import pytest

from archerfish.kernels.select import choose_dtype
from archerfish.kernels.torch import cpu as torch_cpu


@pytest.mark.parametrize("wanted", ["bfloat16", "float16"])
def test_a_type_that_a_cpu_has_no_products_in_is_computed_in_float32(
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
