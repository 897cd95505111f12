"""Notes on the error of a failed run: the batch of a failed step, what to write instead of a common mistake.

They are made when a run has failed, so that neither steps nor `log` check anything in each call.
"""

from __future__ import annotations

import inspect
import re
import traceback

from hookline.data.batch import describe_batch
from hookline.run.module import Module, PlainSteps, name_of_step
from hookline.run.run import Run
from hookline.util.errors import ATTRIBUTES, HooklineError, closest
from hookline.util.text import error_text

UNKNOWN_ARGUMENT = re.compile(r"(?:Module|View)\.log\(\) got an unexpected keyword argument '(\w+)'")
"""Python's message for an argument that `log` of a module or of a trainer does not have."""
_REDUCED = "values of all ranks are reduced by reduce= without it, and rank 0 writes them"
LIGHTNING_ARGUMENTS = {
    "reduce_fx": "pass reduce='mean', 'sum', 'min', 'max' or 'last'",
    "sync_dist": f"leave it out: {_REDUCED}",
    "sync_dist_group": f"leave it out: {_REDUCED}",
    "rank_zero_only": f"leave it out, and log on every rank: {_REDUCED}",
    "add_dataloader_idx": "leave it out: with several loaders, val/dl_NAME/... has the result of each",
    "logger": "leave it out; to keep a value out of the loggers, remove it in the event on_train_metrics",
    "enable_graph": "leave it out: logged values are detached",
    "metric_attribute": "leave it out: log the metric object itself, of any attribute",
}
"""Arguments of `log` that only Lightning has, and what to do instead."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
LONGEST_BATCH = 300
"""Characters of the description of a batch, which may be a list of many parts."""


def explain_failure(run: Run, error: BaseException) -> None:
    """Add to the error what helps to correct the user's code."""
    add_log_hint(error)
    advise_on_name(error)
    _, text = error_text(error)
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in text:
        error.add_note(_of_second_backward(run))
    elif isinstance(error, ValueError) and "optimizer got an empty parameter list" in text:
        if next(run.module.parameters(), None) is None:
            error.add_note(
                f"{type(run.module).__name__} has no parameters; layers in a Python list must be in "
                "nn.ModuleList, and those in a dictionary in nn.ModuleDict."
            )
    elif (
        isinstance(error, Exception)
        and not isinstance(error, HooklineError)
        and any(each.name in STEPS for each in traceback.extract_tb(error.__traceback__))
    ):
        batch = describe_batch(run.state.batch)
        error.add_note(f"batch: {batch if len(batch) <= LONGEST_BATCH else batch[:LONGEST_BATCH] + ' ...'}")
        if run.stage == "predict" and isinstance(run.steps, PlainSteps):
            error.add_note(
                f"predict calls {type(run.module).__name__} with the batch, with the first part of a list or "
                "tuple, or with the entries of a mapping by the names of its parameters. For another batch, "
                "derive it from hookline.Module and write predict_step(self, batch, batch_idx)."
            )
        elif run.stage == "predict" and type(run.steps).predict_step is Module.predict_step:
            error.add_note(
                f"{type(run.module).__name__} has no predict_step, so predict calls it with the batch, or "
                "with the first part of a list or tuple. For another batch, write "
                "predict_step(self, batch, batch_idx)."
            )


def _of_second_backward(run: Run) -> str:
    step = name_of_step(run.steps)
    if run.traits.is_manual:
        return f"{step} has called backward twice for one loss."
    manual = "" if isinstance(run.steps, PlainSteps) else ", or set automatic_optimization = False"
    return (
        f"If {step} calls backward itself: only return the loss{manual}. If it does not, the loss depends on "
        "a tensor of an earlier batch, such as a hidden state: keep it with .detach()."
    )


def add_log_hint(error: BaseException) -> None:
    """Add a note to the error about an argument of `log` that only Lightning has."""
    if type(error) is TypeError and "log_metrics() missing 1 required positional argument" in str(error):
        error.add_note("Call self.log(name, value), which knows step and epoch, or trainer.log in a hook.")
    found = UNKNOWN_ARGUMENT.search(str(error)) if type(error) is TypeError else None
    if found is None:
        return
    if found[1] in LIGHTNING_ARGUMENTS:
        error.add_note(f"log({found[1]}=...) is Lightning's; in Hookline {LIGHTNING_ARGUMENTS[found[1]]}.")
    elif near := closest(found[1], inspect.signature(Module.log).parameters):
        error.add_note(f"log() has no argument {found[1]!r}.{near}")


def advise_on_name(error: BaseException) -> None:
    """Add to the error for a missing attribute of a module what to use instead of a name of Lightning.

    A `__getattr__` of `Module` would be called for each layer that a step uses, and torch.compile would not
    know the names of layers.
    """
    if type(error) is not AttributeError or not isinstance(error.obj, Module):
        return
    if (name := str(error.name)) in ATTRIBUTES and not hasattr(type(error.obj), name):
        error.args = (f"{error}. {ATTRIBUTES[name]}",)
        error.obj = None  # Python would add a similar name
