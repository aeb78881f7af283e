import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import strucspars as ss

IMAGES = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1))


class Network(nn.Module):
    """Two shuffled layers; `if` makes it hard to trace."""

    def __init__(self, *, traceable: bool) -> None:
        super().__init__()
        self.first, self.second = (ss.ShuffledGroupConv2d(8, 8, 1, groups=2) for _ in range(2))
        for layer in (self.first, self.second):
            layer.in_perm.copy_(torch.randperm(8))
        self.traceable = traceable

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.second(self.first(images).relu())
        return features if self.traceable or features.mean() > 0 else -features


def saved_and_loaded(folded: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(folded, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda folded: pickle.loads(pickle.dumps(folded)),
    "saved": saved_and_loaded,
    "saved, then copied": lambda folded: copy.deepcopy(saved_and_loaded(folded)),
    "copied, then saved twice": lambda folded: saved_and_loaded(saved_and_loaded(copy.deepcopy(folded))),
}


@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_graph_and_its_report_survive(way: str, traceable: bool) -> None:
    torch.manual_seed(0)
    folded = ss.fold(Network(traceable=traceable), IMAGES)
    again = WAYS[way](folded)
    assert isinstance(again, torch.fx.GraphModule)
    assert ss.fold_report(again) == ss.fold_report(folded)
    assert bool(ss.fold_report(again).untraced_reason) is not traceable
    assert list(again.state_dict()) == list(folded.state_dict())
    assert not any(module.training for module in again.modules())
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert again.code == folded.code
    torch.testing.assert_close(again(IMAGES), folded(IMAGES), rtol=0, atol=0)


def test_a_pickle_is_called_as_the_network_was() -> None:
    folded = ss.fold(Network(traceable=True), IMAGES)
    assert type(folded).__name__ == "Network"
    again = pickle.loads(pickle.dumps(folded))
    assert type(again).__name__ == "Network"


class Masked(nn.Module):
    """Has an argument that may be None, on which the code branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 1)

    def forward(self, images: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        features: torch.Tensor = self.layer(images)
        return features if mask is None else features * mask


@pytest.mark.parametrize("way", WAYS)
def test_networks_can_be_traced_after_one_without_a_mask_was_loaded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the code of graphs registers is for the whole process: should this test fail, others must not.
    registered = dict(torch.fx._symbolic_trace._wrapped_fns_to_patch)
    monkeypatch.setattr("torch.fx._symbolic_trace._wrapped_fns_to_patch", registered)
    model = Masked().eval()
    again = WAYS[way](ss.fold(model, IMAGES))
    torch.testing.assert_close(again(IMAGES), model(IMAGES).detach())
    with pytest.raises(TypeError, match="positional argument"):
        again(IMAGES, IMAGES)
    assert "layer" in torch.fx.symbolic_trace(Masked(), {"mask": None}).code
