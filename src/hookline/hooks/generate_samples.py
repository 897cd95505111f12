"""Generate text or images from prompts while a model trains, and log them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from hookline.data.batch import move
from hookline.data.seeding import isolated_rng, key_of, seed_everything
from hookline.engine.checks import check_seed, checked_parameters, refused
from hookline.engine.filters import FilterSettings
from hookline.engine.hook import Hook
from hookline.loggers.base import check_image, file_name
from hookline.loggers.jsonl import JSONLines, image_png
from hookline.util.errors import HookError, HooklineError, OptionError, closest, described

WHO = "GenerateSamples"
FILE, FOLDER = "samples.jsonl", "samples"
SHOWN_TOKENS = 64
"""Numbers of a prompt that are written; a larger one is described."""


class GenerateSamples(Hook):
    """Generates from the same prompts with the same seed again and again, so that samples can be compared.

    It logs each sample as text or as an image, and writes it to `samples.jsonl` in the run's directory.
    Training continues bit for bit as without it: the module is in eval mode meanwhile, and the random streams
    are restored. After a validation it uses the weights that the validation used, such as an average.

    With sharded weights (FSDP) all ranks generate the same samples; otherwise only rank zero does.
    """

    tier = "builtin"
    may_listen = ("on_step_end",)
    observes = True
    on_error = "warn"

    @checked_parameters
    def __init__(
        self,
        prompts: Any,
        generate: Callable[..., Any] | None = None,
        tokenizer: Any = None,
        options: Mapping[str, Any] | None = None,
        every: int | str | None = None,
        model: str | None = None,
        seed: Annotated[int, check_seed] = 0,
        tag: str = "samples",
        name: str | None = None,
    ) -> None:
        """Choose the prompts and what generates.

        prompts: a list of texts, tensors, or dictionaries of arguments; or a tensor with one prompt in each
        row. generate: a function of the module and a prompt that returns text or an image; None: the method
        `generate` of the module, or of the only submodule that has one. tokenizer: encodes texts and decodes
        what is generated; an object as of transformers, or the name of an attribute of the module.
        options: further arguments of `generate`, such as {"max_new_tokens": 40}. every: an interval such as
        '500 steps'; None: at every validation. model: the name of the submodule that generates.
        seed: the seed of each sample. tag: the name of the samples in the log.
        """
        super().__init__(name)
        if generate is not None and not callable(generate):
            raise refused(f"{WHO}: generate", generate, "a function of the module and a prompt")
        if generate is not None and (tokenizer is not None or model is not None):
            raise OptionError(f"{WHO}: generate= does all of the work: leave out tokenizer= and model=.")
        self.prompts = _as_prompts(prompts, generate is not None)
        self.generate, self.tokenizer, self.model, self.seed = generate, tokenizer, model, seed
        self.options = _as_options(options)
        if not isinstance(tag, str) or not tag.strip() or not tag.isprintable():
            raise refused(f"{WHO}: tag", tag, "a name, such as 'samples'")
        if tokenizer is not None and not isinstance(tokenizer, str):
            _check_tokenizer(tokenizer)
        self.tag, self.every = tag, every
        self.needs_validation = every is None
        if every is not None:
            self.__dict__["on_step_end"] = FilterSettings(every=every)(functools.partial(self._after_steps))
        self.latest: list[Any] = []
        """The newest samples: texts, or images on the CPU."""
        self._call: Callable[[Any], Any] = lambda prompt: None
        self._strategy: Any = None
        self._file: JSONLines | None = None
        self._position: Any = None
        self._path: Path | str = ""

    # ---- before the first step -----------------------------------------------------------------------------

    def on_fit_start(self, module: nn.Module, state: Any, hooks: Any) -> None:
        for other in hooks:
            if isinstance(other, GenerateSamples) and other is not self and other.tag == self.tag:
                raise HookError(f"Two {WHO} hooks have tag={self.tag!r}: give one of them another tag.")
        self._strategy = getattr(state.trainer, "strategy", None)  # a loop of another package has none
        is_sharded = any(hasattr(each, "placements") for each in module.parameters())
        if is_sharded and self._strategy is None:
            raise OptionError(f"{WHO} generates with sharded weights in hookline.Trainer only.")
        if self._is_shared() and self.ranks != "all":
            raise OptionError(
                f"{WHO}: ranks={self.ranks!r}, but the weights are sharded over the ranks, so all of them "
                "must generate; leave it at 'all'.",
                option="ranks",
                value=self.ranks,
            )
        if self.generate is not None:
            function = self.generate
            self._call = lambda prompt: function(module, prompt, **self.options)
        else:
            self._call = self._find_call(module)

    def _is_shared(self) -> bool:
        """Return whether all ranks must generate together."""
        return bool(getattr(self._strategy, "forward_communicates", False))

    def _find_call(self, module: nn.Module) -> Callable[[Any], Any]:
        """Return a function of a prompt, after a check of everything that it will use."""
        name, model = _find_model(module, self.model)
        where = f"{type(module).__name__}.{name}" if name else type(module).__name__
        tokenizer = self.tokenizer
        if isinstance(tokenizer, str):
            if (found := getattr(module, tokenizer, None)) is None:
                raise OptionError(
                    f"{WHO}: {type(module).__name__} has no attribute {tokenizer!r}, which tokenizer= names."
                    f"{closest(tokenizer, vars(module))}",
                    option="tokenizer",
                    value=tokenizer,
                )
            tokenizer = found
            _check_tokenizer(tokenizer)
        options = {**self.options}
        _check_options(model, where, options)
        are_texts = any(isinstance(each, str) for each in self.prompts)
        if tokenizer is None and are_texts and hasattr(model, "generation_config"):
            raise OptionError(
                f"{WHO}: the prompts are texts, and {where} takes tokens: pass tokenizer=, the object or the "
                "name of the module's attribute."
            )
        if self._is_shared() and "synced_gpus" in inspect.signature(model.generate).parameters:
            options.setdefault("synced_gpus", True)  # no rank leaves the loop over tokens before the others
        return functools.partial(_call_model, model, tokenizer, options)

    def on_checkpoint_load(self, path: Path | str) -> None:
        self._path = path

    def on_train_start(self, state: Any, resumed: bool) -> None:
        self.latest = []
        if state.rank or state.trainer.options.fast_dev_run:
            return
        self._file = JSONLines(Path(state.trainer.run_dir) / FILE)
        if resumed:
            if self._file.path.exists():
                self._file.resume(self._position, state.step, state.epoch, str(self._path))
        else:
            self._file.begin_afresh()

    # ---- samples -------------------------------------------------------------------------------------------

    def on_validation_epoch_end(self, state: Any) -> None:
        # before on_validation_end, where WeightAveraging puts the trained weights back
        if self.every is None and state.stage == "fit" and not state.sanity_checking:
            self._generate_all(state, "validation")

    def _after_steps(self, state: Any) -> None:
        self._generate_all(state, "step")

    def _generate_all(self, state: Any, at: str) -> None:
        if state.rank and not self._is_shared():
            return
        with evaluating(state.module), torch.no_grad(), isolated_rng(), self._precision():
            samples = []
            for number, prompt in enumerate(self.prompts):
                seed_everything(key_of(self.seed, number))  # each by itself, so that prompts can be added
                prompt = move(prompt, state.device)
                samples.append(_as_sample(self._run(functools.partial(self._call, prompt))))
        self.latest = samples
        if not state.rank:
            for number, (prompt, sample) in enumerate(zip(self.prompts, samples, strict=True)):
                self._log(state, at, number, prompt, sample)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return (
            contextlib.nullcontext() if self._strategy is None else self._strategy.precision.forward_context()
        )

    def _run(self, call: functools.partial[Any]) -> Any:
        return call() if self._strategy is None else self._strategy.evaluate(call)

    def _log(self, state: Any, at: str, number: int, prompt: Any, sample: Any) -> None:
        tag, step = f"{self.tag}/{number}", state.step
        if isinstance(sample, str):
            state.logger.add_text(tag, sample, step)
            result = {"text": sample}
        else:
            state.logger.add_image(tag, sample, step)
            result = {"image": f"{FOLDER}/{file_name(tag, step, 'png')}"}
        if self._file is None:
            return
        if "image" in result:
            path = self._file.path.parent / result["image"]
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(image_png(tag, sample))
        self._file.write(
            "sample", step=step, epoch=state.epoch, at=at, tag=tag, prompt=_shown(prompt), **result
        )

    def teardown(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._strategy = None
        self._call = lambda prompt: None

    def state_dict(self) -> dict[str, Any]:
        # as text, because a state that is restored must have the types of the present one
        return {"position": json.dumps(None if self._file is None else self._file.position())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = json.loads(state["position"])


# ---- calls -------------------------------------------------------------------------------------------------


def _call_model(model: Any, tokenizer: Any, options: dict[str, Any], prompt: Any) -> Any:
    """Call `generate` of a model, with its tokens if there is a tokenizer."""
    if tokenizer is None or not isinstance(prompt, str):
        made = (
            model.generate(**prompt, **options)
            if isinstance(prompt, Mapping)
            else model.generate(prompt, **options)
        )
    else:
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        encoded = move(dict(tokenizer(prompt, return_tensors="pt")), device)
        if not hasattr(model, "generation_config"):  # a model with a `generate` of its own takes the tokens
            made = model.generate(encoded["input_ids"], **options)
        else:
            taken = {"input_ids", "attention_mask", *inspect.signature(model.forward).parameters}
            inputs = {key: value for key, value in encoded.items() if key in taken}
            made = model.generate(**inputs, **_with_padding(model, tokenizer, options))
    made = getattr(made, "sequences", made)
    if tokenizer is None or not _is_tokens(made):
        return made
    return tokenizer.decode(made[0] if made.ndim > 1 else made, skip_special_tokens=True)


def _with_padding(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Pass the tokenizer's padding token where the model has none: transformers would warn at each sample."""
    known = getattr(tokenizer, "pad_token_id", None)
    known = getattr(tokenizer, "eos_token_id", None) if known is None else known
    if model.generation_config.pad_token_id is not None or known is None:
        return options
    return {"pad_token_id": known, **options}


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode inside the block; restore the mode of every submodule after it."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        if any(training for _, training in modes):
            module.eval()
        yield
    finally:
        for each, training in modes:
            if each.training is not training:
                each.training = training


def _as_sample(made: Any) -> Any:
    """Return text, or an image on the CPU."""
    if isinstance(made, str):
        return made
    image = torch.as_tensor(made) if isinstance(made, np.ndarray) else made
    if _is_tokens(image):
        return " ".join(map(str, image.flatten().tolist()))
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = image[0] if image.ndim == 4 and image.shape[0] == 1 else image
        check_image(WHO, image)
        return image
    raise HooklineError(
        f"{WHO}: generate returned {described(made)}. Return text, tokens, or an image of shape (1, 3 or 4, "
        "height, width)."
    )


def _shown(prompt: Any) -> str:
    """Return a prompt as text: tokens as numbers, and a large one by its shape."""
    if isinstance(prompt, str):
        return prompt
    if _is_tokens(prompt) and prompt.numel() <= SHOWN_TOKENS:
        return " ".join(map(str, prompt.flatten().tolist()))
    return described(prompt)


# ---- checks ------------------------------------------------------------------------------------------------


def _as_prompts(given: Any, is_any: bool) -> list[Any]:
    """Return the prompts as a list. is_any: a function takes them, so they may be anything."""
    if isinstance(given, str | Mapping):
        prompts: list[Any] = [given]
    elif isinstance(given, Tensor):
        prompts = [given[at : at + 1] for at in range(len(given))] if given.ndim else []
    else:
        prompts = list(given) if isinstance(given, list | tuple) else []
    kinds = (str, Tensor, Mapping)
    if not prompts or not all(is_any or (isinstance(each, kinds) and len(each)) for each in prompts):
        raise OptionError(
            f"{WHO}: prompts={described(given)} must be a list of texts, tensors or dictionaries of "
            "arguments of generate, or a tensor of rows. It must not be empty.",
            option="prompts",
            value=described(given),
        )
    return prompts


def _as_options(given: Any) -> dict[str, Any]:
    if given is not None and (
        not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given)
    ):
        raise refused(f"{WHO}: options", given, "a dictionary of arguments, such as {'max_new_tokens': 40}")
    return dict(given or {})


def _check_tokenizer(given: Any) -> None:
    if inspect.isclass(given) or not callable(given) or not callable(getattr(given, "decode", None)):
        raise OptionError(
            f"{WHO}: tokenizer={described(given)} must be an object that can be called and has the method "
            "decode.",
            option="tokenizer",
            value=described(given),
        )


def _find_model(module: nn.Module, wanted: str | None) -> tuple[str, Any]:
    """Return the module, or the only outermost submodule, with the method `generate`, and its name."""
    able: list[str] = []
    for name, each in module.named_modules():
        is_inside = any(not other or name.startswith(f"{other}.") for other in able)
        if not is_inside and callable(getattr(each, "generate", None)):
            able.append(name)
    if wanted is not None:
        known = dict(module.named_modules())
        if wanted not in known or not callable(getattr(known[wanted], "generate", None)):
            raise OptionError(
                f"{WHO}: model={wanted!r} is not a submodule of {type(module).__name__} with the method "
                f"generate.{closest(wanted, able)} There are: {', '.join(filter(None, able)) or 'none'}.",
                option="model",
                value=wanted,
            )
        return wanted, known[wanted]
    if not able:
        raise OptionError(
            f"{WHO}: neither {type(module).__name__} nor a submodule of it has the method generate. Add one, "
            "or pass generate=, a function of the module and a prompt."
        )
    if len(able) > 1:
        raise OptionError(
            f"{WHO}: several submodules of {type(module).__name__} have the method generate: "
            f"{', '.join(able)}. Name one of them: model={able[0]!r}."
        )
    return able[0], module.get_submodule(able[0])


def _check_options(model: Any, where: str, options: dict[str, Any]) -> None:
    """Refuse options that `generate` does not take. That of transformers takes those of its configuration."""
    taken = inspect.signature(model.generate).parameters
    known = [*taken, *vars(getattr(model, "generation_config", None) or object)]
    is_open = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    if is_open and not hasattr(model, "generation_config"):
        return
    for name in options:
        if name not in known:
            raise OptionError(
                f"{WHO}: options={{{name!r}: ...}}: {where}.generate does not take it.{closest(name, known)}",
                option="options",
                value=options,
            )
