"""Table 2 of the paper: testing accuracy in %, by data set and labels per client."""

__all__ = ["BASELINES", "TABLE", "target"]

BASELINES = ("fedavg", "fedprox", "fednova", "scaffold")
_COLUMNS = (*BASELINES, "sisa")
_ROWS = {
    ("mnist", 1): (53.19, 54.33, 49.00, 47.04, 94.97),
    ("mnist", 2): (90.70, 90.75, 90.40, 87.43, 96.14),
    ("mnist", 3): (95.11, 94.73, 94.37, 93.19, 96.21),
    ("cifar10", 1): (10.02, 10.00, 10.31, 11.41, 30.16),
    ("cifar10", 2): (13.76, 13.77, 18.02, 12.73, 30.53),
    ("cifar10", 3): (20.06, 20.03, 21.20, 17.00, 30.96),
    ("fashion_mnist", 1): (48.81, 47.14, 49.08, 43.93, 72.85),
    ("fashion_mnist", 2): (69.33, 69.29, 69.10, 65.99, 70.24),
    ("fashion_mnist", 3): (70.48, 69.96, 69.70, 63.64, 72.46),
    ("adult", 1): (76.38, 78.30, 85.15, 80.00, 82.21),
}
TABLE = {cell: dict(zip(_COLUMNS, row, strict=True)) for cell, row in _ROWS.items()}


def target(dataset: str, labels: int) -> float | None:
    """Return SISA's accuracy in the paper, or None if it lacks the experiment."""
    row = TABLE.get((dataset, labels))
    return row and row["sisa"]
