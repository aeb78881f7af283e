"""Networks that keep something from call to call: a graph would forget it, so that they are not turned into one."""

import copy
import logging

import pytest
import torch
from torch import nn

import strucspars as ss

CHANNELS = 16
# Of a film: every call sees the next one.
IMAGES = torch.randn(4, 1, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(1))


class Network(nn.Module):
    """Two grouped layers and a state of zeros."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 1)
        ss.convert_(self, ss.one_shot_plan(self, target=0.5))
        self.register_buffer("state", torch.zeros(1, CHANNELS, 6, 6))

    def next_state(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.relu(self.first(images)) + self.state))


class WithAttribute(Network):
    """Recurrent over calls, by an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = self.next_state(images if self.last is None else images + self.last)
        self.last = scores
        return scores


class WithBuffer(Network):
    """Recurrent over calls, by another buffer for every one."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.state = self.next_state(images)
        return self.state


class WithBufferInPlace(Network):
    """Recurrent over calls, by one buffer that is written into."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = self.next_state(images)
        self.state.copy_(scores)
        return scores


class WithCounter(Network):
    """A step size that depends on the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.next_state(images) * self.calls


class WithFirstImages(Network):
    """Scaled by what the first call has seen: called again with the same, it puts out the same."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = images.abs().mean()
        return self.next_state(images) / self.scale


@pytest.mark.parametrize("kind", [WithAttribute, WithBuffer, WithBufferInPlace, WithCounter, WithFirstImages])
def test_a_network_with_a_memory_comes_back_as_it_was_and_remembers(
    kind: type[Network], caplog: pytest.LogCaptureFixture
) -> None:
    network = kind().eval()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        folded = ss.fold(network, IMAGES[0])
        assert ss.fold_report(folded).untraced_reason
        for images in IMAGES:
            torch.testing.assert_close(folded(images), network(images), rtol=1e-4, atol=1e-5)


def test_the_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report = ss.fold_report(ss.fold(WithCounter().eval(), IMAGES[0]))
    assert "does the network keep something from call to call?" in report.untraced_reason


def test_what_a_network_keeps_of_its_last_call_for_others_is_no_memory() -> None:
    class Noting(Network):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.features = torch.relu(self.first(images))
            scores: torch.Tensor = self.second(self.features)
            return scores

    network = Noting().eval()
    with torch.no_grad():
        before = network(IMAGES[0])
        folded = ss.fold(copy.deepcopy(network), IMAGES[0])
    assert not ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(folded(IMAGES[0]), before, rtol=1e-4, atol=1e-5)
