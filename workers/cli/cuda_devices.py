"""Prints the GPUs that CUDA sees, as JSON: [{"name": ..., "uuid": ..., "memory_bytes": ...}, ...], or {"error": why}.

    python -I -S cuda_devices.py

A short-lived process asks the driver: the caller loads no driver, and a broken driver breaks only this process. The
order is CUDA's, with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER applied. Imports nothing of Penstock.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from typing import Any

#: Values of CUresult in CUDA's driver API. A machine without devices is not an error.
CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE = 0, 100


def devices(cuda: Any) -> list[dict[str, Any]]:
    """The devices that a loaded libcuda sees. Raises OSError with the driver's message."""

    def call(name: str, *arguments: Any) -> None:
        status = getattr(cuda, name)(*arguments)
        if status != CUDA_SUCCESS:
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(status, ctypes.byref(text))
            raise OSError(status, f"{name}: {(text.value or b'unknown error').decode()}")

    count = ctypes.c_int()
    try:
        call("cuInit", 0)
        call("cuDeviceGetCount", ctypes.byref(count))
    except OSError as error:
        if error.errno == CUDA_ERROR_NO_DEVICE:
            return []
        raise
    gpus = []
    for ordinal in range(count.value):
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        name, digits = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceGetUuid_v2", digits, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        gpu = {"name": name.value.decode(errors="replace"), "uuid": f"GPU-{uuid.UUID(bytes=digits.raw)}"}
        gpus.append({**gpu, "memory_bytes": memory.value})
    return gpus


def main() -> None:
    """Print the devices."""
    try:
        report: object = devices(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        report = {"error": str(error)}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
