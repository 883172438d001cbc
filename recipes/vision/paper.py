"""The paper's table of test accuracies, in percent."""

__all__ = ["EPOCHS", "TABLE"]

_NAMES = ("sisa", "sgd", "adabound", "adam", "radam", "msvag", "adamw", "adabelief", "yogi", "lamb")
_ROWS = {
    "resnet34": (95.04, 94.65, 94.33, 94.69, 94.20, 94.44, 94.28, 94.11, 94.52, 94.01),
    "vgg11": (91.25, 91.51, 90.62, 88.40, 89.30, 90.24, 89.39, 90.07, 90.67, 87.48),
    "densenet121": (95.77, 95.47, 94.58, 93.35, 94.91, 94.81, 94.55, 94.78, 95.15, 94.53),
}
TABLE = {model: dict(zip(_NAMES, row, strict=True)) for model, row in _ROWS.items()}
TABLE["resnet18"] = {  # on ImageNet, where SISA has a row of settings for this table
    **{"sisa_test": 70.03, "sgd": 70.23, "adabound": 68.13, "adam": 63.79, "radam": 67.62},
    **{"msvag": 65.99, "adamw": 67.93, "adabelief": 70.08, "lamb": 68.46, "nadam": 68.82},
}
EPOCHS = {model: 100 if model == "resnet18" else 200 for model in TABLE}
"""Of SISA, by its rows of settings."""
