"""A short name for a grouping, by which a file can be matched with the plan that it came from."""

import hashlib
import json

from torch import nn

from strucspars.convert.model_plan import model_plan
from strucspars.core.plan import GroupingPlan


def plan_hash(plan: GroupingPlan) -> str:
    """SHA-256 of what a plan groups and how, as hexadecimal text.

    Layers that stay whole, the target and the version do not count: the same network gives the same text.

    >>> plan_hash(GroupingPlan({}))[:12]
    '44136fa355b3'
    """
    layers = json.loads(plan.to_json())["layers"]
    grouped = {name: layers[name] for name, layer in plan.layers.items() if layer.group_level > 1}
    return hashlib.sha256(json.dumps(grouped, sort_keys=True).encode()).hexdigest()


def hash_of_model(model: nn.Module) -> str | None:
    """The hash of the plan that a converted network carries in itself; None where there is none to be read."""
    try:
        plan = model_plan(model)
    except ValueError:
        # Masked layers, or groups made by hand that no plan describes.
        return None
    return plan_hash(plan) if plan.layers else None
