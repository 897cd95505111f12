"""The stack of a thread, and whether it waits for other ranks."""

from __future__ import annotations

import os
import threading

import torch

import hookline.distributed.comm
from hookline.distributed.comm import Answer
from hookline.reliability.stacks import stack_of, waits_for_ranks

HERE = (__file__, 1, "step")
TORCH = os.path.dirname(os.path.abspath(torch.__file__))


def torch_line(*parts: str) -> tuple[str, int, str]:
    return os.path.join(TORCH, *parts), 1, "function"


def test_the_stack_of_another_thread_is_told_innermost_first() -> None:
    ready, over = threading.Event(), threading.Event()

    def outer() -> None:
        inner()

    def inner() -> None:
        ready.set()
        over.wait(60)

    thread = threading.Thread(target=outer)
    thread.start()
    ready.wait(60)
    try:
        names = [name.rpartition(".")[2] for _, _, name in stack_of(thread.ident or 0)]
        where = [file for file, _, name in stack_of(thread.ident or 0) if name.endswith(".inner")]
    finally:
        over.set()
        thread.join()
    assert names.index("inner") < names.index("outer") < names.index("run")
    assert where == [__file__]
    assert stack_of(thread.ident or 0) == []


def test_a_collective_at_the_top_waits_for_ranks() -> None:
    assert waits_for_ranks([torch_line("distributed", "distributed_c10d.py"), HERE])
    assert waits_for_ranks([torch_line("nn", "functional.py"), torch_line("nn", "parallel", "x.py"), HERE])
    assert waits_for_ranks(
        [("<frozen abc>", 1, "x"), (hookline.distributed.comm.__file__, 9, "Ranks.gather")]
    )


def test_the_wait_for_an_answer_and_its_report_wait_for_ranks() -> None:
    reports, over = [threading.Event(), threading.Event()], threading.Event()

    class Work:
        """A collective that is complete once both stacks were read."""

        is_completed = over.is_set

    def report(waited: float) -> None:
        if not reports[0].is_set():
            reports[0].set()
            reports[1].wait(60)

    thread = threading.Thread(target=Answer(torch.zeros(1), Work()).wait, args=(0, report))
    thread.start()
    try:
        assert reports[0].wait(60) and waits_for_ranks(stack_of(thread.ident or 0))
        reports[1].set()
        assert waits_for_ranks(stack_of(thread.ident or 0))
    finally:
        reports[1].set()
        over.set()
        thread.join()


def test_a_backward_counts_unless_it_is_left_out() -> None:
    stack = [torch_line("autograd", "graph.py"), HERE]
    assert waits_for_ranks(stack) and not waits_for_ranks(stack, backward=False)


def test_code_of_the_user_above_a_collective_does_not_wait() -> None:
    assert not waits_for_ranks([HERE, torch_line("distributed", "distributed_c10d.py")])
    assert not waits_for_ranks([torch_line("nn", "functional.py"), HERE]) and not waits_for_ranks([])
    assert not waits_for_ranks([(f"{TORCH}vision/distributed/x.py", 1, "x")])  # another package
