"""Markers for what needs more than a CPU and torch, skipped where it is not there."""

from __future__ import annotations

import importlib.util
import signal

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell, and inherited by all ranks
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "horovod: needs Horovod; skipped where horovod.torch cannot be imported")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")


def _horovod_missing() -> bool:
    if importlib.util.find_spec("horovod") is None:
        return True
    try:
        importlib.import_module("horovod.torch")
    except Exception:  # a build for another torch fails in several ways, none of them ImportError
        return True
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with_horovod = [item for item in items if item.get_closest_marker("horovod")]
    if with_horovod and _horovod_missing():
        for item in with_horovod:
            item.add_marker(pytest.mark.skip(reason="horovod.torch cannot be imported here"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
