"""Plans for networks in which a module has several names, or one with a wrapper in it."""

from dataclasses import replace

from torch import nn

from strucspars.core.plan import GroupingPlan
from strucspars.nn.wrappers import bare_modules, modules_by_name


def under_first_names(model: nn.Module, plan: GroupingPlan) -> GroupingPlan:
    """The same plan with every module under the name by which networks list it: the first, without wrappers.

    A name that the network does not have stays as it is.

    Raises:
        ValueError: two names of one module, which one grouping is for.

    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 1))
    >>> plan = ss.one_shot_plan(model, target=0.4)
    >>> model.add_module("again", model[0])
    >>> renamed = replace(plan, layers={"again": plan.layers["0"]})
    >>> list(under_first_names(model, renamed).layers)
    ['0']
    """
    modules = modules_by_name(model)
    first_names = {module: name for name, module in bare_modules(model)}
    given: dict[str, str] = {}
    for name in plan.layers:
        first = first_names.get(modules[name], name) if name in modules else name
        if first in given:
            raise ValueError(f"layers {given[first]!r} and {name!r} of the plan are one shared module; keep one")
        given[first] = name
    return replace(plan, layers={first: plan.layers[name] for first, name in given.items()})
