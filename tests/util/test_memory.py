"""Which errors mean that memory is exhausted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hookline.util.memory import is_out_of_memory


def caused(error: BaseException, by: BaseException) -> BaseException:
    error.__cause__ = by
    return error


FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    np._core._exceptions._ArrayMemoryError((10**9,), np.dtype(float)),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("MPS backend out of memory (MPS allocated: 5.05 GB, other allocations: 2.26 GB)."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    RuntimeError("Caught OutOfMemoryError in pin memory thread.\nOriginal: CUDA out of memory."),
    caused(ValueError("the step failed"), torch.OutOfMemoryError("full")),
    ExceptionGroup("two", [ValueError(), MemoryError()]),
]
OTHERS = [
    None,
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    ValueError("out of memory is the name of a band"),
    caused(ValueError("a"), caused(ValueError("b"), ValueError("c"))),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", FULL, ids=lambda each: str(each)[:40])
def test_an_exhausted_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda each: str(each)[:40])
def test_other_errors_are_not(error: BaseException | None) -> None:
    assert not is_out_of_memory(error)


def test_a_real_error_of_the_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_errors_that_refer_to_each_other_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
