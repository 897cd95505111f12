"""`python -m hookline`, and `torchrun -m hookline`."""

import sys

from hookline.cli import main

if __name__ == "__main__":
    sys.exit(main())
