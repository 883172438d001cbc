"""Stages of MISA's consensus, one file each: changes of U before it is orthogonalised."""

from torchpisa.preconditioners.consensus.base import Stage
from torchpisa.preconditioners.consensus.eigenbasis import EigenbasisMoment
from torchpisa.preconditioners.consensus.whiten import Whiten

__all__ = ["EigenbasisMoment", "Stage", "Whiten"]
