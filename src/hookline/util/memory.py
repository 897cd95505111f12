"""Errors of an exhausted memory, of whatever device or allocator, without an import of torch."""

from __future__ import annotations

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


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that the memory of a device or of the machine is exhausted.

    It looks at the class, the message, and the errors that caused this one or are grouped in it.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, MemoryError) or any(
            cls.__name__ == "OutOfMemoryError" for cls in type(each).__mro__
        ):
            return True
        # a worker process of a DataLoader sends its error as a RuntimeError with the text of the first one
        if isinstance(each, RuntimeError) and any(text in str(each).lower() for text in TEXTS):
            return True
        waiting += [each.__cause__, *getattr(each, "exceptions", ())]
    return False
