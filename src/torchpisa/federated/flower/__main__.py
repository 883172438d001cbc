"""Commands for operators of a federation: `python -m torchpisa.federated.flower --help`."""

import sys

from torchpisa.federated.flower.commands import main

if __name__ == "__main__":
    sys.exit(main())
