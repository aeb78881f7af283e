"""Networks that cannot be called by position, which is how example inputs are given."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import strucspars as ss

IMAGES = torch.zeros(2, 4, 8, 8)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 8, 3)

    def forward(self, *, image: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(image)
        return features


class ByKeywordOrNotAtAll(ByKeyword):
    def forward(self, *, image: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(image=IMAGES if image is None else image)


class ByAnyKeyword(ByKeyword):
    def forward(self, **image: torch.Tensor) -> torch.Tensor:
        return super().forward(**image)


class PartlyByKeyword(ByKeyword):
    def forward(self, mask: torch.Tensor | None = None, *, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image=image) * (1 if mask is None else mask)


def sparsifier(model: nn.Module) -> object:
    config = ss.SparsifyConfig(target=0.3, epochs=2, lambda_warmup=0, budget="macs")
    return ss.Sparsifier(model, config, example_inputs=IMAGES)


USES: list[Callable[[nn.Module], object]] = [
    lambda model: ss.count_macs(model, IMAGES),
    lambda model: ss.summary(model, IMAGES),
    lambda model: ss.fold(model, IMAGES),
    sparsifier,
]


@pytest.mark.parametrize("use", USES, ids=["count_macs", "summary", "fold", "sparsifier"])
@pytest.mark.parametrize("kind", [ByKeyword, ByKeywordOrNotAtAll, ByAnyKeyword, PartlyByKeyword])
def test_inputs_by_keyword_only_are_refused_with_the_remedy(
    kind: type[nn.Module], use: Callable[[nn.Module], object]
) -> None:
    model = kind().train()
    with pytest.raises(ValueError, match=rf"forward of {kind.__name__} cannot be called .*: .*; wrap the network"):
        use(model)
    assert all(module.training for module in model.modules())


def test_a_network_that_is_not_called_may_take_keywords() -> None:
    assert ss.summary(ByKeyword()).params.before == 8 * (4 * 9 + 1)


def test_too_many_inputs_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"forward of Conv2d cannot be called .*: too many positional arguments"):
        ss.count_macs(nn.Conv2d(4, 8, 3), (IMAGES, IMAGES))


def test_an_optional_keyword_is_not_blamed_for_an_error_of_the_network() -> None:
    class Scaled(nn.Module):
        def forward(self, images: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            raise TypeError("images of another kind")

    with pytest.raises(TypeError, match="images of another kind"):
        ss.count_macs(Scaled(), IMAGES)
