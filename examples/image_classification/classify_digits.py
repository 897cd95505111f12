"""Load the best checkpoint of `digits.py` in a new process, and classify images.

`python examples/image_classification/classify_digits.py`
"""

from __future__ import annotations

import argparse

import torch
from digits import DigitNet, Digits

import hookline


def main() -> None:
    """Classify the images of the test data; no trainer is needed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/digits")
    options = parser.parse_args()

    model = DigitNet()
    print(hookline.load_weights(model, f"{options.run_dir}/checkpoints/best"))
    model.eval()

    data = Digits()
    data.setup("test")
    images, labels = data.test.tensors
    with torch.inference_mode():
        found = model(images).argmax(dim=1)
    print(f"the first ten: {found[:10].tolist()}, labelled {labels[:10].tolist()}")
    print(f"accuracy {(found == labels).float().mean():.3f} on {len(labels)} images")


if __name__ == "__main__":
    main()
