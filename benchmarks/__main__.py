"""Commands with several models, devices and files: `python -m benchmarks step --help`."""

import sys

from benchmarks import diagnostics, federated, lightbench, step, step_figure, walk
from benchmarks.defaults import command as defaults
from benchmarks.distributed import command as distributed
from benchmarks.distributed import owners
from benchmarks.distributed import report as distributed_report

COMMANDS = {
    "step": step.main,
    "figure": step_figure.main,
    "walk": walk.main,
    "diagnostics": diagnostics.main,
    "federated": federated.main,
    "defaults": defaults.main,
    "lightbench": lightbench.main,
    "distributed": distributed.main,
    "distributed-figure": distributed_report.main,
    "owners": owners.main,
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        sys.exit(f"usage: python -m benchmarks {{{','.join(COMMANDS)}}} ...")
    COMMANDS[name](sys.argv[2:])


if __name__ == "__main__":
    main()
