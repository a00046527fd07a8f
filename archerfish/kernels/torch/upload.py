"""Weights onto a card: threads bring pieces of mapped files into pinned memory, and the card fetches them from there."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import torch

Tensor = torch.Tensor
NUM_THREADS = 8
PIECE_BYTES = 4 << 20  # a copy on its way, of which every thread has two


class Uploads:
    """Copies to one CUDA device, by threads that end with `close`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device, torch.cuda.current_device())
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="archerfish-upload", initializer=self._start_thread)
        self._own = threading.local()

    def send(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, flat = tensor.reshape(-1), target.view(-1)
        step = max(1, PIECE_BYTES // tensor.element_size())
        copies: list[Future[torch.cuda.Event]] = [
            self._threads.submit(self._copy, source[first : first + step], flat[first : first + step])
            for first in range(0, source.numel(), step)
        ]
        for copy in copies:
            copy.result().synchronize()
        return target

    def close(self) -> None:
        self._threads.shutdown()

    def _start_thread(self) -> None:
        torch.set_num_threads(1)
        torch.cuda.set_device(self._device)
        own = self._own
        own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        own.buffers = [new_buffer() for _ in range(2)]

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        own = self._own
        own.buffers.reverse()
        buffer, is_free = cast(tuple[Tensor, torch.cuda.Event], own.buffers[0])
        is_free.synchronize()
        pinned = buffer[: target.nbytes].view(target.dtype)
        pinned.copy_(source)
        with torch.cuda.stream(own.stream):
            target.copy_(pinned, non_blocking=True)
            is_free.record()
        return is_free


def new_buffer() -> tuple[Tensor, torch.cuda.Event]:
    """Pinned memory, and when it may be written."""
    return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
