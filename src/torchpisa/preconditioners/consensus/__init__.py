"""Stages of MISA's consensus: what may happen to U before it is orthogonalised, one file each."""

from torchpisa.preconditioners.consensus.base import Stage
from torchpisa.preconditioners.consensus.eigenbasis import EigenbasisMoment
from torchpisa.preconditioners.consensus.whiten import Whiten

__all__ = ["EigenbasisMoment", "Stage", "Whiten"]
