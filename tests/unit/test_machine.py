"""GPUs as the driver tells of them, without torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.shared import machine

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def driver(init: int, count: int) -> Any:
    def device_count(pointer: Any) -> int:
        pointer._obj.value = count
        return 0

    return SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=device_count)


@pytest.mark.parametrize(("found", "expected"), [(driver(0, 2), 2), (driver(NO_DEVICE, 2), 0), (OSError("no such file"), 0)])
def test_cuda_devices(monkeypatch: pytest.MonkeyPatch, found: Any, expected: int) -> None:
    def load(name: str) -> Any:
        assert name == "libcuda.so.1"
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert machine.num_cuda_devices() == expected
