"""What the engine asks of torch's autograd: which backward pass is running, and to be told of gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

NO_TASK = -1
current_task: Callable[[], int] = torch._C._current_graph_task_id


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that is running ends. Within a pass within it, when that one ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def hook_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call ``hook`` with ``parameter`` whenever ``parameter.grad`` has been added to, also if it is frozen by now."""
    frozen = not parameter.requires_grad
    if frozen:  # since it was wrapped; torch refuses hooks then, but keeps those there are for when it is trained
        parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    if frozen:
        parameter.requires_grad_(False)
    return handle


def inside_function_backward() -> bool:
    """Whether the calling thread is within the backward of a Python autograd function."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith("torch/autograd/function.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
