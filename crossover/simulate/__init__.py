"""Predictions: discrete events on a virtual clock, by the same planner, orders and turns as training.

Read in this order: :mod:`~crossover.simulate.job` (what a step computes), :mod:`~crossover.simulate.network` (what an
all-reduce costs), :mod:`~crossover.simulate.systems` (what each system does in a step),
:mod:`~crossover.simulate.events` (the clock). Every number that was assumed is an
:class:`~crossover.simulate.assumptions.Assumption` with its source.
"""

from __future__ import annotations

from crossover.simulate import gated, layerwise, systems
from crossover.simulate.assumptions import Assumption, listed
from crossover.simulate.cluster import Cluster, cluster, cluster_names, gpus, resized
from crossover.simulate.job import Job, Part, from_profile, from_shape
from crossover.simulate.layers import Layer, ModelShape
from crossover.simulate.models import model, model_names
from crossover.simulate.network import Network, calibrate
from crossover.simulate.processors import Processor, processor, processor_names
from crossover.simulate.run import Result, gain, share, simulate

__all__ = [
    "Assumption",
    "Cluster",
    "Job",
    "Layer",
    "ModelShape",
    "Network",
    "Part",
    "Processor",
    "Result",
    "calibrate",
    "cluster",
    "cluster_names",
    "from_profile",
    "from_shape",
    "gain",
    "gated",
    "gpus",
    "layerwise",
    "listed",
    "model",
    "model_names",
    "processor",
    "processor_names",
    "resized",
    "share",
    "simulate",
    "systems",
]
