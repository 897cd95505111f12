"""URLs: a closed list of protocols, no chains, and no secret in anything that is written or said."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tiny import Net, batches, quiet

from hookline import CheckpointError, Hook, OptionError, import_checkpoint, load_weights
from hookline.checkpoint.export import export_weights
from hookline.checkpoint.files import read, remove, verify, write
from hookline.cli import main
from hookline.config import load_config
from hookline.hooks.json_log import JSONLog
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.upload_checkpoint import UploadCheckpoint
from hookline.testing import memory_urls
from hookline.util.urls import PROTOCOLS, check_url, open_url, url_below, url_beside

CHAIN = "reference://::file:///x/refs.json"
EVIL = [
    CHAIN,
    "simplecache::s3://bucket/x",
    "file:///x::s3://y",
    "reference://x",
    "github://a:b@/x",
    "zip:///x.zip",
    "local:///x",
    "S3://bucket",
    "memory://x",
    "dir://x",
    "data://x",
    "jupyter://x",
    "://x",
]


def save_to(url: str) -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(1))
    trainer.save_checkpoint(url)


PLACES: dict[str, Callable[[str], Any]] = {
    "resume": lambda url: quiet().fit(Net(), batches(1), resume=url),
    "checkpoint of validate": lambda url: quiet().validate(Net(), batches(1), checkpoint=url),
    "checkpoint of predict": lambda url: quiet().predict(Net(), batches(1), checkpoint=url),
    "save_checkpoint": save_to,
    "remove_checkpoint": lambda url: quiet().remove_checkpoint(url),
    "load_weights": lambda url: load_weights(Net(), url),
    "load_from_checkpoint": Net.load_from_checkpoint,
    "export": lambda url: export_weights(url, Path("x.safetensors")),
    "upload": UploadCheckpoint,
    "ModelCheckpoint": lambda url: ModelCheckpoint(dirpath=url),
    "read": read,
    "write": lambda url: write({"a": 1}, url),
    "verify": verify,
    "remove": remove,
    "open": open_url,
    "configuration": lambda url: load_config({"module": "torch.nn.Identity", "checkpoint": url}).build(),
    "hook in a configuration": lambda url: load_config(
        {"hooks": {"upload_checkpoint": {"url": url}}, "module": "torch.nn.Identity"}
    ).build(),
}


@pytest.fixture
def fsspec_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused never gets as far as fsspec, which might import or open something for it."""

    def asked(*given: Any, **options: Any) -> Any:
        raise AssertionError(f"fsspec was asked for {given}")

    for name in ("get_filesystem_class", "filesystem", "open"):
        monkeypatch.setattr(fsspec, name, asked)
    monkeypatch.setattr(fsspec.core, "url_to_fs", asked)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("url", [CHAIN, "reference://x", "memory://x"])
def test_other_protocols_and_chains_are_refused_wherever_a_url_is_taken(
    place: str, url: str, fsspec_is_not_asked: None
) -> None:
    with pytest.raises(OptionError) as refused:
        PLACES[place](url)
    assert "'::'" in str(refused.value) or (
        "is not allowed" in str(refused.value) and "s3, gs, gcs" in str(refused.value)
    )


@pytest.mark.parametrize("url", EVIL)
def test_the_list_of_protocols_is_closed(url: str) -> None:
    with pytest.raises(OptionError):
        check_url(url)


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_the_command_line_refuses_them_too(
    command: str, capsys: pytest.CaptureFixture[str], fsspec_is_not_asked: None
) -> None:
    out = ["out.pt"] if command == "export" else []
    assert main(["checkpoint", command, CHAIN, *out]) == 2
    assert "chains file systems" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_allowed_protocols_pass(protocol: str) -> None:
    assert check_url(f"{protocol}://bucket/x") == f"{protocol}://bucket/x"


def test_a_protocol_that_is_misspelled_gets_the_nearest() -> None:
    with pytest.raises(
        OptionError, match=r"resume: the protocol of 'htps://h/x' is not allowed\. Did you mean 'https'\?"
    ):
        check_url("htps://h/x", "resume")
    with pytest.raises(OptionError, match=r"Did you mean 's3'\?"):
        check_url("S3://bucket/x")


def test_memory_is_for_tests_only_and_for_as_long_as_they_say() -> None:
    with memory_urls():
        write({"a": 1}, "memory://for-a-test/x")
        assert read("memory://for-a-test/x") == {"a": 1}
        MemoryFileSystem.store.clear()
    with pytest.raises(OptionError):
        read("memory://for-a-test/x")


def test_a_signature_stays_at_the_end_of_an_http_url() -> None:
    assert (
        url_below("https://h/run/step-1?sig=a/b", "manifest.json")
        == "https://h/run/step-1/manifest.json?sig=a/b"
    )
    assert (
        url_below("/bucket/run/", "x") == "/bucket/run/x"
        and url_below("bucket/what?", "x") == "bucket/what?/x"
    )


# ---- secrets -----------------------------------------------------------------------------------------------------

SECRET = "hunter2secret"
SIGNED = f"shop://me:{SECRET}@host/run"


class Shop(MemoryFileSystem):
    """A file system whose URLs hold a password, and whose errors tell it."""

    protocol = "shop"
    cachable = False
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    fails = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("@")[2].rstrip("/") if "@" in path else super()._strip_protocol(path)

    def put_file(
        self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        if type(self).fails:
            raise ConnectionError(f"no answer from shop://me:{SECRET}@host{rpath} for {SECRET}")
        self.pipe_file(rpath, Path(lpath).read_bytes())


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> type[Shop]:
    fsspec.register_implementation("shop", Shop, clobber=True)
    monkeypatch.setattr("hookline.util.urls.PROTOCOLS", (*PROTOCOLS, "shop"))
    Shop.store, Shop.fails = {}, False
    return Shop


def everything_below(folder: Path) -> bytes:
    return b"".join(
        each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file() and not each.is_socket()
    )


class Stops(Hook):
    def on_step_end(self, step: int) -> None:
        if step == 3:
            raise RuntimeError(f"could not reach {SIGNED}/data?sig={SECRET}")


def test_no_secret_of_a_url_gets_into_anything_that_a_run_writes_or_says(
    shop: type[Shop], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    for resume in (None, f"{SIGNED}/last"):
        keep = ModelCheckpoint(dirpath=SIGNED, every_n_train_steps=1, save_top_k=2, save_last=True)
        trainer = quiet(
            run_dir=tmp_path / "run", max_epochs=2, logger=True, trace=True, hooks=[keep, JSONLog(1), Stops()]
        )
        with pytest.raises(RuntimeError) as failed:
            trainer.fit(Net(), batches(4), resume=resume)
        said += failed.value.__notes__
    stored = b"".join(bytes(each.getbuffer()) for each in shop.store.values())
    assert (
        b"shop://host/run" in stored and SECRET.encode() not in stored
    )  # manifests, and the state of ModelCheckpoint
    assert (
        b"shop://host/run/last" in (written := everything_below(tmp_path / "run"))
    ) and SECRET.encode() not in written
    assert SECRET not in caplog.text and SECRET not in "".join(said) and "shop://host/run" in "".join(said)


def test_a_resumed_run_still_knows_its_checkpoints_at_a_url_with_a_password(shop: type[Shop]) -> None:
    def train(epochs: int, resume: Any = None) -> ModelCheckpoint:
        keep = ModelCheckpoint(
            dirpath=SIGNED,
            every_n_train_steps=1,
            save_top_k=2,
            filename="s{step}",
            auto_insert_metric_name=False,
            save_last=True,
        )
        quiet(run_dir="run", max_epochs=epochs, hooks=[keep]).fit(Net(), batches(3), resume=resume)
        return keep

    train(1)
    keep = train(2, f"{SIGNED}/last")
    assert (
        list(keep.best_k_models) == [f"{SIGNED}/s5", f"{SIGNED}/s6"]
        and keep.last_model_path == f"{SIGNED}/last"
    )
    assert sorted({Path(each).parts[-2] for each in shop.store}) == [
        "last",
        "s5",
        "s6",
    ]  # the older ones were removed


def test_what_a_file_system_says_is_told_without_its_secrets_and_is_not_shown_as_the_cause(
    shop: type[Shop], caplog: pytest.LogCaptureFixture
) -> None:
    shop.fails = True
    with pytest.raises(CheckpointError) as failed:
        write({"a": 1}, f"{SIGNED}/x")
    assert "shop://host/run/x could not be written: ConnectionError: no answer from shop://host" in str(
        failed.value
    )
    assert (
        SECRET not in str(failed.value)
        and failed.value.__cause__ is None
        and failed.value.__suppress_context__
    )
    hook = UploadCheckpoint(SIGNED, attempts=1)
    quiet(run_dir="run", hooks=[ModelCheckpoint(), hook]).fit(Net(), batches(1))
    assert hook.failed and "no answer from shop://host" in caplog.text and SECRET not in caplog.text
    quiet(run_dir="run", hooks=[ModelCheckpoint(dirpath=SIGNED)], save="async", on_save_error="warn").fit(
        Net(), batches(1)
    )
    assert "could not be written" in caplog.text and SECRET not in caplog.text


@pytest.mark.parametrize(
    "place",
    ["resume", "checkpoint of validate", "load_weights", "load_from_checkpoint", "export", "read", "verify"],
)
def test_a_url_that_leads_nowhere_is_named_without_its_secrets(shop: type[Shop], place: str) -> None:
    with pytest.raises(CheckpointError) as failed:
        PLACES[place](f"{SIGNED}/nowhere")
    assert "shop://host/run/nowhere" in str(failed.value) and SECRET not in str(failed.value)


def test_other_errors_about_a_url_do_not_tell_it_either(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"https://host/x.ckpt?sig={SECRET}"
    errors: list[Any] = []
    for place in (
        lambda: import_checkpoint(url),
        lambda: read(Path(url)),
        lambda: PLACES["configuration"](f"nosuch://me:{SECRET}@host/x?sig={SECRET}"),
        lambda: check_url(f"nosuch://host/x?sig={SECRET}"),
    ):
        with pytest.raises((CheckpointError, OptionError)) as failed:
            place()
        errors += [
            str(failed.value),
            json.dumps(failed.value.data()) if hasattr(failed.value, "data") else "",
        ]
    assert main(["checkpoint", "export", "run", url, "--json"]) == 2
    assert main(["checkpoint", "verify", f"nosuch://me:{SECRET}@host/x", "--json"]) == 2
    errors += capsys.readouterr()
    assert SECRET not in "".join(errors) and "".join(errors).count("host/x") >= 6


@pytest.mark.parametrize(
    ("place", "neighbour"),
    [
        ("s3://bucket/run/step-5", "s3://bucket/run/last"),
        ("https://host/run/step-5/?sig=a/b", "https://host/run/last?sig=a/b"),
        ("s3://bucket/run/what?/step-5", "s3://bucket/run/what?/last"),
    ],
)
def test_what_is_beside_a_signed_url_has_its_query_at_the_end(place: str, neighbour: str) -> None:
    assert url_beside(place, "last") == neighbour
