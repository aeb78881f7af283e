"""The method's mathematics on plain arrays: no torch, no files, no clock, no logging."""

from strucspars.core.budget import LayerBudget, ThresholdSearch, removed_fraction, search_threshold, without_surplus
from strucspars.core.controller import LambdaSchedule, LambdaState, default_lambda_step, next_lambda
from strucspars.core.hierarchy import connection_mask, max_group_level, num_groups, penalty_matrix
from strucspars.core.importance import importance_matrix, kept_norm_by_level, largest_group_level
from strucspars.core.learning import learn_permutations, refine_at_level
from strucspars.core.permutation import Connectivity
from strucspars.core.plan import Preprocessing

__all__ = [
    "Connectivity",
    "LambdaSchedule",
    "LambdaState",
    "LayerBudget",
    "Preprocessing",
    "ThresholdSearch",
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
    "without_surplus",
]
