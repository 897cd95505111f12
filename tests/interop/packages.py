"""What the processes of these tests import, except Lightning: a server imports it once for all of them (`preloaded.py`).

A process imports Lightning itself, in 0.3 s: `hookline run --as lightning` has to come before.
"""

from __future__ import annotations

import importlib
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

for each in (
    "accelerate",
    "docstring_parser",
    "interop.libraries",
    "peft",
    "scipy.signal",
    "sklearn.datasets",
    "torchmetrics",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "transformers.trainer",
    "typeshed_client",
):
    importlib.import_module(each)
