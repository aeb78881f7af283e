"""Where a model holds its layers: a module that is replaced would go on being penalised in place of the new one."""

from collections.abc import Mapping, Sequence

from torch import nn

from strucspars.nn.selection import SelectedLayer
from strucspars.nn.wrappers import bare_modules, modules_by_name

# One step of the way to a layer: a module, the name of one that it holds, and that one. No class: that takes twice as
# long to look at, and every training step does.
_Place = tuple[nn.Module, str, nn.Module]


class LayerPlaces:
    """The way from a model to each of its layers, cheap enough to be looked at before every training step."""

    def __init__(self, model: nn.Module, layers: Sequence[SelectedLayer]) -> None:
        self.model, self._layers = model, tuple(layers)
        self._places = _ways(model, {layer.module for layer in layers})

    def check(self) -> None:
        """Raise a `ValueError` that names a layer whose place in the model another module has taken."""
        for holder, name, module in self._places:
            if holder._modules.get(name) is not module:
                self._follow()
                return

    def are_called(self, names: Sequence[str]) -> bool:
        """Whether these are the layers in their order; names may have wrappers in them, as those of older states."""
        modules = modules_by_name(self.model)
        return [modules.get(name) for name in names] == [layer.module for layer in self._layers]

    def _follow(self) -> None:
        """A wrapper may have come between (compiled, or with activations recomputed): then the layers are the same."""
        present = dict(bare_modules(self.model, remove_duplicate=False))
        for layer in self._layers:
            if layer.module not in _nearest(layer.name, present).modules():
                raise ValueError(
                    f"layer {layer.name!r} has been replaced in the model, or taken out of it, and the Sparsifier "
                    "would go on with the old module; make a new Sparsifier"
                )
        self._places = _ways(self.model, {layer.module for layer in self._layers})


def _nearest(name: str, present: Mapping[str, nn.Module]) -> nn.Module:
    """What is there under a name, or as much of it as there is."""
    while name not in present:
        name = name.rpartition(".")[0]
    return present[name]


def _ways(model: nn.Module, layers: set[nn.Module]) -> tuple[_Place, ...]:
    """Every place that leads to a layer by its first name, each once."""
    names = [name for name, module in model.named_modules() if module in layers]
    places: dict[tuple[str, ...], _Place] = {}
    for name in names:
        holder, parts = model, name.split(".") if name else []
        for depth, part in enumerate(parts, start=1):
            held = holder.get_submodule(part)
            places[tuple(parts[:depth])] = holder, part, held
            holder = held
    return tuple(places.values())
