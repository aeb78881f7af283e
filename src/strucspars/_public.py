"""The public names: `import strucspars as ss` finds them here on first use. The mathematics is in `ss.core`."""

from strucspars import core
from strucspars._version import __version__
from strucspars.convert.compress import compress, recalibrate_
from strucspars.convert.conversion import convert_, mask_, model_plan
from strucspars.convert.fold import fold
from strucspars.convert.reconstruction import reconstruct_
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.cost.counting import count_macs
from strucspars.cost.gathers import fold_report
from strucspars.cost.summary import summary
from strucspars.export.checked import export, register_exporter
from strucspars.export.gpu import compile_for_gpu
from strucspars.export.int8 import Int8
from strucspars.export.onnx import OnnxRunner
from strucspars.export.storage import load, save
from strucspars.nn.groupable import select_layers
from strucspars.nn.layers import ShuffledGroupConv2d
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import register_budget, register_importance, register_orders
from strucspars.sparsify.one_shot import one_shot_plan
from strucspars.sparsify.sparsifier import Sparsifier

__all__ = [
    "GroupingPlan",
    "Int8",
    "LayerPlan",
    "OnnxRunner",
    "ShuffledGroupConv2d",
    "Sparsifier",
    "SparsifyConfig",
    "__version__",
    "compile_for_gpu",
    "compress",
    "convert_",
    "core",
    "count_macs",
    "export",
    "fold",
    "fold_report",
    "load",
    "mask_",
    "model_plan",
    "one_shot_plan",
    "recalibrate_",
    "reconstruct_",
    "register_budget",
    "register_exporter",
    "register_importance",
    "register_orders",
    "save",
    "select_layers",
    "summary",
]
