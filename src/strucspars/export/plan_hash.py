"""A short name for a grouping, by which a file can be matched with the plan that it came from."""

import hashlib
import json

from torch import nn

from strucspars.convert.model_plan import plan_of
from strucspars.core.plan import GroupingPlan
from strucspars.measure.folded import PLAN_KEY, is_folded


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
    """The hash of the plan of a converted network, also of one that was folded; None where there is no plan."""
    plan = model.meta.get(PLAN_KEY) if is_folded(model) else plan_of(model)
    return plan_hash(plan) if isinstance(plan, GroupingPlan) and plan.layers else None
