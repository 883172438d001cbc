"""The program of every rank of `test_ranks.py`: the language recipe with a short run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.recipes.test_ranks import use_command

if __name__ == "__main__":
    use_command(sys.argv[1])
