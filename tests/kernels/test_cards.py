"""Cards and torch's build, found out without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from archerfish.kernels import cards, select
from archerfish.kernels.cards import Card, TorchBuild, find_cards, torch_build

GIB = 1 << 30


def test_torch_build_says_what_torch_says() -> None:
    found = TorchBuild(torch.__version__, torch.version.cuda or "", torch.version.hip or "")
    assert torch_build() == found


class FakeDriver:
    """Answers as libcuda does: by numbers through pointers, with 0 for success."""

    def __init__(self, version: int = 12080, num_cards: int = 2, **errors: int) -> None:
        self.version = version
        self.num_cards = num_cards
        self.errors = errors

    def __getattr__(self, function: str) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            found = [getattr(each, "_obj", each) for each in arguments]
            if function == "cuDriverGetVersion":
                found[0].value = self.version
            elif function == "cuDeviceGetCount":
                found[0].value = self.num_cards
            elif function == "cuDeviceGet":
                found[0].value = found[1] + 7
            elif function == "cuDeviceGetName":
                found[0].value = b"NVIDIA H200" if found[2].value == 7 else b"NVIDIA T4"
            elif function == "cuDevicePrimaryCtxRetain":
                found[0].value = found[1].value
            elif function == "cuCtxSetCurrent":
                self.current = found[0].value
            elif function == "cuMemGetInfo_v2":
                found[0].value, found[1].value = (100 * GIB, 139 * GIB) if self.current == 7 else (14 * GIB, 15 * GIB)
            return self.errors.get(function, 0)

        return answer


def test_cards_come_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "torch_build", lambda: TorchBuild("2.13.0", "12.8", ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    assert find_cards() == ([Card("NVIDIA H200", 139 * GIB, 100 * GIB), Card("NVIDIA T4", 15 * GIB, 14 * GIB)], "")
    states = {path.name: path.is_on for path in select.fast_paths()}
    assert states["CUDA"] and not states["backend native"]


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (FakeDriver(num_cards=0), "no CUDA device"),
        (FakeDriver(version=11040), "the driver is for CUDA 11, this torch for 12"),
        (FakeDriver(cuInit=100), "the CUDA driver answers cuInit with error 100"),
        (None, "there is no CUDA driver (libcuda.so.1)"),
    ],
)
def test_reason_for_no_card(driver: FakeDriver | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> FakeDriver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(cards, "torch_build", lambda: TorchBuild("2.13.0", "12.8", ""))
    assert find_cards() == ([], reason)
    monkeypatch.setattr(cards, "torch_build", lambda: TorchBuild("2.13.0+cpu", "", ""))
    assert find_cards() == ([], "this torch (2.13.0+cpu) has no CUDA")


def test_torch_is_asked_where_its_files_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "torch_build", TorchBuild)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_cards() == ([], "this torch sees no CUDA device")
    fake = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, mem_get_info=lambda index: (1, 2))
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**vars(fake), get_device_name=lambda index: "AMD MI300X"))
    assert find_cards() == ([Card("AMD MI300X", 2, 1)], "")
