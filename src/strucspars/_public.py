"""The public names: `import strucspars as ss` finds them here on first use."""

from strucspars._version import __version__
from strucspars.convert.ablation import reordered_plan, rescale_fresh_weights_
from strucspars.convert.conversion import convert_, mask_, model_plan
from strucspars.convert.fold import fold
from strucspars.core.budget import LayerBudget, ThresholdSearch, removed_fraction, search_threshold, without_surplus
from strucspars.core.controller import LambdaSchedule, LambdaState, default_lambda_step, next_lambda
from strucspars.core.hierarchy import connection_mask, max_group_level, num_groups, penalty_matrix
from strucspars.core.importance import kept_norm_by_level, largest_group_level
from strucspars.core.learning import learn_permutations, refine_at_level
from strucspars.core.permutation import Connectivity
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.cost.counting import NetworkCount, count_macs
from strucspars.cost.gathers import FoldReport, fold_report
from strucspars.cost.summary import Summary, summary
from strucspars.export.checked import ExportReport, export, register_exporter
from strucspars.export.onnx import OnnxRunner
from strucspars.export.storage import load, save
from strucspars.nn.groupable import select_layers
from strucspars.nn.importance import importance_matrix
from strucspars.nn.layers import ShuffledGroupConv2d
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import register_budget, register_importance, register_orders
from strucspars.sparsify.planning import one_shot_plan
from strucspars.sparsify.sparsifier import Sparsifier

__all__ = [
    "Connectivity",
    "ExportReport",
    "FoldReport",
    "GroupingPlan",
    "LambdaSchedule",
    "LambdaState",
    "LayerBudget",
    "LayerPlan",
    "NetworkCount",
    "OnnxRunner",
    "ShuffledGroupConv2d",
    "Sparsifier",
    "SparsifyConfig",
    "Summary",
    "ThresholdSearch",
    "__version__",
    "connection_mask",
    "convert_",
    "count_macs",
    "default_lambda_step",
    "export",
    "fold",
    "fold_report",
    "importance_matrix",
    "kept_norm_by_level",
    "largest_group_level",
    "learn_permutations",
    "load",
    "mask_",
    "max_group_level",
    "model_plan",
    "next_lambda",
    "num_groups",
    "one_shot_plan",
    "penalty_matrix",
    "refine_at_level",
    "register_budget",
    "register_exporter",
    "register_importance",
    "register_orders",
    "removed_fraction",
    "reordered_plan",
    "rescale_fresh_weights_",
    "save",
    "search_threshold",
    "select_layers",
    "summary",
    "without_surplus",
]
