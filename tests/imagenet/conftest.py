"""A small tree of generated images, and skipping where torchvision is not importable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.imagenet.example import MISSING, importable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING is None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason=f"{MISSING}; make imagenet-test sets up an environment that has it")
            )


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes, 18 training images and 11 to evaluate on of each, so that 44 do not divide by 3 ranks."""
    root = tmp_path_factory.mktemp("imagenet") / "tree"
    importable("make_tiny_tree").make_tree(root, classes=4, train=18, val=11, pixels=40)
    return root
