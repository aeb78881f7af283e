"""Structured sparsification: learn which channels belong together, and turn convolutions into group convolutions."""

from strucspars._version import __version__
from strucspars.core.budget import LayerBudget, ThresholdSearch, removed_fraction, search_threshold
from strucspars.core.connectivity import Connectivity
from strucspars.core.controller import LambdaSchedule, LambdaState, default_lambda_step, next_lambda
from strucspars.core.criterion import kept_norm_by_level, largest_group_level
from strucspars.core.hierarchy import connection_mask, max_group_level, num_groups, penalty_matrix
from strucspars.core.learning import learn_permutations, refine_at_level
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.nn.importance import importance_matrix

__all__ = [
    "Connectivity",
    "GroupingPlan",
    "LambdaSchedule",
    "LambdaState",
    "LayerBudget",
    "LayerPlan",
    "ThresholdSearch",
    "__version__",
    "connection_mask",
    "default_lambda_step",
    "importance_matrix",
    "kept_norm_by_level",
    "largest_group_level",
    "learn_permutations",
    "max_group_level",
    "next_lambda",
    "num_groups",
    "penalty_matrix",
    "refine_at_level",
    "removed_fraction",
    "search_threshold",
]
