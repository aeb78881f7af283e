"""Where a model holds its layers: a module that is replaced would go on being penalised in place of the new one."""

from collections.abc import Mapping, Sequence

from torch import nn

from strucspars.nn.selection import SelectedLayer
from strucspars.nn.wrappers import bare_modules

# One step of the way to a layer: all that a module holds, the name of one, and that one. No class: that takes twice as
# long to look at, and every training step does.
_Place = tuple[Mapping[str, nn.Module | None], str, nn.Module]


class LayerPlaces:
    """The way from a model to each of its layers, cheap enough to be looked at before every training step."""

    def __init__(self, model: nn.Module, layers: Sequence[SelectedLayer]) -> None:
        self._model, self._layers = model, tuple(layers)
        self._places = _ways(model, {layer.module for layer in layers})

    def check(self) -> None:
        """Raise a `ValueError` that names a layer whose place in the model another module has taken."""
        for modules, name, module in self._places:
            if modules.get(name) is not module:
                self._follow()
                return

    def _follow(self) -> None:
        """A wrapper (`torch.compile`) may have come between: then the layers are the same."""
        present = dict(bare_modules(self._model, remove_duplicate=False))
        for layer in self._layers:
            if present.get(layer.name) is not layer.module:
                raise ValueError(
                    f"layer {layer.name!r} has been replaced in the model, or taken out of it, and the Sparsifier "
                    "would go on with the old module; make a new Sparsifier"
                )
        self._places = _ways(self._model, {layer.module for layer in self._layers})


def _ways(model: nn.Module, layers: set[nn.Module]) -> tuple[_Place, ...]:
    """Every place that leads to a layer by its first name, each once."""
    names = [name for name, module in model.named_modules() if module in layers]
    places: dict[tuple[str, ...], _Place] = {}
    for name in names:
        holder, parts = model, name.split(".") if name else []
        for depth, part in enumerate(parts, start=1):
            held = holder.get_submodule(part)
            places[tuple(parts[:depth])] = holder._modules, part, held
            holder = held
    return tuple(places.values())
