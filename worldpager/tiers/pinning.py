"""Page-locking host memory for CUDA. Nothing here runs unless a CUDA device is in use."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device's context, not only the current


def register(memory: npt.NDArray[np.uint8], device: torch.device) -> str:
    """Page-lock ``memory`` in the context of ``device``; returns why not, or ``""`` on success.

    The device is made current for the call only, so that no context appears on another one. After
    a failure the error CUDA keeps is taken up, so the next unrelated call does not report it.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device: nothing was page-locked"
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
        if int(status) == 0:
            return ""
        with suppress(RuntimeError):  # this launch reports the kept error, and so clears it
            torch.zeros(1, device=device).add_(1)
        return f"cudaHostRegister failed for {memory.nbytes} bytes with CUDA error {int(status)}"


def unregister(memory: npt.NDArray[np.uint8]) -> None:
    """Undo :func:`register`; a failure is of no consequence, as the memory goes away anyway."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(memory.ctypes.data)
