"""What rounding, zeros or another way of calling could hide."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import strucspars as ss

CHANNELS = 16
IMAGES = torch.randn(2, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(1))


def shuffled() -> ss.ShuffledGroupConv2d:
    layer = ss.ShuffledGroupConv2d(CHANNELS, CHANNELS, 1, groups=4)
    layer.in_perm.copy_(torch.randperm(CHANNELS))
    layer.out_inverse.copy_(torch.randperm(CHANNELS))
    return layer


class Aliased(nn.Module):
    """A skip connection that sees what is added later, since the addition is in place."""

    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = shuffled(), shuffled(), shuffled()
        self.change = change

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.first(images)
        skip = features
        features = self.change(features, self.second(torch.relu(features)))
        scores: torch.Tensor = self.third(torch.relu(skip)) + features
        return scores


def add_(features: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    features += other
    return features


def subtract_(features: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    features -= other
    return features


def multiply_(features: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    features *= other
    return features


def divide_(features: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    features /= 2 + other.abs()
    return features


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("change", [add_, subtract_, multiply_, divide_])
@pytest.mark.parametrize("example", [IMAGES, torch.zeros_like(IMAGES)], ids=["random", "zeros"])
def test_in_place_operators_change_what_other_names_stand_for(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], example: torch.Tensor
) -> None:
    model = Aliased(change).eval()
    folded = ss.fold(model, example)
    assert ss.fold_report(folded).untraced_reason == ""
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES.clone()), model(IMAGES.clone()), rtol=1e-4, atol=1e-5)


class Branching(nn.Module):
    """Computes something else when it is traced."""

    def __init__(self, scale: float, *, whole: bool = False, single: bool = False) -> None:
        super().__init__()
        self.layer, self.scale, self.whole, self.single = shuffled(), scale, whole, single

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(images.float() if self.single else images)
        if isinstance(images, torch.fx.Proxy):
            features = features + self.scale * images
        return features.argmax(1) if self.whole else features


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (lambda: Branching(0.5), torch.zeros_like(IMAGES)),
        (lambda: Branching(0.5, single=True), torch.zeros_like(IMAGES)),
        (lambda: Branching(0.03).half(), IMAGES.half()),
        (lambda: Branching(0.03).bfloat16(), IMAGES.bfloat16()),
        (lambda: Branching(3e-5), IMAGES),
        (lambda: Branching(2.0, whole=True), IMAGES),
    ],
    ids=["zeros", "zeros in single precision only", "half", "bfloat16", "small", "whole numbers"],
)
def test_a_graph_that_is_wrong_by_little_is_not_used(
    model: Callable[[], nn.Module], example: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    network = model().eval()
    with caplog.at_level(logging.WARNING):
        folded = ss.fold(network, example)
    assert "off by" in ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(folded(example), network(example))


class OfDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branching(0.5)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scores: torch.Tensor = self.inner(batch["images"])
        return scores


def test_zeros_in_a_dictionary_hide_no_wrong_graph() -> None:
    network, example = OfDictionary().eval(), ({"images": torch.zeros_like(IMAGES)},)
    assert "off by" in ss.fold_report(ss.fold(network, example)).untraced_reason


def test_a_network_that_insists_on_its_precision_is_folded_all_the_same() -> None:
    class Insisting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), shuffled(), nn.Conv2d(CHANNELS, 4, 1))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.layers(images.float())
            return scores

    model = Insisting().eval()
    folded = ss.fold(model, IMAGES)
    assert ss.fold_report(folded).untraced_reason == ""
    assert ss.fold_report(folded).gathers == ()
    torch.testing.assert_close(folded(IMAGES), model(IMAGES).detach(), rtol=1e-4, atol=1e-5)


def test_a_graph_takes_images_with_a_batch_and_without() -> None:
    model = nn.Sequential(shuffled(), nn.ReLU(), shuffled()).eval()
    folded = ss.fold(model, IMAGES)
    assert len(ss.fold_report(folded).gathers) > 0
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES[0]), model(IMAGES[0]), rtol=1e-4, atol=1e-5)


class Optional(nn.Module):
    """Arguments that are no tensors, on which the code branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), shuffled(), nn.Conv2d(CHANNELS, 4, 1))

    def forward(self, images: torch.Tensor, double: bool = False, mask: torch.Tensor | None = None) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        if mask is not None:
            scores = scores * mask
        return 2 * scores if double else scores


@pytest.mark.parametrize(
    "arguments", [(IMAGES,), (IMAGES, True), (IMAGES, False, torch.rand(2, 4, 6, 6))], ids=["none", "flag", "mask"]
)
def test_arguments_that_code_branches_on_are_taken_as_given(arguments: tuple[object, ...]) -> None:
    model = Optional().eval()
    folded = ss.fold(model, arguments)
    assert ss.fold_report(folded).untraced_reason == ""
    assert ss.fold_report(folded).gathers == ()
    torch.testing.assert_close(folded(*arguments), model(*arguments).detach(), rtol=1e-4, atol=1e-5)


class KeywordOnly(nn.Module):
    """Takes them by keyword only, and any number of others by position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Optional()

    def forward(
        self, images: torch.Tensor, *others: torch.Tensor, double: bool = False, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        scores: torch.Tensor = self.inner(images, double, mask)
        return scores


class PositionalOnly(nn.Module):
    """Takes them by position only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Optional()

    def forward(self, images: torch.Tensor, double: bool = False, mask: torch.Tensor | None = None, /) -> torch.Tensor:
        scores: torch.Tensor = self.inner(images, double, mask)
        return scores


class AllKinds(nn.Module):
    """Takes one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Optional()

    def forward(
        self, images: torch.Tensor, double: bool = False, /, scale: float = 2.0, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        scores: torch.Tensor = self.inner(images, double, mask)
        return scores * scale


@pytest.mark.parametrize("network", [KeywordOnly, PositionalOnly, AllKinds])
def test_arguments_of_every_kind_may_be_left_at_their_defaults(network: Callable[[], nn.Module]) -> None:
    model = network().eval()
    folded = ss.fold(model, IMAGES)
    assert ss.fold_report(folded).untraced_reason == ""
    assert ss.fold_report(folded).gathers == ()
    torch.testing.assert_close(folded(IMAGES), model(IMAGES).detach(), rtol=1e-4, atol=1e-5)


SCALE = torch.tensor([3.0])
SHIFT = torch.rand(CHANNELS, 1, 1)


class TensorDefaults(nn.Module):
    """Has tensors for defaults, one alone and two in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = shuffled(), shuffled(), nn.Conv2d(CHANNELS, 4, 1)

    def forward(
        self,
        images: torch.Tensor,
        double: bool = False,
        scale: torch.Tensor = SCALE,
        *,
        shifts: tuple[torch.Tensor, torch.Tensor] = (SHIFT, SCALE),
    ) -> torch.Tensor:
        features = self.second(scale * self.first(images)) + shifts[0]
        scores: torch.Tensor = self.last(features) + shifts[1]
        return 2 * scores if double else scores


@pytest.mark.parametrize(
    "arguments", [(IMAGES,), (IMAGES, True), (IMAGES, True, torch.tensor([5.0]))], ids=["none", "flag", "scale"]
)
def test_defaults_may_be_tensors_whether_another_one_is_given_or_not(arguments: tuple[object, ...]) -> None:
    model = TensorDefaults().eval()
    folded = ss.fold(model, arguments)
    assert ss.fold_report(folded).untraced_reason == ""
    torch.testing.assert_close(folded(*arguments), model(*arguments).detach(), rtol=1e-4, atol=1e-5)


def test_a_tensor_by_default_is_a_constant_and_one_that_was_given_is_an_input() -> None:
    model, other_scale = TensorDefaults().eval(), torch.tensor([-1.0])
    with pytest.raises(TypeError, match="positional arguments"):
        ss.fold(model, IMAGES)(IMAGES, False, other_scale)
    folded = ss.fold(model, (IMAGES, False, SCALE))
    expected = model(IMAGES, False, other_scale).detach()
    torch.testing.assert_close(folded(IMAGES, False, other_scale), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="scale"):
        folded(IMAGES, False)


def test_no_argument_is_taken_for_a_tensor_that_became_a_constant() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = shuffled()

        def forward(
            self, images: torch.Tensor, scale: torch.Tensor = SCALE, offsets: tuple[float, ...] = (0.5,)
        ) -> torch.Tensor:
            features: torch.Tensor = self.layer(images) * scale + offsets[0]
            return features

    model = Scaled().eval()
    folded = ss.fold(model, IMAGES)
    torch.testing.assert_close(folded(IMAGES), model(IMAGES).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="positional arguments"):
        folded(IMAGES, torch.tensor([2.0]))


class Scaled(nn.Module):
    """For what follows: a shuffled layer between others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), shuffled(), nn.Conv2d(CHANNELS, 4, 1))


class OthersAfterTensor(Scaled):
    """Takes any number of arguments after one with a tensor for default."""

    def forward(self, images: torch.Tensor, scale: torch.Tensor = SCALE, *others: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images) * scale
        return scores


class KeywordAfterTensor(Scaled):
    """Takes another by keyword only after one with a tensor for default."""

    def forward(
        self, images: torch.Tensor, scale: torch.Tensor = SCALE, *, shifts: tuple[float, ...] = (0.5,)
    ) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images) * scale + shifts[0]
        return scores


class OptionsAfterTensor(Scaled):
    """Takes any keywords beside a tensor by default."""

    def forward(self, images: torch.Tensor, *, scale: torch.Tensor = SCALE, **options: object) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images) * scale
        return scores


@pytest.mark.parametrize("network", [OthersAfterTensor, KeywordAfterTensor, OptionsAfterTensor])
def test_nothing_else_takes_what_is_given_for_a_tensor_that_became_a_constant(network: Callable[[], nn.Module]) -> None:
    model = network().eval()
    folded = ss.fold(model, IMAGES)
    assert ss.fold_report(folded).untraced_reason == ""
    torch.testing.assert_close(folded(IMAGES), model(IMAGES).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="positional arguments"):
        folded(IMAGES, torch.tensor([2.0]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        folded(IMAGES, scale=torch.tensor([2.0]))


def test_a_graph_takes_as_many_arguments_as_it_was_given() -> None:
    model, arguments = OthersAfterTensor().eval(), (IMAGES, torch.tensor([2.0]), SHIFT)
    folded = ss.fold(model, arguments)
    assert ss.fold_report(folded).untraced_reason == ""
    torch.testing.assert_close(folded(*arguments), model(*arguments).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        folded(*arguments[:2])


def test_any_number_of_arguments_by_position_are_none_of_those_by_keyword() -> None:
    class Shifted(Scaled):
        def forward(
            self, images: torch.Tensor, *others: torch.Tensor, double: bool = False, shifts: tuple[float, ...] = (0.5,)
        ) -> torch.Tensor:
            scores: torch.Tensor = self.layers(images) + others[0] + shifts[0]
            return 2 * scores if double else scores

    model, arguments = Shifted().eval(), (IMAGES, torch.tensor([2.0]))
    folded = ss.fold(model, arguments)
    assert ss.fold_report(folded).untraced_reason == ""
    torch.testing.assert_close(folded(*arguments), model(*arguments).detach(), rtol=1e-4, atol=1e-5)


PARAMETER = nn.Parameter(torch.tensor([3.0]))


@pytest.mark.parametrize("arguments", [(IMAGES,), (IMAGES, torch.tensor([5.0]))], ids=["left", "given"])
def test_defaults_may_be_parameters_and_stay_as_they_are(arguments: tuple[torch.Tensor, ...]) -> None:
    class ScaledByParameter(Scaled):
        def forward(self, images: torch.Tensor, scale: torch.Tensor = PARAMETER) -> torch.Tensor:
            scores: torch.Tensor = self.layers(images) * scale
            return scores

    model = ScaledByParameter().eval()
    folded = ss.fold(model, arguments)
    assert ss.fold_report(folded).untraced_reason == ""
    assert ss.fold_report(folded).gathers == ()
    assert PARAMETER.requires_grad
    torch.testing.assert_close(folded(*arguments), model(*arguments).detach(), rtol=1e-4, atol=1e-5)


def test_what_stops_the_shapes_is_in_the_report_and_nowhere_else(capfd: pytest.CaptureFixture[str]) -> None:
    class FailingOnceTraced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = shuffled()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            features: torch.Tensor = self.layer(images)
            return features + images.new_zeros(5) if isinstance(images, torch.fx.Proxy) else features

    model = FailingOnceTraced().eval()
    folded = ss.fold(model, IMAGES)
    assert "size" in ss.fold_report(folded).untraced_reason
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err


def test_folding_a_folded_graph_changes_nothing() -> None:
    folded = ss.fold(nn.Sequential(shuffled(), nn.ReLU(), shuffled()), IMAGES)
    again = ss.fold(folded, IMAGES)
    assert ss.fold_report(again) == ss.fold_report(folded)
    assert again is not folded
    torch.testing.assert_close(again(IMAGES), folded(IMAGES), rtol=0, atol=0)
    with pytest.raises(ValueError, match="widen_groups_below=16 comes too late"):
        ss.fold(folded, IMAGES, widen_groups_below=16)


def test_tensors_from_outside_of_the_network_are_copied_into_the_graph() -> None:
    by_default, everywhere = torch.full((4, 1, 1), 2.0), torch.full((4, 1, 1), 3.0)
    of_somebody = nn.Parameter(torch.full((4, 1, 1), 5.0))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(
            self, images: torch.Tensor, scale: torch.Tensor = by_default, *, other: torch.Tensor = of_somebody
        ) -> torch.Tensor:
            features: torch.Tensor = self.conv(images)
            return features * scale * other * everywhere

    images = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    folded = ss.fold(Scaled(), images)
    assert not ss.fold_report(folded).untraced_reason
    before = folded(images)
    for tensor in (by_default, everywhere, of_somebody.data):
        tensor.zero_()
    torch.testing.assert_close(folded(images), before, rtol=0, atol=0)


def test_networks_fold_inside_of_autocast() -> None:
    network = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS), nn.ReLU(), shuffled()).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        folded = ss.fold(network, IMAGES)
        assert torch.is_autocast_cache_enabled()
    assert not ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(folded(IMAGES), network(IMAGES), rtol=1e-4, atol=1e-5)
