"""What a run does, as plain options. The defaults are the paper's CIFAR-10 protocol, on the embedded digits.

Ranges are checked here; types and choices where a recipe is read.
"""

import math
from dataclasses import dataclass
from typing import Literal

from strucspars.core.checks import checked_at_least, checked_fraction, checked_seed, checked_target
from strucspars.sparsify.config import SparsifyConfig, SparsifyOptions
from strucspars.sparsify.extensions import DEFAULT_IMPORTANCE

Schedule = Literal["constant", "steps", "cosine"]
Optimizer = Literal["sgd", "adamw"]
Precision = Literal["32", "bf16", "16"]
FinetuneForm = Literal["auto", "masked", "grouped"]
Ablation = Literal["finetune", "from-scratch", "shufflenet", "random", "no-shuffle"]
Kind = Literal["strucspars", "dense", "slimming"]
Device = Literal["auto", "cpu", "cuda"]
# As a teacher: the network of `model.weights` itself.
WEIGHTS = "weights"


def _check_range(key: str, value: float, *, above: float | None = None, below: float = math.inf) -> None:
    """Refuse a value outside [0, below), or outside (above, below)."""
    if not (0 <= value < below if above is None else above < value < below):
        raise ValueError(f"{key} must lie in {'[0' if above is None else f'({above}'}, {below}), got {value!r}")


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Which images.

    Attributes:
        name: `digits` (embedded), `cifar10`, `cifar100`, `imagenet`, `folder`, or `package.module:function`, which is
            called with `root`.
        root: folder that holds them; not needed for the digits.
        val: folder of the images of an image folder to test on; None where root holds val/ or test/.
        download: fetch CIFAR where it is missing.
        batch_size: images per step, over all processes together; at most as many as there are to learn from.
        image_size: side of the crops of image folders.
        resize: shortest side of their images before the crop; None for the proportion that the network's metadata give.
        mean, std: per channel, of pixels scaled to 0 .. 1; None for those of the network's metadata, of CIFAR or of
            the digits.
        num_classes: outputs of the network, where image folders hold only some of its classes and are named by the
            numbers of their outputs; None for one output per folder.
        workers: processes that read images from disk; None for one per core, but no more than four.
    """

    name: str = "digits"
    root: str | None = None
    val: str | None = None
    download: bool = False
    batch_size: int = 64
    image_size: int = 224
    resize: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    num_classes: int | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        # Batch norm needs two images to have a variance.
        checked_at_least("batch_size", self.batch_size, 2)
        checked_at_least("image_size", self.image_size, 8)
        if self.workers is not None:
            checked_at_least("workers", self.workers, 0)
        if self.resize is not None:
            checked_at_least("resize", self.resize, self.image_size)
        if self.num_classes is not None:
            checked_at_least("num_classes", self.num_classes, 1)
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"mean and std belong together; give both or none, got {self.mean} and {self.std}")


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """Which network.

    Attributes:
        name: `preact-resnet20` (any depth 9 n + 2), `cifar-resnet56` (6 n + 2), a torchvision name, `timm:NAME`, or
            `package.module:function`, which is called with `num_classes`.
        weights: where training starts: a torchvision weights name such as `DEFAULT`, or a checkpoint file; a compressed
            network is finetuned by its own plan, without a first stage; None for fresh weights.
    """

    name: str = "preact-resnet20"
    weights: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageRecipe:
    """One stage of training.

    Attributes:
        epochs: how long; 0 for a first stage that leaves the weights unchanged.
        lr: learning rate, at its highest.
        optimizer: `sgd` or `adamw`, whose usual rates are 100 times lower; its betas are PyTorch's. The first stage
            needs `sgd`, whose steps are proportional to the penalty.
        momentum: of SGD.
        weight_decay: of all parameters; with `adamw` decoupled from the gradient.
        schedule: `constant`; `steps`, which divides the rate by 10 at 50 % and 75 % of the epochs; or `cosine`.
        lr_warmup: fraction of the epochs over which the rate rises linearly.
        label_smoothing: share of the label's weight that all classes share.
        ema: decay per step of an averaged copy of the weights, which is then evaluated and kept; None for none.
    """

    epochs: int
    lr: float = 0.1
    optimizer: Optimizer = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    lr_warmup: float = 0.0
    label_smoothing: float = 0.0
    ema: float | None = None

    def __post_init__(self) -> None:
        checked_at_least("epochs", self.epochs, 0)
        _check_range("lr", self.lr, above=0)
        _check_range("weight_decay", self.weight_decay)
        for key in ("momentum", "label_smoothing", "lr_warmup"):
            _check_range(key, getattr(self, key), below=1)
        if self.ema is not None:
            _check_range("ema", self.ema, above=0, below=1)

    @property
    def lr_warmup_epochs(self) -> int:
        """Whole epochs over which the rate rises; at least one is left.

        >>> StageRecipe(epochs=160, lr_warmup=0.0625).lr_warmup_epochs, StageRecipe(epochs=3).lr_warmup_epochs
        (10, 0)
        """
        return min(round(self.lr_warmup * self.epochs), max(0, self.epochs - 1))


@dataclass(frozen=True, kw_only=True)
class SparsifyRecipe(SparsifyOptions):
    """The method's own options, for kind `strucspars`.

    Attributes:
        from_run: folder of a run whose finished first stage is reused instead of training one.
        calibration: images to learn from. Without a first stage they decide what trained weights lose, and the rest is
            refitted to them before it is finetuned; a progressive schedule with `decide_by` 0 decides by them too; in
            sparse training an importance such as `activation` reads them. 0 for none.
    """

    from_run: str | None = None
    calibration: int = 0


@dataclass(frozen=True, kw_only=True)
class SlimmingRecipe:
    """The baseline of Liu et al. (2017), for kind `slimming`.

    Attributes:
        target: fraction of all the network's parameters to remove.
        strength: of the L1 penalty on the batch-norm scales. Too weak, and the channels that go are not idle yet; too
            strong, and channels that stay are.
    """

    target: float = 0.4
    strength: float = 5e-4

    def __post_init__(self) -> None:
        checked_target(self.target)
        _check_range("strength", self.strength)


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """What happens between compression and the second stage, and what it learns from.

    Attributes:
        form: train the compressed network as `masked` dense or as `grouped` convolutions; `auto` is `masked` on a
            GPU and `grouped` on a CPU.
        ablation: the paper's Table 3: `finetune` keeps weights and orders, the others start with fresh weights and
            the learned (`from-scratch`) or other orders.
        recalibrate_bn: recompute the batch-norm statistics of the compressed network before it is evaluated and
            finetuned; of a slimmed one, for the evaluation only.
        teacher: folder of a finished dense run to distil from; `weights` for the network of `model.weights` as it is
            before the run; None for none. Where image folders show only some classes, both are compared on these.
        distill_weight: share of the teacher in the loss.
        distill_temperature: the higher, the softer are both predictions.
    """

    form: FinetuneForm = "auto"
    ablation: Ablation = "finetune"
    recalibrate_bn: bool = False
    teacher: str | None = None
    distill_weight: float = 0.5
    distill_temperature: float = 4.0

    def __post_init__(self) -> None:
        checked_fraction("distill_weight", self.distill_weight)
        _check_range("distill_temperature", self.distill_temperature, above=0)


@dataclass(frozen=True, kw_only=True)
class EngineRecipe:
    """How it is computed, by default in full precision, as in the paper.

    Attributes:
        device: `auto` is `cuda` where there is a GPU, else `cpu`.
        precision: `bf16` and `16` are mixed precision, with weights that stay in 32 bits; `16` needs a GPU.
        channels_last: keep the channels of images and weights side by side in memory.
        compile: torch.compile the network.
        cuda_graph: capture the whole step where that is possible: one GPU, data in its memory.
        solver_workers: processes that learn the channel orders; None for some on a GPU, none on a CPU.
    """

    device: Device = "auto"
    precision: Precision = "32"
    channels_last: bool = False
    compile: bool = False
    cuda_graph: bool = True
    solver_workers: int | None = None

    def __post_init__(self) -> None:
        if self.solver_workers is not None:
            checked_at_least("solver_workers", self.solver_workers, 0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run, with options for each of its parts.

    Attributes:
        name: what to call it; a YAML file that does not say has its own name.
        kind: `strucspars`; or a baseline, `dense` (second stage only) or `slimming`.
        seed: of everything random.
        data, model, sparsify, slimming, finetune, engine: the options of one part each.
        stage1: training with the penalty; without an epoch, trained weights are grouped unchanged, one-shot. Not used
            by a progressive schedule.
        stage2: finetuning; for a dense network or a progressive schedule, the whole training.

    >>> Recipe(name="mine", stage1=StageRecipe(epochs=20)).sparsify_config(steps_per_epoch=10).epochs
    20
    """

    name: str
    kind: Kind = "strucspars"
    seed: int = 0
    data: DataRecipe = DataRecipe()
    model: ModelRecipe = ModelRecipe()
    sparsify: SparsifyRecipe = SparsifyRecipe()
    slimming: SlimmingRecipe = SlimmingRecipe()
    stage1: StageRecipe = StageRecipe(epochs=100)
    finetune: FinetuneRecipe = FinetuneRecipe()
    stage2: StageRecipe = StageRecipe(epochs=160, weight_decay=1e-4, schedule="steps", lr_warmup=0.0625)
    engine: EngineRecipe = EngineRecipe()

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"name must not be empty, got {self.name!r}")
        checked_seed("seed", self.seed)
        checked_at_least("stage2.epochs", self.stage2.epochs, 1)
        self._check_kind()
        self._check_first_stage()
        if self.kind == "strucspars":
            _ = self.sparsify_config(steps_per_epoch=1)  # checks the rest

    @property
    def is_progressive(self) -> bool:
        """Whether the method runs in one stage, the second."""
        return self.kind == "strucspars" and self.sparsify.schedule == "progressive"

    def sparsify_config(self, *, steps_per_epoch: int) -> SparsifyConfig:
        """The method's options for a data set of so many steps."""
        stage = self.stage2 if self.is_progressive else self.stage1
        epochs = max(stage.epochs, 1)  # one-shot runs have none
        return self.sparsify.config(epochs=epochs, steps_per_epoch=steps_per_epoch, lr=stage.lr, seed=self.seed)

    def _check_kind(self) -> None:
        if self.kind != "strucspars" and self.finetune.ablation != "finetune":
            raise ValueError(f"finetune.ablation {self.finetune.ablation!r} needs kind strucspars, got {self.kind!r}")
        if self.kind == "dense" and self.finetune.recalibrate_bn:
            raise ValueError("finetune.recalibrate_bn needs a compressed network, but kind is dense")
        if self.kind != "strucspars" and self.sparsify.from_run is not None:
            raise ValueError(f"sparsify.from_run needs kind strucspars, got {self.kind!r}")
        if self.sparsify.narrow != "none":
            raise ValueError(
                f"sparsify.narrow {self.sparsify.narrow!r}: the networks of runs keep all channels; choose what goes "
                "with strucspars compress without epochs, or with one_shot_plan in a training of your own"
            )
        if self.is_progressive:
            self._check_progressive()
        learns = self.sparsify.decide_by > 0 if self.is_progressive else self.stage1.epochs > 0
        is_read = self.sparsify.importance != DEFAULT_IMPORTANCE or not learns
        if self.sparsify.calibration and (self.kind != "strucspars" or self.sparsify.from_run or not is_read):
            raise ValueError(
                f"sparsify.calibration {self.sparsify.calibration} takes the place of the first stage of kind "
                "strucspars, or is read by an importance in sparse training; set stage1.epochs=0 or "
                "sparsify.importance=activation, and leave sparsify.from_run out"
            )

    def _check_progressive(self) -> None:
        """Refuse what only means something between two stages."""
        refused = {
            "sparsify.from_run": self.sparsify.from_run is not None,
            "finetune.ablation": self.finetune.ablation != "finetune",
            "finetune.form": self.finetune.form == "grouped",
            "finetune.recalibrate_bn": self.finetune.recalibrate_bn,
        }
        if given := [key for key, is_given in refused.items() if is_given]:
            raise ValueError(
                f"{', '.join(given)}: a progressive schedule has one stage, and its network is dense to the end; "
                "leave that out, or set sparsify.schedule=two-stage"
            )
        if self.sparsify.decide_by > 0 and self.stage2.optimizer != "sgd":
            raise ValueError(
                f"stage2.optimizer {self.stage2.optimizer!r} does not follow the strength of the penalty, by which a "
                "progressive schedule learns what to remove; use sgd, or decide about trained weights at once with "
                "sparsify.decide_by=0"
            )
        if self.sparsify.decide_by == 0 and self.model.weights is None:
            raise ValueError(
                "sparsify.decide_by 0 decides from the weights that the run starts with, but they are fresh; name "
                "trained ones with model.weights, or leave time for the decision"
            )

    def _check_first_stage(self) -> None:
        if self.is_progressive:
            return
        if self.stage1.epochs:
            if self.kind != "dense" and self.stage1.optimizer != "sgd":
                raise ValueError(
                    f"stage1.optimizer must be sgd, got {self.stage1.optimizer!r}: its steps do not follow the "
                    "strength of the penalty; choose it for stage2.optimizer"
                )
            return
        if self.kind == "slimming":
            raise ValueError("stage1.epochs must be at least 1 with kind slimming, got 0: scales fall in training only")
        if self.kind == "strucspars" and self.model.weights is None and self.sparsify.from_run is None:
            raise ValueError(
                "stage1.epochs 0 groups the weights without training, but they are fresh; name trained ones with "
                "model.weights, or train at least one epoch"
            )


SPARSIFY = "sparsify"
SLIM = "slim"
COMPRESS = "compress"
FINETUNE = "finetune"
TRAIN = "train"


def last_stage(recipe: Recipe) -> str:
    """The stage that ends in the saved network."""
    return TRAIN if recipe.kind == "dense" or recipe.is_progressive else FINETUNE


def learning_stage(recipe: Recipe) -> str:
    """The stage in which channel orders are learned."""
    return TRAIN if recipe.is_progressive else SPARSIFY


def stage_epochs(recipe: Recipe, stage: str) -> int:
    """Epochs of a stage in which something is trained."""
    return recipe.stage2.epochs if stage in (FINETUNE, TRAIN) else recipe.stage1.epochs
