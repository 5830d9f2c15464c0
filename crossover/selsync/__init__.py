"""SelSync: synchronise only when the update is significant."""

from __future__ import annotations

from crossover.selsync.ballot import Decision
from crossover.selsync.calibrate import Calibration, lssr, shared_steps, suggest_delta
from crossover.selsync.gate import Gate
from crossover.selsync.gates import Periodic, SelSync, gate_of
from crossover.selsync.injection import DataInjection, label_skew_indices, reduced_batch_size
from crossover.selsync.local_gradients import LocalGradients
from crossover.selsync.sampler import SelSyncSampler
from crossover.selsync.significance import (
    SignificanceTracker,
    TensorSignificanceTracker,
    is_significant,
    paper_factor,
    squared_norm,
    votes_needed,
)

__all__ = [
    "Calibration",
    "DataInjection",
    "Decision",
    "Gate",
    "LocalGradients",
    "Periodic",
    "SelSync",
    "SelSyncSampler",
    "SignificanceTracker",
    "TensorSignificanceTracker",
    "gate_of",
    "is_significant",
    "label_skew_indices",
    "lssr",
    "paper_factor",
    "reduced_batch_size",
    "shared_steps",
    "squared_norm",
    "suggest_delta",
    "votes_needed",
]
