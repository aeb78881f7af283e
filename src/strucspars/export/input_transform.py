"""Whether torchvision's GoogLeNet and Inception transform their inputs: a setting that their state does not hold.

Torchvision sets it where it loads its published weights, which were trained on images of another scale. Without it the
same tensors compute something else.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from strucspars.nn.names import bare_modules

logger = logging.getLogger(__name__)

TRANSFORM_KEY = "strucspars.transform_input"

# By name, so that saving does not import torchvision.
_WITH_TRANSFORM = frozenset({"torchvision.models.googlenet.GoogLeNet", "torchvision.models.inception.Inception3"})


@dataclass(frozen=True)
class InputTransforms:
    """By the name of every module that can transform its inputs, whether it does; empty for most networks.

    >>> InputTransforms.of(nn.Conv2d(1, 1, 1)).as_metadata()
    {}
    """

    by_name: Mapping[str, bool]

    @staticmethod
    def of(model: nn.Module) -> "InputTransforms":
        """Those of a model."""
        return InputTransforms({name: bool(module.transform_input) for name, module in _able(model).items()})

    @staticmethod
    def from_metadata(metadata: Mapping[str, str]) -> "InputTransforms":
        """Those that a file tells of, or a `ValueError`; files may tell nothing."""
        text = metadata.get(TRANSFORM_KEY, "{}")
        try:
            by_name = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its {TRANSFORM_KEY} is damaged: {error}") from error
        if not isinstance(by_name, dict) or not all(isinstance(value, bool) for value in by_name.values()):
            raise ValueError(f"its {TRANSFORM_KEY} must be true or false by name of module, got {text[:80]!r}")
        return InputTransforms(by_name)

    def as_metadata(self) -> dict[str, str]:
        """What to write into a file: nothing where there is nothing to tell."""
        return {TRANSFORM_KEY: json.dumps(dict(self.by_name))} if self.by_name else {}

    def check_fit(self, model: nn.Module) -> None:
        """Raise a `ValueError` where a module of the model would have to transform its inputs, and cannot."""
        able = _able(model)
        for name, transforms in self.by_name.items():
            if transforms and name not in able:
                raise ValueError(
                    f"{name or 'the network'!r} was saved with transform_input=True, which only torchvision's "
                    "GoogLeNet and Inception3 have; load into one of them"
                )

    def set_(self, model: nn.Module) -> None:
        """Let the modules of the model do as these do, in place; where nothing is told of one, a warning says so."""
        for name, module in _able(model).items():
            if name in self.by_name:
                module.transform_input = self.by_name[name]
            else:
                logger.warning(
                    "the file does not tell whether %s was trained with transform_input, as older ones do not; it "
                    "keeps %s: set it to what is right",
                    *(repr(name) if name else "the network", bool(module.transform_input)),
                )


def _able(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in bare_modules(model)
        if any(f"{base.__module__}.{base.__qualname__}" in _WITH_TRANSFORM for base in type(module).__mro__)
    }
