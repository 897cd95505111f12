"""Samples generated during training: what is logged, that training is not disturbed, ranks, resumes, refusals."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.torchrun import torchrun
from test_budgets import is_ours, per_step, with_hooks, without_hooks
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import Hook, HookError, Module, OptionError, Trainer, every
from hookline.hooks import GenerateSamples, ModelCheckpoint, WeightAveraging
from hookline.loggers import read_log
from hookline.report.reader import read_run

LETTERS = "abcdefgh"


class Writer(Module):
    """A language model of letters with dropout and batch norm, whose generate takes and returns text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop = nn.Embedding(8, 8), nn.Dropout(0.5)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8)])
        self.layers[1].eval()  # frozen statistics: this mode must survive

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.embed(tokens)
        for layer in self.layers:
            made = layer(made)
        return self.drop(made)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch), batch)

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def generate(self, prompt: str, length: int = 3) -> str:
        assert not any(each.training for each in self.modules()) and not torch.is_grad_enabled()
        for _ in range(length):
            logits = self(torch.tensor([LETTERS.index(prompt[-1])], device=self.device))
            prompt += LETTERS[int(torch.multinomial(logits.softmax(-1), 1))]
        return prompt


def tokens(count: int = 6) -> list[Tensor]:
    return list(torch.randint(0, 8, (count, 4), generator=torch.Generator().manual_seed(1)))


def fit(*hooks: Hook, run_dir: Path | None = None, **options: Any) -> tuple[Trainer, Writer]:
    net = Writer()
    given: dict[str, Any] = {"seed": 3, "max_epochs": 2, **options}
    trainer = quiet(hooks=hooks, **({} if run_dir is None else {"run_dir": str(run_dir)}), **given)
    trainer.fit(net, tokens(), tokens(2))
    return trainer, net


def samples(folder: Path) -> list[dict[str, Any]]:
    return [each for each in read_log(folder / "samples.jsonl") if each["type"] == "sample"]


@pytest.mark.parametrize("interval", [None, "1 steps"])
def test_training_is_bit_for_bit_the_same_as_without_it(interval: str | None) -> None:
    class Draws(Hook):
        """Draws from every stream after the samples."""

        order = 1000

        def __init__(self) -> None:
            self.drawn: list[Any] = []
            self.modes: list[Any] = []

        def on_train_batch_start(self, module: nn.Module) -> None:
            self.drawn.append(torch.rand(1).item())
            self.modes.append([each.training for each in module.modules()])

    found = []
    for hooks in ([], [GenerateSamples(["a", "b"], every=interval)]):
        draws = Draws()
        trainer, net = fit(*hooks, draws)
        weights = [each.detach().clone() for each in net.state_dict().values()]
        found.append((weights, draws.drawn, draws.modes, dict(trainer.metrics.read())))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1:] == found[1][1:]
    assert found[0][2][0][-1] is False and found[0][2][0][0] is True


def test_samples_are_in_the_log_in_a_file_and_in_the_report(tmp_path: Path) -> None:
    hook = GenerateSamples(["a", "bc"], options={"length": 4})
    trainer, _ = fit(hook, run_dir=tmp_path, logger=True, num_sanity_val_steps=1)
    found = samples(tmp_path)
    assert [(each["step"], each["epoch"], each["tag"], each["prompt"]) for each in found] == [
        (6, 0, "samples/0", "a"),
        (6, 0, "samples/1", "bc"),
        (12, 1, "samples/0", "a"),
        (12, 1, "samples/1", "bc"),
    ]
    assert all(each["text"].startswith(each["prompt"]) and each["at"] == "validation" for each in found)
    assert [len(each["text"]) for each in found[:2]] == [5, 6] and hook.latest == [
        each["text"] for each in found[2:]
    ]
    texts = [(each["tag"], each["text"]) for each in read_log(tmp_path) if each["type"] == "text"]
    assert texts == [(each["tag"], each["text"]) for each in found]
    assert set(read_run(tmp_path).texts) == {"samples/0", "samples/1"}
    assert trainer.status == "completed"


def test_equal_weights_give_equal_samples_and_another_prompt_does_not_change_them(tmp_path: Path) -> None:
    class Still(Writer):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    made = {}
    for name, prompts, seed in (("one", ["a"], 0), ("more", ["a", "b"], 0), ("other", ["a"], 1)):
        hook = GenerateSamples(prompts, options={"length": 20}, every="2 steps", seed=seed)
        quiet(hooks=[hook], run_dir=str(tmp_path / name)).fit(Still(), tokens())
        made[name] = [each["text"] for each in samples(tmp_path / name) if each["tag"] == "samples/0"]
    assert len(made["one"]) == 3 and len({*made["one"], *made["more"]}) == 1
    assert made["one"] != made["other"]


def test_a_function_may_return_an_image(tmp_path: Path) -> None:
    def draw(module: Any, prompt: int, size: int = 2) -> Tensor:
        return torch.rand(1, 3, size, size) * prompt

    hook = GenerateSamples([0, 1], draw, options={"size": 4}, every="3 steps", tag="pictures")
    fit(hook, run_dir=tmp_path, logger=True, max_epochs=1)
    found = samples(tmp_path)
    assert [each["tag"] for each in found] == ["pictures/0", "pictures/1"] * 2 and found[0]["prompt"] == "0"
    for each in found:
        assert (tmp_path / each["image"]).read_bytes().startswith(b"\x89PNG")
    assert hook.latest[0].shape == (3, 4, 4) and float(hook.latest[0].max()) == 0.0 < float(
        hook.latest[1].max()
    )
    assert [each["type"] for each in read_log(tmp_path)].count("image") == 4


def test_at_a_validation_it_uses_the_averaged_weights() -> None:
    def look(module: Any, prompt: Any) -> str:
        return str(module.embed.weight.sum().item())

    average, hook = WeightAveraging(decay=0.5), GenerateSamples([""], look)
    _, net = fit(average, hook)
    assert hook.latest == [str(average.averages["embed.weight"].sum().item())]
    assert hook.latest != [look(net, None)]


def test_tensors_and_dictionaries_are_prompts_too(tmp_path: Path) -> None:
    class Tokens(Net):
        def generate(self, tokens: Tensor, more: int = 1) -> Tensor:
            assert tokens.shape == (1, 2)
            return torch.cat([tokens, tokens[:, :1] + more], 1)

    given = torch.tensor([[1, 2], [3, 4]])
    for name, prompts in (("rows", given), ("tables", [{"tokens": given[:1], "more": 5}])):
        quiet(hooks=[GenerateSamples(prompts, every=1)], run_dir=str(tmp_path / name)).fit(
            Tokens(), batches(1)
        )
    assert [(each["prompt"], each["text"]) for each in samples(tmp_path / "rows")] == [
        ("1 2", "1 2 2"),
        ("3 4", "3 4 4"),
    ]
    (table,) = samples(tmp_path / "tables")
    assert table["text"] == "1 2 6" and table["prompt"].startswith("dict ('tokens': Tensor (1, 2)")


def test_a_submodule_generates_with_a_tokenizer_that_the_module_has() -> None:
    class Words:
        def __call__(self, text: str, return_tensors: str) -> dict[str, Tensor]:
            return {"input_ids": torch.tensor([[LETTERS.index(each) for each in text]])}

        def decode(self, tokens: Tensor, skip_special_tokens: bool) -> str:
            return "".join(LETTERS[each] for each in tokens.tolist())

    class Inner(nn.Linear):
        def generate(self, tokens: Tensor) -> Tensor:
            return torch.cat([tokens, tokens.flip(1)], 1)

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.words = Inner(4, 2), Words()

    hook = GenerateSamples("abc", tokenizer="words", every=1)
    quiet(hooks=[hook]).fit(Outer(), batches(1))
    assert hook.latest == ["abccba"]
    with pytest.raises(
        OptionError, match="has no attribute 'word', which tokenizer= names. Did you mean 'words'"
    ):
        quiet(hooks=[GenerateSamples("abc", tokenizer="word", every=1)]).fit(Outer(), batches(1))


def test_a_sample_that_fails_is_a_warning_and_the_modes_are_restored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(module: nn.Module, prompt: Any) -> Any:
        return {"not": "text"} if prompt else module.nothing

    with caplog.at_level(logging.WARNING, "hookline"):
        trainer, net = fit(GenerateSamples(["x", ""], fails, every="5 steps"))
    assert trainer.status == "completed" and net.training and not net.layers[1].training
    assert "generate returned dict" in caplog.text


def test_a_resumed_run_supersedes_the_samples_after_its_checkpoint(tmp_path: Path) -> None:
    class Fails(Hook):
        def on_train_batch_end(self, step: int) -> None:
            if step == 4:
                raise KeyError("broken")

    hook = lambda: GenerateSamples(["a"], every="1 steps")  # noqa: E731
    with pytest.raises(KeyError):
        fit(hook(), Fails(), ModelCheckpoint(every_n_train_steps=2), run_dir=tmp_path / "cut")
    assert [each["step"] for each in samples(tmp_path / "cut")] == [1, 2, 3]
    trainer = quiet(hooks=[hook()], run_dir=str(tmp_path / "cut"), seed=3, max_epochs=2)
    trainer.fit(Writer(), tokens(), tokens(2), resume="auto")
    fit(hook(), run_dir=tmp_path / "whole")
    cut, whole = (
        [(each["step"], each["text"]) for each in samples(tmp_path / name)] for name in ("cut", "whole")
    )
    assert cut == whole and [step for step, _ in cut] == [*range(1, 13)]
    quiet(hooks=[hook()], run_dir=str(tmp_path / "cut"), max_steps=1).fit(Writer(), tokens())  # a new run
    assert len(samples(tmp_path / "cut")) == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prompts": []}, "prompts=\\[\\] must be a list of texts"),
        ({"prompts": [""]}, "must be a list of texts"),
        ({"prompts": [3]}, "must be a list of texts"),
        ({"prompts": "a", "generate": 3}, "generate=3 must be a function"),
        ({"prompts": "a", "generate": print, "tokenizer": print}, "leave out tokenizer= and model="),
        ({"prompts": "a", "options": ["length"]}, "must be a dictionary of arguments"),
        ({"prompts": "a", "tokenizer": 3}, "tokenizer=3 must be an object that can be called"),
        ({"prompts": "a", "seed": -1}, "seed=-1"),
        ({"prompts": "a", "tag": ""}, "tag=''"),
    ],
)
def test_what_it_cannot_use_is_refused_when_it_is_made(given: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        GenerateSamples(**given)


def test_what_cannot_work_is_refused_before_the_first_step() -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Writer(), Writer()

    def refuses(text: str, net: Any, *hooks: Hook, error: type[Exception] = OptionError) -> None:
        trainer = quiet(hooks=hooks)
        with pytest.raises(error, match=text):
            trainer.fit(net, batches(2) if isinstance(net, Net) else tokens())
        assert trainer.global_step == 0

    def hook(**given: Any) -> GenerateSamples:
        return GenerateSamples(**{"prompts": "a", "every": 1, **given})

    refuses("neither Net nor a submodule of it has the method generate", Net(), hook())
    refuses("several submodules of Two .* one, two. Name one of them: model='one'", Two(), hook())
    refuses("model='ten' is not a submodule of Two.*There are: one, two", Two(), hook(model="ten"))
    refuses("Writer.generate does not take it. Did you mean 'length'", Writer(), hook(options={"lenght": 3}))
    refuses(
        "Two GenerateSamples hooks have tag='samples'",
        Writer(),
        hook(name="a"),
        hook(name="b"),
        error=HookError,
    )
    refuses("GenerateSamples acts after validations", Writer(), hook(every=None))


def test_it_costs_nothing_in_the_steps_between() -> None:
    quiet_hook = GenerateSamples(["a"], lambda module, prompt: "text")
    quiet_hook.needs_validation = False
    assert per_step(with_hooks(quiet_hook), is_ours) - without_hooks(is_ours) < 0.5  # a listener is one call

    class Waits(Hook):
        on_error = "warn"

        @every("1000 steps")
        def on_step_end(self) -> None: ...

    waiting = GenerateSamples(["a"], lambda module, prompt: "text", every="1000 steps")
    cost, least = (per_step(with_hooks(each), is_ours) for each in (waiting, Waits()))
    assert cost - least < 0.5  # only the filter


ON_RANKS = """
    import os, torch
    from hooks.test_generate_samples import Writer, samples, tokens
    from tiny import quiet
    from pathlib import Path
    from hookline.hooks import GenerateSamples
    rank = int(os.environ["RANK"])
    for strategy in ("ddp", "fsdp"):
        for every in (None, "1 steps"):
            weights = []
            for hooks in ([], [GenerateSamples(["a", "b"], every=every)]):
                net = Writer()
                quiet(
                    strategy=strategy, device="cpu", seed=3, max_epochs=2, run_dir=f"{strategy}-{every}-{len(hooks)}", hooks=hooks
                ).fit(net, tokens(), tokens(2))
                full = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in net.parameters()]
                weights.append([each.detach().clone() for each in full])
            same = all(map(torch.equal, *weights))
            print("RESULT", strategy, every, rank, same, len(hooks[0].latest))
"""


def test_rank_zero_generates_and_with_sharded_weights_all_ranks_do(tmp_path: Path) -> None:
    outcome = torchrun(ON_RANKS, tmp_path)
    assert outcome.code == 0, outcome.output
    assert sorted(outcome.lines("RESULT ")) == sorted(
        f"{strategy} {every} {rank} True {2 if strategy == 'fsdp' or rank == 0 else 0}"
        for strategy in ("ddp", "fsdp")
        for every in ("None", "1 steps")
        for rank in (0, 1)
    )
    for interval, count in (("None", 4), ("1 steps", 12)):
        of_both = [samples(tmp_path / f"{strategy}-{interval}-1") for strategy in ("ddp", "fsdp")]
        texts = [[(each["step"], each["text"]) for each in found] for found in of_both]
        assert len(texts[0]) == count and texts[0] == texts[1]
    assert json.loads((tmp_path / "ddp-None-1" / "samples.jsonl").read_text().splitlines()[0])["step"] == 3
