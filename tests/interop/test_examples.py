"""The examples that need scikit-learn, transformers or peft, in a shorter form than their READMEs say."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import preloaded
import pytest
from interop.processes import environment

EXAMPLES = Path(__file__).parents[2] / "examples"

ONE_AFTER_THE_OTHER = """
import runpy, sys
for line in sys.argv[1:]:
    program, *sys.argv[1:] = line.split()
    sys.path.insert(0, program.rpartition("/")[0])
    print("===", program.rpartition("/")[2])
    runpy.run_path(program, run_name="__main__")
"""
"""Programs in one process, which imports transformers once."""


def run(folder: Path, *lines: str) -> list[str]:
    """Run programs with their options in a folder with copies of them, and return what each has printed."""
    names, programs = zip(*(line.split("/") for line in lines), strict=True)
    for name in names:
        shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
    done = preloaded.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, *(f"{folder}/{line}" for line in programs)],
        cwd=folder,
        env=environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    return re.split(r"^=== .*\n", done.stdout, flags=re.MULTILINE)[1:]


def number(pattern: str, output: str) -> float:
    found = re.findall(pattern, output)
    assert found, output
    return float(found[-1])


def test_digits_are_learned_and_another_program_classifies_with_the_best_checkpoint(tmp_path: Path) -> None:
    trained, classified = run(
        tmp_path, "image_classification/digits.py --epochs 7", "image_classification/classify_digits.py"
    )
    accuracy = number(r"test accuracy of the best checkpoint: ([\d.]+)", trained)
    assert accuracy > 0.6  # 0.1 is chance
    assert "averaged weights" in classified
    assert number(r"accuracy ([\d.]+) on 300 images", classified) == pytest.approx(accuracy, abs=0.004)


def test_a_lora_adapter_and_the_merged_model_load_with_equal_logits_and_hooks_run_in_transformers(
    tmp_path: Path,
) -> None:
    lora, hosted = run(
        tmp_path,
        "finetune_lora/finetune_lora.py --steps 24",
        "transformers_trainer/transformers_trainer.py --steps 80",
    )
    found = re.search(r"([\d,]+) of ([\d,]+) weights trained; .* ([\d.]+) -> ([\d.]+)", lora)
    assert found is not None, lora
    trained, total = (int(each.replace(",", "")) for each in found.groups()[:2])
    assert 0 < trained < total / 5
    assert float(found[4]) < float(found[3]) - 0.02
    assert "loaded adapter: the same logits: True" in lora
    assert "merged model: the same logits: True" in lora
    adapter = tmp_path / "runs" / "lora" / "adapter" / "pretrained" / "best"
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        each.name for each in adapter.iterdir()
    }
    seen = re.findall(r"step +(\d+) +gradient norm [\d.]+ +largest: transformer\.", hosted)
    assert seen == ["25", "50", "75"]
    assert number(r"validation loss ([\d.]+)", hosted) < 2  # log(50) = 3.9 is chance
