"""Group levels by what they cost the predictions, measured on calibration images, instead of by the norm they keep.

The second-order divergence of the predictions is `E[(g . d)^2] / 2`, with d the error that grouping makes in a layer's
outputs and g the gradient of a random measure of the prediction, whose variance is the curvature of the divergence.
With the layer's weights refitted to its inputs, d is what a later reconstruction leaves.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from strucspars.nn.refit import MAX_SAMPLES, PatchMoments, by_position, in_double, ridge_solution, windows
from strucspars.sparsify.calibration import (
    Calibration,
    Coherence,
    OnProgress,
    device_of,
    hooked,
    logits_of,
    visit_gradients,
)
from strucspars.sparsify.extensions import Need, Orders

# For numbers of which there is one per layer or per output channel.
IMAGES_FOR_SENSITIVITY = 32
# Of the measured coherence: what fits to some hundred images follow.
COHERENCE_SHARE = 0.1
# Of the inputs' mean square. The better one counts, layer by layer and level by level.
RIDGES = (0.03, 0.3)
# Factor by which an estimate of a loss, in nats, may be wrong. Where next to nothing is lost, nothing can be told.
LARGEST_NOISE = 4.0
TINY_LOSS = 1e-12


@dataclass(frozen=True, eq=False)
class LayerData:
    """What the calibration images tell about a layer.

    Attributes:
        covariance: of its input patches as the network weighs them, `(C_in * kernel, C_in * kernel)`.
        mean_input: their mean, `(C_in * kernel,)`.
        sensitivity: mean square of the gradients at each output channel, `(C_out,)`.
    """

    covariance: torch.Tensor
    mean_input: torch.Tensor
    sensitivity: torch.Tensor


def layer_data(
    model: nn.Module, layers: Sequence[SelectedLayer], data: Calibration, on_progress: OnProgress
) -> list[LayerData]:
    """Run the network on the images, and collect the inputs of the layers."""
    coherence = Coherence()
    sums = {layer.module: torch.zeros(layer.weight_shape[0]) for layer in layers}
    few = data.first(IMAGES_FOR_SENSITIVITY)

    def visit(module: nn.Module, _: torch.Tensor, gradients: torch.Tensor) -> None:
        by_place = by_position(module, gradients)
        coherence.visit(module, by_place)
        sums[module] += by_place.square().sum((0, 1)).cpu()

    visit_gradients(model, sums, few, visit, progress=lambda done, total: on_progress("sensitivity", done, total))
    positions = -(-MAX_SAMPLES // len(data))
    moments = {module: PatchMoments(module, max_positions=positions) for module in sums}
    with undisturbed(model), hooked(sums, lambda module, inputs, _: moments[module].add(inputs[0])):
        for place, images in enumerate(data.images):
            unwrapped(model)(images.to(device_of(model)))
            on_progress("inputs of the layers", place + 1, len(data.images))

    def found(layer: SelectedLayer) -> LayerData:
        own = moments.pop(layer.module)
        covariance = own.moments(COHERENCE_SHARE * coherence.of(layer.module), False)[0][0].float()
        return LayerData(covariance, own.mean_input[0].float(), sums[layer.module] / len(few))

    return [found(layer) for layer in layers]


def error_importance(layer: SelectedLayer, found: LayerData) -> FloatArray:
    """What the loss of each connection alone adds to the error of the predictions, to first order."""
    out_channels, in_channels = layer.weight_shape[:2]
    kernels = layer.weight.detach().reshape(out_channels, in_channels, -1).float().cpu()
    area = kernels.shape[2]
    blocks = found.covariance.cpu().view(in_channels, area, in_channels, area).diagonal(dim1=0, dim2=2)
    error = torch.einsum("oik,kli,oil->oi", kernels, blocks, kernels) * found.sensitivity[:, None]
    return error.clamp_min(0).double().numpy()


def refit_change(layer: SelectedLayer, found: LayerData, orders: Orders, level: int, *, ridge: float) -> torch.Tensor:
    """By how much grouping with refitted weights changes the dense weight, `(C_out, C_in * kernel)`."""
    weight, covariance = layer.weight.detach().flatten(1).float(), found.covariance
    groups, area = num_groups(level), weight.shape[1] // layer.weight_shape[1]
    rows, columns = (torch.tensor(order, device=weight.device).view(groups, -1, 1) for order in orders)
    columns = (columns * area + torch.arange(area, device=weight.device)).flatten(1)[:, None]
    # The covariance of the dense layer's outputs and its inputs; of each group its own block.
    cross = weight @ covariance
    among = covariance[columns.mT, columns]
    fitted = ridge_solution(
        *(in_double(each) for each in (among, cross[rows, columns], weight[rows, columns])), ridge=ridge
    )
    change = -weight
    change[rows, columns] += fitted.to(change)
    return change


def measured_losses(
    model: nn.Module,
    changes: Mapping[nn.Module, Sequence[torch.Tensor]],
    means: Mapping[nn.Module, torch.Tensor],
    data: Calibration,
    on_progress: OnProgress,
) -> dict[nn.Module, list[float]]:
    """The divergence of the predictions, in nats per image, that each change of a layer's weight alone would cause.

    Relative to the mean inputs: a bias or norm makes up for the change of the mean output.
    """
    stacked = {module: torch.stack([each.flatten() for each in tried]).half() for module, tried in changes.items()}
    sums = {module: torch.zeros(len(tried)) for module, tried in changes.items()}

    def visit(module: nn.Module, inputs: torch.Tensor, gradients: torch.Tensor) -> None:
        tried = stacked[module].float()
        for gradient in weight_gradients(module, inputs, gradients, means[module]):
            sums[module] += (tried @ gradient.flatten()).square().cpu()

    visit_gradients(model, changes, data, visit, progress=lambda done, total: on_progress("levels", done, total))
    return {module: (values / (2 * len(data))).tolist() for module, values in sums.items()}


def losses_by_level(
    model: nn.Module,
    layers: Sequence[SelectedLayer],
    found: Sequence[LayerData],
    orders_at: Callable[[int], Sequence[Orders]],
    data: Calibration,
    on_progress: OnProgress,
) -> dict[str, list[float]]:
    """The loss of every layer at its levels 1, 2, ..., never falling; `orders_at(level)` gives all layers' orders."""
    changes: dict[nn.Module, list[torch.Tensor]] = {layer.module: [] for layer in layers}
    for level in range(2, max(layer.largest_level for layer in layers) + 1):
        orders = orders_at(level)
        for layer, known, own in zip(layers, found, orders, strict=True):
            if level <= layer.largest_level:
                tried = (refit_change(layer, known, own, level, ridge=ridge).half() for ridge in RIDGES)
                changes[layer.module] += tried
    means = {layer.module: known.mean_input for layer, known in zip(layers, found, strict=True)}
    changes = {module: tried for module, tried in changes.items() if tried}
    estimates = measured_losses(model, changes, means, data, on_progress)
    losses = {layer.name: [0.0] for layer in layers}
    names = {layer.module: layer.name for layer in layers}
    few = data.first(IMAGES_FOR_SENSITIVITY)
    for place, (module, alternatives) in enumerate(changes.items()):
        by_level = np.array(estimates[module]).reshape(-1, len(RIDGES))
        # An estimate has one direction of the predictions per image. That is noisy, alike at all levels of a layer, so
        # the divergence of the first level is measured.
        first = int(by_level[0].argmin())
        direct = changed_divergence(model, module, alternatives[first], means[module], few)
        scale = np.clip(direct / max(by_level[0, first], TINY_LOSS), 1 / LARGEST_NOISE, LARGEST_NOISE)
        losses[names[module]] += np.maximum.accumulate(scale * by_level.min(axis=1)).tolist()
        on_progress("predictions", place + 1, len(changes))
    return losses


def changed_divergence(
    model: nn.Module, module: nn.Module, change: torch.Tensor, mean_input: torch.Tensor, data: Calibration
) -> float:
    """The divergence of the predictions, in nats per image, once a layer's weight changes but not its mean output."""
    weight, total = module.get_parameter("weight"), 0.0
    before, after = weight.data, weight.data + change.to(weight.dtype).view_as(weight)
    moved = change.to(mean_input) @ mean_input

    def keep_mean(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        shape = [1] * output.dim()
        shape[-1 if isinstance(module, nn.Linear) else 1] = -1
        return output - moved.to(output).view(shape)

    with undisturbed(model):
        for batch in data.images:
            images = batch.to(device_of(model))
            wanted = logits_of(unwrapped(model)(images)).log_softmax(1)
            weight.data = after
            try:
                with hooked([module], keep_mean):
                    found = logits_of(unwrapped(model)(images)).log_softmax(1)
            finally:
                weight.data = before
            total += float((wanted.exp() * (wanted - found)).sum(1).mean(1).sum())
    return total / len(data)


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


def weight_gradients(
    module: nn.Module, inputs: torch.Tensor, gradients: torch.Tensor, mean: torch.Tensor | float = 0.0
) -> Iterator[torch.Tensor]:
    """The gradient of the dense weight for every image of a batch, `(C_out, C_in * kernel)`; inputs less their mean."""
    seen, positions = windows(module, inputs)
    patches = seen.flatten(1 + len(positions)).flatten(1, len(positions)).float() - mean
    for image, gradient in zip(patches, by_position(module, gradients).float(), strict=True):
        yield gradient.T @ image
