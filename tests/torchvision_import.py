"""Makes torchvision importable where its compiled operators do not fit the installed PyTorch.

PyPI's torchvision is built for CUDA. Beside a PyTorch for the CPU, its import fails with "operator
torchvision::nms does not exist", and so do the imports of timm and of parts of Transformers.
"""

import importlib.util
import sys
import warnings
from typing import Any

_LIBRARIES: list[Any] = []
"""A library of operators must stay alive for as long as its operators are used."""


def make_torchvision_importable():
    """Import torchvision if it is installed; declare the operators that it lacks, without code."""
    if importlib.util.find_spec("torchvision") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it cannot decode images
        try:
            import torchvision
        except RuntimeError as e:
            if "operator torchvision::nms does not exist" not in str(e):
                raise
            import torch

            for name in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARIES.append(library)
            import torchvision  # noqa: F401
