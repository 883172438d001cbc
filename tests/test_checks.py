"""Checks of single arguments: what is legal passes, and the message says what is."""

import math

import pytest
import torch

from torchpisa.checks import check_choice, check_count, check_range


@pytest.mark.parametrize("value", [0, 0.5, 1, torch.tensor(0.5), torch.tensor([1.0])])
def test_numbers_in_a_closed_interval(value):
    check_range("x", value, 0, 1)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (0, {"low_open": True}, "x must be a number > 0, got 0"),
        (-1, {"high_open": True}, "x must be a finite number >= 0, got -1"),
        (math.inf, {"high_open": True}, "x must be a finite number >= 0, got inf"),
        (1.5, {"high": 1}, "x must be in [0, 1], got 1.5"),
        (1, {"high": 1, "high_open": True}, "x must be in [0, 1), got 1"),
        (0, {"high": 1, "low_open": True}, "x must be in (0, 1], got 0"),
        (math.nan, {}, "x must be a number >= 0, got nan"),
        (True, {}, "x must be a number >= 0, got True"),
        ("1", {}, "x must be a number >= 0, got '1'"),
        (10**400, {"high_open": True}, "x must be a finite number >= 0, got 1000"),
        (torch.ones(2), {}, "x must be a number >= 0, got tensor([1., 1.])"),
        (torch.tensor(True), {}, "x must be a number >= 0, got tensor(True)"),
        (torch.ones((), device="meta"), {}, "x must be a number >= 0, got tensor(..., device"),
    ],
)
def test_what_is_out_of_range(value, options, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        check_range("x", value, 0, **options)
    assert str(error.value).startswith(message)


def test_choices_are_the_very_values():
    check_choice("x", "a", ("a", "b"))
    check_choice("x", None, (None, True))
    for value in ("c", 1, 1.0, ["a"]):
        with pytest.raises(ValueError, match=r"^x must be one of 'a', True, got"):
            check_choice("x", value, ("a", True))


def test_counts():
    check_count("x", 3, 2, 3)
    for value in (1, 2.0, True, "2"):
        with pytest.raises(ValueError, match=r"^x must be an integer >= 2, got"):
            check_count("x", value, 2)
    with pytest.raises(ValueError, match=r"^x must be an integer <= 3, got 4$"):
        check_count("x", 4, 2, 3)
