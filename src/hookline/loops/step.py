"""One training batch, and one update: the hot path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hookline.data.batch import batch_size
from hookline.errors import END_EPOCH, SKIP_STEP, STEP_DONE, LossError, Signal
from hookline.loops.finite import all_finite
from hookline.loops.noting import skip_step
from hookline.loops.run import Run
from hookline.loops.schedulers import advance_due
from hookline.optimizers import gradients, total_norm, used_rate
from hookline.plan import Plan, nobody
from hookline.state import State, is_scalar
from hookline.strategies.sharded import agree_on_overflow, scale


def train_batch(run: Run, plan: Plan, s: State, batches_left: int | None) -> Signal | None:
    """One batch: move, step, backward, and the update if it completes the window. Returns END_EPOCH to end the epoch."""
    log, window = s.log, run.window
    if s.cache:
        s.cache.clear()
    if log.batch_values:
        log.batch_values.clear()

    plan.on_before_batch_transfer(s)
    if run.moves:
        s.batch = plan.transfer_batch_to_device(s)
    plan.on_after_batch_transfer(s)

    log.weight = weight = batch_size(s.batch)
    signal = plan.on_train_batch_start(s)
    if run.steers_batches:
        signal = run.agreement.on_batch(signal)
    elif signal is not None and run.rows is not None:
        run.agreement.refuse(signal)
    if signal is END_EPOCH:
        return signal
    tally = run.tally
    if tally is not None:
        log.weight = weight = tally.begin(s, weight if signal is None else 0)
    if window.batches == 0 and run.accumulate > 1:
        window.size = run.accumulate if batches_left is None else min(run.accumulate, batches_left)
    last = window.batches + 1 >= window.size
    together = run.together
    if together is not None:
        together.begin_batch(last)
    if signal is not None:  # SKIP_BATCH
        skip_batch(run, plan, s, last)
        return None

    before = run.step_before_batch = s.step
    if run.is_manual:
        s.last_loss = None
    s.returned = plan.training_step(s)
    window.batches += 1  # only now: a step that failed is done again after a resume
    if run.is_manual:
        take_manual_loss(run, s, weight)
    else:
        loss = s.returned if type(s.returned) is Tensor else loss_of(run, s.returned)
        if window.weight == 0:
            loss = run.tally.without_weight(loss)
        if together is not None:
            loss = together.agree_on(loss, last)
        if loss is None:
            s.last_loss = None
            window.had_none = True
        else:
            learn_from(run, plan, s, loss, weight)
        if last:
            update(run, plan, s)
    if run.schedules:
        advance_due(run, s.step > before, batches_left)
    run.position = s.batch_idx + 1
    end_of_batch(run, plan, s, weight, s.step > before)
    return None


def skip_batch(run: Run, plan: Plan, s: State, last: bool) -> None:
    """No further events, but a window that ends here still steps on the others."""
    run.window.batches += 1
    if run.tally is not None:
        run.tally.end(s)
    if run.together is not None:
        run.together.skip_batch(last)
    if last:
        close_window(run, plan, s)


def end_of_batch(run: Run, plan: Plan, s: State, weight: int, updated: bool) -> None:
    """Count it and tell everyone, of the update too if it made one."""
    tally = run.tally
    s.batches_seen += 1
    if tally is not None:
        tally.count(s)
    else:
        s.samples_seen += weight
        if "tokens_seen" in plan.wanted:
            s.tokens_seen += run.count_tokens(s.batch)
    s.nested_validate = True
    plan.on_train_batch_end(s)
    s.nested_validate = False
    if tally is not None:
        tally.end(s)
    if updated:
        end_of_step(run, plan, s)
    s.returned = None  # what the step returned may hold a graph


def learn_from(run: Run, plan: Plan, s: State, loss: Tensor, weight: float) -> None:
    """Differentiate a loss into the window's gradients, and note it."""
    window = run.window
    if not loss.requires_grad:
        raise LossError(cannot_train_on(s))
    s.live_loss = loss
    if window.count == 0:
        if run.together is None:
            zero_grad(plan, s)
        else:
            run.together.clear_gradients()
    noted = differentiate(run, plan, s)
    window.count += window.weight
    if run.accumulate > 1:
        window.losses.append(noted)
    if run.tally is not None:
        weight = run.tally.learnt(window, weight)
    if run.skips_nonfinite:
        window.held.append((noted, weight, s.log.loader))
    else:
        run.watch.look(noted)
        s.log.train_loss.add(noted, weight)
        if s.log.loader:
            s.log.add_of_loader("train", "loss", noted, weight, s.log.loader)


def take_manual_loss(run: Run, s: State, weight: int) -> None:
    """Manual optimization: the step has done it all; its loss is only watched."""
    run.window.clear()
    if run.scaler is not None and run.unscaled:
        run.scaler.update()
        run.unscaled.clear()
        run.stepped.clear()
    loss = s.returned
    if isinstance(loss, dict):
        note_numbers(run, loss)
        loss = loss.get("loss")
    if isinstance(loss, Tensor):  # else it is that of the last backward
        s.last_loss = loss.item() if run.on_cpu else loss.detach()
    is_left_out = run.skips_nonfinite and run.last_skip == ("nonfinite", s.batches_seen)
    if s.last_loss is not None and not is_left_out:
        if not run.skips_nonfinite:
            run.watch.look(s.last_loss)
        s.log.train_loss.add(s.last_loss, weight)
        if s.log.loader:
            s.log.add_of_loader("train", "loss", s.last_loss, weight, s.log.loader)


def close_window(run: Run, plan: Plan, s: State) -> None:
    """A window that ends early, or on a batch that was skipped, updates on what it has."""
    before = s.step
    window = run.window
    if window.count or window.had_none or (run.together is not None and window.batches):  # other ranks may have more
        update(run, plan, s)
    window.clear()
    if s.step > before:
        if run.schedules:
            advance_due(run, True, None)
        end_of_step(run, plan, s)


def settle_failed_batch(run: Run) -> None:
    """A batch that failed half-way, before it is saved: it counts if its update is made, else it is done again after a resume.

    Its gradients cannot be told from those of the window's other batches, so then the window goes on without them.
    """
    s, window = run.state, run.window
    if run.is_manual or s.returned is None or run.position != s.batch_idx:
        return
    if s.step > run.step_before_batch:
        window.clear()
        run.position += 1
        s.batches_seen += 1
        s.samples_seen += int(s.log.weight)
        if run.schedules and run.advanced_at != s.step:
            advance_due(run, True, None)
    else:
        batches = window.batches - 1
        window.clear()
        window.batches = batches


def zero_grad(plan: Plan, s: State) -> None:
    """The window's first micro-batch: clear the gradients of the finished step, after everyone had a look."""
    for s.optimizer_idx, s.optimizer in enumerate(s.optimizers):
        plan.on_before_zero_grad(s)
        plan.optimizer_zero_grad(s)


def differentiate(run: Run, plan: Plan, s: State) -> Any:
    """Backward with its events. Returns the user's loss, never divided or scaled, without its graph."""
    plan.on_before_backward(s)
    loss = s.live_loss
    scaled = loss if run.window.size == 1 else loss / run.window.size
    if run.tally is not None and run.tally.turn.factor != 1.0:
        scaled = scaled * run.tally.turn.factor
    if run.loss_weights is not None:
        scaled = scaled * run.loss_weights.get(s.dataloader_name, 1.0)
    if run.feeds is not None:
        run.feeds.spare(s.dataloader_name)
    s.scaled_loss = scaled if run.scaler is None else run.scaler.scale(scaled)
    try:
        plan.backward(s)
    except RuntimeError as error:
        if loss.numel() != 1:
            raise LossError(f"The loss must be one number, but has the shape {tuple(loss.shape)}; "
                            "return its mean.") from error  # fmt: skip
        raise
    s.live_loss = s.scaled_loss = None  # lets go of the graph
    if run.feeds is not None:
        run.feeds.bring_back(s.dataloader_name, run.window.fed, run.window.weight)
    # on the CPU a number costs less than a detached tensor, and 256 of those kept for a mean would fragment the heap
    s.last_loss = loss = loss.item() if run.on_cpu else loss.detach()
    plan.on_after_backward(s)
    return loss


def update(run: Run, plan: Plan, s: State) -> None:
    """The window's last micro-batch: one update per optimizer; `step` advances if at least one was applied."""
    window, scaler = run.window, run.scaler
    if run.accumulate > 1:
        s.window_losses = window.losses
    if run.tally is not None:
        run.tally.ask_for_loss(s)
    count = window.count if run.together is None else run.together.settle()
    if (count == 0 or run.skips_nonfinite) and not is_worth_a_step(run, plan, s, count):
        window.clear()
        return
    feeds, planned = run.feeds, window.size * window.unit
    window.correction = planned / count
    if feeds is not None:
        feeds.updated.clear()
    elif window.correction != 1.0:
        rescale(s.optimizers, window.correction)
    before = s.step
    s.norm_tensor = None
    for s.optimizer_idx, s.optimizer in enumerate(s.optimizers):
        if feeds is not None:
            if s.optimizer_idx not in window.fed:
                continue
            window.correction = planned / window.fed[s.optimizer_idx]
            if window.correction != 1.0:
                rescale([s.optimizer], window.correction)
        if scaler is not None and overflowed(scaler, s.optimizer):
            skip_step(run, "nonfinite")
            continue
        if run.measures_norm and "grad_norm" in plan.wanted:
            s.add_norm(total_norm([s.optimizer]))
        signal = plan.on_before_optimizer_step(s)
        if run.steers_updates:
            signal = run.agreement.on_update(signal)
        elif signal is not None and run.rows is not None:
            run.agreement.refuse(signal)
        if signal is SKIP_STEP:
            skip_step(run, "hook")
            continue
        if signal is not STEP_DONE:
            if run.clips:
                plan.configure_gradient_clipping(s)
                if s.gradient_clip_val is not None:
                    plan.on_gradient_clip(s)
            if run.recomputes:
                s.optimizer_closure.fresh = True
            plan.optimizer_step(s)
        if s.step == before:
            s.used_lr = used_rate(s.optimizer)
            s.step = before + 1
        if feeds is not None:
            feeds.note_update(s.optimizer_idx)
        plan.on_after_optimizer_step(s)
    if scaler is not None:
        scaler.update()
    window.clear()


def end_of_step(run: Run, plan: Plan, s: State) -> None:
    """After an update: its metrics go out, then on_step_end, under the same step number."""
    log = s.log
    if s.step % run.log_every == 0 and (run.logs or "on_train_metrics" in plan.wanted_at):
        row, log.pending = log.pending, {}
        row.setdefault("train/loss", s.mean_of_window() if run.tally is None else run.tally.loss_of_row(s))
        if s.used_lr is not None:
            row.setdefault("lr", s.used_lr)
        if run.mixes:
            row.update(run.train.metrics())
        run.write_row(run.over_ranks({key: value for key, value in row.items() if value is not None}))
    if plan.on_step_end is not nobody:
        waiting, log.pending = log.pending, {}
        s.nested_validate = True
        try:
            plan.on_step_end(s)
        except BaseException:
            log.pending = {**waiting, **log.pending}  # written when the run ends
            raise
        s.nested_validate = False
        run.write_pending()  # what a hook logged here belongs to this very step
        log.pending = waiting


# ---- the loss ----------------------------------------------------------------------------------------------------


def loss_of(run: Run, returned: Any) -> Tensor | None:
    """The loss in whatever a training step returned; the other numbers of a dictionary become epoch metrics."""
    if returned is None:
        return None
    if isinstance(returned, dict):
        if "loss" not in returned:
            raise LossError(f"training_step returned a dictionary without 'loss' (keys: {', '.join(map(str, returned))}).")
        note_numbers(run, returned)
        returned = returned["loss"]
    if returned is None or isinstance(returned, Tensor):
        return returned
    raise LossError(f"training_step returned {type(returned).__name__} {str(returned)[:60]!r}, which cannot be trained on: "
                    "return the loss as a tensor, a dictionary with 'loss', or None to leave the batch out.")  # fmt: skip


def note_numbers(run: Run, returned: dict[str, Any]) -> None:
    """The numbers beside the loss: their means over the epoch are logged without being asked for."""
    for key, value in returned.items():
        if key != "loss" and is_scalar(value):
            run.state.log.mean("train/" + key, value)


def cannot_train_on(s: State) -> str:
    """Why a loss without a graph is refused."""
    why = "gradients are switched off" if not torch.is_grad_enabled() else "it was detached, or no parameter took part in it"
    return (f"The loss of batch {s.batch_idx} cannot be differentiated: {why}. Training would silently change nothing. "
            "Return the tensor that the model's parameters produced, without .item(), .detach() or float().")  # fmt: skip


# ---- the update --------------------------------------------------------------------------------------------------


def is_worth_a_step(run: Run, plan: Plan, s: State, count: float) -> bool:
    """False, after on_step_skipped, if nothing in the window had a loss, or what is not finite is to be skipped and was found."""
    window, is_finite = run.window, True
    if run.skips_nonfinite:
        fed = [each for index, each in enumerate(s.optimizers) if run.feeds is None or index in window.fed]
        # a scaler looks at the gradients itself: it has to hear of those that are not finite
        grads = [grad for each in fed for grad in gradients(each)] if count and run.scaler is None else []
        is_finite = all_finite([loss for loss, _, _ in window.held], grads)
        if run.together is not None:
            is_finite = run.together.everywhere(is_finite)  # of gradients that are sharded each has looked at its own part
    if count and is_finite:
        for loss, weight, loader in window.held:
            s.log.train_loss.add(loss, weight)
            if loader:
                s.log.add_of_loader("train", "loss", loss, weight, loader)
        return True
    if window.count or window.had_none or run.together is None:  # not if this rank has only skipped batches
        skip_step(run, "nonfinite" if count else "no_loss")
    return False


def overflowed(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Unscale; whether a gradient is infinite. It is the very number that scaler.step would read."""
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    first = optimizer.param_groups[0]["params"][0]
    if type(first) is not Parameter and found:  # sharded: each rank has looked at its own part
        return agree_on_overflow(found, [each for group in optimizer.param_groups for each in group["params"]])
    return any(bool(value.item()) for value in found.values())


def rescale(optimizers: list[Optimizer], factor: float) -> None:
    """Losses were divided by what the window was planned to count; make it what it does count."""
    for optimizer in optimizers:
        if grads := gradients(optimizer):
            scale(grads, factor)
