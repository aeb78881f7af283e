"""Group levels by what they cost the predictions, measured on calibration images, instead of by the norm they keep.

With the weights of a layer refitted to its inputs, grouping leaves the error `r_j` in output channel j. The divergence
of the predictions is estimated as `k sum_j F_j r_j / 2`, F_j the mean square of the gradient at that channel. The
factor k stands for all that the sum leaves out, such as errors that add up over positions. It is measured: the network
is run with that one layer grouped.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import num_groups
from strucspars.cost.counting import undisturbed
from strucspars.nn.groupable import SelectedLayer
from strucspars.nn.names import unwrapped
from strucspars.nn.refit import PatchMoments, by_position, in_double, ridge_solution, windows
from strucspars.sparsify.calibration import Calibration, OnProgress, device_of, hooked, logits_of, visit_gradients
from strucspars.sparsify.extensions import Need, Orders

# Per layer, to plan with. More neighbouring positions of the same images tell little new.
MAX_SAMPLES = 32_768
# For a number per output channel, and for one per layer.
IMAGES_FOR_SENSITIVITY = 64
IMAGES_FOR_DIVERGENCE = 64
# Of the inputs' mean square.
RIDGE = 1e-2
# In nats. Where next to nothing is lost, no factor can be told.
TINY_LOSS = 1e-12


@dataclass(frozen=True, eq=False)
class LayerData:
    """What the calibration images tell about a layer.

    Attributes:
        covariance: of its input patches, `(C_in * kernel, C_in * kernel)`.
        mean_input: their mean, `(C_in * kernel,)`.
        sensitivity: per image, sum over the positions of the squared gradients at each output channel, `(C_out,)`.
    """

    covariance: torch.Tensor
    mean_input: torch.Tensor
    sensitivity: torch.Tensor


def layer_data(
    model: nn.Module, layers: Sequence[SelectedLayer], data: Calibration, on_progress: OnProgress
) -> list[LayerData]:
    """Run the network on the images, and collect the inputs of the layers."""
    device = device_of(model)
    sums = {layer.module: torch.zeros(layer.weight_shape[0], device=device) for layer in layers}
    few = data.first(IMAGES_FOR_SENSITIVITY)

    def visit(module: nn.Module, _: torch.Tensor, gradients: torch.Tensor) -> None:
        sums[module] += by_position(module, gradients).square().sum((0, 1))

    visit_gradients(model, sums, few, visit, progress=lambda done, total: on_progress("sensitivity", done, total))
    positions = -(-MAX_SAMPLES // len(data))
    moments = {module: PatchMoments(module, max_positions=positions) for module in sums}
    with undisturbed(model), hooked(sums, lambda module, inputs, _: moments[module].add(inputs[0])):
        for place, images in enumerate(data.images):
            unwrapped(model)(images.to(device))
            on_progress("inputs of the layers", place + 1, len(data.images))

    def found(layer: SelectedLayer) -> LayerData:
        own = moments.pop(layer.module)
        covariance = own.moments(False)[0][0].float()
        return LayerData(covariance, own.mean_input[0].float(), sums[layer.module] / len(few))

    return [found(layer) for layer in layers]


def error_importance(layer: SelectedLayer, found: LayerData) -> FloatArray:
    """What the loss of each connection alone adds to the error of the predictions, to first order."""
    out_channels, in_channels = layer.weight_shape[:2]
    kernels = layer.weight.detach().reshape(out_channels, in_channels, -1).float()
    area = kernels.shape[2]
    blocks = found.covariance.view(in_channels, area, in_channels, area).diagonal(dim1=0, dim2=2)
    error = torch.einsum("oik,kli,oil->oi", kernels, blocks, kernels) * found.sensitivity[:, None]
    return error.clamp_min(0).double().cpu().numpy()


def refit_change(layer: SelectedLayer, found: LayerData, orders: Orders, level: int) -> torch.Tensor:
    """By how much grouping with refitted weights changes the dense weight, `(C_out, C_in * kernel)`."""
    weight, covariance = layer.weight.detach().flatten(1).float(), found.covariance
    groups, area = num_groups(level), weight.shape[1] // layer.weight_shape[1]
    rows, columns = (torch.tensor(order, device=weight.device).view(groups, -1, 1) for order in orders)
    columns = (columns * area + torch.arange(area, device=weight.device)).flatten(1)[:, None]
    # The covariance of the dense layer's outputs and its inputs; of each group its own block.
    cross = weight @ covariance
    among = covariance[columns.mT, columns]
    fitted = ridge_solution(
        *(in_double(each) for each in (among, cross[rows, columns], weight[rows, columns])), ridge=RIDGE
    )
    change = -weight
    change[rows, columns] += fitted.to(change)
    return change


def expected_loss(found: LayerData, change: torch.Tensor) -> float:
    """`sum_j F_j r_j / 2`, in nats per image: the divergence if the errors at all positions and channels were apart."""
    errors = ((change @ found.covariance) * change).sum(1).clamp_min(0)
    return float(errors @ found.sensitivity) / 2


def losses_by_level(
    model: nn.Module,
    layers: Sequence[SelectedLayer],
    found: Sequence[LayerData],
    orders_at: Callable[[int], Sequence[Orders]],
    data: Calibration,
    on_progress: OnProgress,
) -> dict[str, list[float]]:
    """The loss of every layer at its levels 1, 2, ..., never falling; `orders_at(level)` gives all layers' orders."""
    meter = DivergenceMeter(model, data.first(IMAGES_FOR_DIVERGENCE))
    orders = {level: orders_at(level) for level in range(2, max(layer.largest_level for layer in layers) + 1)}
    losses: dict[str, list[float]] = {}
    for place, (layer, known) in enumerate(zip(layers, found, strict=True)):
        expected, scale = [0.0], 1.0
        for level in range(2, layer.largest_level + 1):
            change = refit_change(layer, known, orders[level][place], level)
            expected.append(max(expected_loss(known, change), TINY_LOSS))
            if level == 2:
                scale = max(meter.after(layer.module, change, known.mean_input), TINY_LOSS) / expected[-1]
        losses[layer.name] = np.maximum.accumulate(scale * np.array(expected)).tolist()
        on_progress("group levels", place + 1, len(layers))
    return losses


class DivergenceMeter:
    """Measures how far a change of a layer moves the predictions for some images."""

    def __init__(self, model: nn.Module, data: Calibration) -> None:
        """Predict with the network as it is."""
        self._model, self._images = model, [images.to(device_of(model)) for images in data.images]
        self._count = len(data)
        with undisturbed(model):
            self._wanted = [self._predictions(images) for images in self._images]

    def _predictions(self, images: torch.Tensor) -> torch.Tensor:
        return logits_of(unwrapped(self._model)(images)).log_softmax(1)

    def after(self, module: nn.Module, change: torch.Tensor, mean_input: torch.Tensor) -> float:
        """Nats per image once the layer's weight changes by `change`; a bias or norm keeps the mean of its outputs."""
        weight, total = module.get_parameter("weight"), 0.0
        before, moved = weight.data, change @ mean_input

        def keep_mean(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
            shape = [1] * output.dim()
            shape[-1 if isinstance(module, nn.Linear) else 1] = -1
            return output - moved.to(output).view(shape)

        try:
            weight.data = before + change.to(before).view_as(before)
            with undisturbed(self._model), hooked([module], keep_mean):
                for images, wanted in zip(self._images, self._wanted, strict=True):
                    total += float((wanted.exp() * (wanted - self._predictions(images))).sum(1).mean(1).sum())
        finally:
            weight.data = before
        return total / self._count


def with_statistics(
    model: nn.Module, layers: Sequence[SelectedLayer], needs: Collection[Need], data: Calibration
) -> list[SelectedLayer]:
    """The layers with what an importance needs of the calibration images."""
    modules = {layer.module: layer for layer in layers}
    found: dict[nn.Module, dict[str, Any]] = {module: {} for module in modules}

    def add(module: nn.Module, **values: torch.Tensor) -> None:
        for name, value in values.items():
            array = value.double().cpu().numpy() / len(data)
            found[module][name] = found[module].get(name, 0.0) + array

    def add_inputs(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        channel_axis = -1 if isinstance(module, nn.Linear) else 1
        squares = inputs[0].float().square().movedim(channel_axis, -1).flatten(0, -2)
        add(module, input_second_moment=squares.mean(0) * len(inputs[0]))

    def add_gradients(module: nn.Module, inputs: torch.Tensor, gradients: torch.Tensor) -> None:
        by_image = weight_gradients(module, inputs, gradients)
        shape = modules[module].weight_shape
        sums = torch.zeros(2, *shape, device=inputs.device)
        for gradient in by_image:
            sums += torch.stack([gradient, gradient.square()]).view(sums.shape)
        add(module, gradient=sums[0], squared_gradient=sums[1])

    if "inputs" in needs:
        with undisturbed(model), hooked(modules, add_inputs):
            for images in data.images:
                unwrapped(model)(images.to(device_of(model)))
    if "gradients" in needs:
        visit_gradients(model, modules, data, add_gradients, uses_labels=True)
    return [replace(layer, **found[layer.module]) for layer in layers]


def weight_gradients(module: nn.Module, inputs: torch.Tensor, gradients: torch.Tensor) -> Iterator[torch.Tensor]:
    """The gradient of the dense weight for every image of a batch, `(C_out, C_in * kernel)`."""
    seen, positions = windows(module, inputs)
    patches = seen.flatten(1 + len(positions)).flatten(1, len(positions)).float()
    for image, gradient in zip(patches, by_position(module, gradients).float(), strict=True):
        yield gradient.T @ image
