"""Errors of an exhausted memory, of whatever device or allocator, without an import of torch."""

from __future__ import annotations

from hookline.util.errors import HooklineError
from hookline.util.text import linked_errors

TEXTS = (
    "out of memory",  # CUDA, HIP, XPU, MPS and NPU; cudaErrorMemoryAllocation
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    # cuDNN may find no algorithm that fits into the rest of the memory, and then blames the input
    "cudnn_status_not_supported. this error may appear if you passed in a non-contiguous input",
    "resource_exhausted",
)
"""Parts of the messages, in lower case."""


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """Return the error that says that the memory of a device or of the machine is exhausted, or None.

    It looks at the class and the message of an error, of its causes, and of errors that are grouped in it.
    """
    for each in linked_errors(error, "__cause__", "exceptions"):
        if isinstance(each, MemoryError) or any(
            cls.__name__ == "OutOfMemoryError" for cls in type(each).__mro__
        ):
            return each
        # a worker process of a DataLoader sends its error as a RuntimeError with the text of the first one;
        # an error of Hookline may quote that of another rank
        is_candidate = isinstance(each, RuntimeError) and not isinstance(each, HooklineError)
        if is_candidate and any(text in str(each).lower() for text in TEXTS):
            return each
    return None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory is exhausted."""
    return out_of_memory(error) is not None
