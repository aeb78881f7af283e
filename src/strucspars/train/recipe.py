"""What a run does, as plain options. The defaults are the paper's CIFAR-10 protocol, on the embedded digits."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from strucspars.core.budget import Budget
from strucspars.core.checks import checked_at_least, checked_fraction
from strucspars.core.importance import Norm
from strucspars.core.learning import Method
from strucspars.nn.groupable import LayerRules, layer_types_named
from strucspars.sparsify.config import SparsifyConfig

Schedule = Literal["constant", "steps", "cosine"]
Precision = Literal["32", "bf16", "16"]
Form = Literal["auto", "masked", "grouped"]
Ablation = Literal["finetune", "from-scratch", "shufflenet", "random", "no-shuffle"]
Kind = Literal["strucspars", "dense", "slimming"]
Protocol = Literal["original", "paper-text"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Which images.

    Attributes:
        name: `digits` (embedded), `cifar10`, `cifar100`, `imagenet` or `folder`.
        root: folder that holds them; not needed for the digits.
        download: fetch CIFAR where it is missing.
        batch_size: images per step, over all processes together; at most as many as there are to learn from.
        image_size: side of the crops of image folders.
        workers: processes that read image folders; None for one per core, but no more than four.
    """

    name: str = "digits"
    root: str | None = None
    download: bool = False
    batch_size: int = 64
    image_size: int = 224
    workers: int | None = None

    def __post_init__(self) -> None:
        # Batch norm needs two images to have a variance.
        checked_at_least("data.batch_size", self.batch_size, 2)
        checked_at_least("data.image_size", self.image_size, 8)
        if self.workers is not None:
            checked_at_least("data.workers", self.workers, 0)


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """Which network.

    Attributes:
        name: `preact-resnet20` (any depth 9 n + 2), `cifar-resnet56` (6 n + 2), a torchvision name, `timm:NAME`, or
            `package.module:function`, which is called with `num_classes`.
        weights: where training starts: a torchvision weights name such as `DEFAULT`, or a checkpoint file;
            None for fresh weights.
    """

    name: str = "preact-resnet20"
    weights: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageRecipe:
    """One stage of training with SGD.

    Attributes:
        epochs: how long; 0 for a first stage that takes the weights as they are.
        lr: learning rate, at its highest.
        momentum: of SGD.
        weight_decay: of all parameters.
        schedule: `constant`; `steps`, which divides the rate by 10 at 50 % and 75 % of the epochs; or `cosine`.
        lr_warmup_epochs: epochs over which the rate rises linearly.
        label_smoothing: share of the label's weight that all classes share.
        ema: decay per step of an averaged copy of the weights, which is then evaluated and kept; None for none.
    """

    epochs: int
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    lr_warmup_epochs: int = 0
    label_smoothing: float = 0.0
    ema: float | None = None

    def __post_init__(self) -> None:
        checked_at_least("epochs", self.epochs, 0)
        _check_choice("schedule", self.schedule, Schedule)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, got {self.lr!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and not negative, got {self.weight_decay!r}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing!r}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must lie between 0 and 1, got {self.ema!r}; leave it out for none")
        # Without an epoch nothing is trained, and so nothing warmed up.
        if checked_at_least("lr_warmup_epochs", self.lr_warmup_epochs, 0) >= self.epochs > 0:
            raise ValueError(
                f"lr_warmup_epochs must be fewer than the {self.epochs} epochs, got {self.lr_warmup_epochs}"
            )


@dataclass(frozen=True, kw_only=True)
class SparsifyRecipe:
    """The method's own options, for kind `strucspars`.

    Attributes:
        target, budget, min_kept_norm, decay, norm, lambda_step, lambda_warmup_epochs, min_channels_per_group:
            as in `SparsifyConfig`.
        solver: how the channel orders are found: `fast`, better and faster than the others; `paper`, the paper's
            alternation; or `paper-pot`, the same by the package POT, as in the authors' code.
        include: only layers whose name matches one of these patterns, such as `layer1.*`, may be grouped.
        exclude: no layer whose name matches one of these patterns is grouped.
        layer_types: types of layers that may be grouped: `Conv2d`, `Conv1d`, `Conv3d`, `Linear`.
        from_run: folder of a run whose finished first stage is taken over instead of training one.
    """

    target: float = 0.5
    budget: Budget = "params"
    min_kept_norm: float = 0.9
    decay: float = 0.5
    norm: Norm = "l1"
    lambda_step: float | None = None
    lambda_warmup_epochs: int = 10
    min_channels_per_group: int = 1
    solver: Method = "fast"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    layer_types: tuple[str, ...] = ("Conv2d",)
    from_run: str | None = None

    def __post_init__(self) -> None:
        _check_choice("sparsify.solver", self.solver, Method)
        for key in ("include", "exclude", "layer_types"):
            # A text is a sequence too: its letters would be the patterns.
            if not isinstance(getattr(self, key), tuple):
                raise ValueError(f"sparsify.{key} must be a tuple of texts, got {getattr(self, key)!r}")
        warmup_epochs = checked_at_least("sparsify.lambda_warmup_epochs", self.lambda_warmup_epochs, 0)
        # Checks the rest. Whether the warm-up fits into the first stage only the whole recipe knows.
        _ = self.rules()
        _ = self.config(stage1=StageRecipe(epochs=warmup_epochs + 2), steps_per_epoch=1, seed=0)

    def rules(self) -> LayerRules:
        """Which layers may be grouped; errors name the recipe's key."""
        try:
            return LayerRules(
                include=self.include,
                exclude=self.exclude,
                layer_types=layer_types_named(self.layer_types),
                min_channels_per_group=self.min_channels_per_group,
            )
        except ValueError as error:
            raise ValueError(f"sparsify.{error}") from error

    def config(self, *, stage1: StageRecipe, steps_per_epoch: int, seed: int) -> SparsifyConfig:
        """The method's options in a first stage of so many steps per epoch; errors name the recipe's key."""
        try:
            return SparsifyConfig(
                target=self.target,
                epochs=max(stage1.epochs, 1),
                budget=self.budget,
                min_kept_norm=self.min_kept_norm,
                decay=self.decay,
                norm=self.norm,
                lambda_step=self.lambda_step,
                steps_per_epoch=steps_per_epoch,
                lr=stage1.lr,
                # Without an epoch nothing is penalised: the weights are grouped as they are.
                lambda_warmup_epochs=self.lambda_warmup_epochs if stage1.epochs else 0,
                min_channels_per_group=self.min_channels_per_group,
                method=self.solver,
                seed=seed,
            )
        except ValueError as error:
            raise ValueError(f"sparsify.{error}") from error


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
        if checked_fraction("slimming.target", self.target) == 1:
            raise ValueError(f"slimming.target must lie in [0, 1), got {self.target!r}: nothing would be left")
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"slimming.strength must be finite and not negative, got {self.strength!r}")


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """What happens between compression and the second stage, and what it learns from.

    Attributes:
        form: train the compressed network as `masked` dense or as `grouped` convolutions; `auto` measures which is
            faster, once.
        ablation: the paper's Table 3: `finetune` keeps weights and orders, the others start with fresh weights and
            the learned (`from-scratch`) or other orders.
        recalibrate_bn: recompute the batch-norm statistics of the compressed network before it is evaluated and
            finetuned; of a slimmed one, for the evaluation only.
        teacher: folder of a finished dense run to distil from; None for none.
        distill_weight: share of the teacher in the loss.
        distill_temperature: the higher, the softer are both predictions.
    """

    form: Form = "auto"
    ablation: Ablation = "finetune"
    recalibrate_bn: bool = False
    teacher: str | None = None
    distill_weight: float = 0.5
    distill_temperature: float = 4.0

    def __post_init__(self) -> None:
        _check_choice("finetune.form", self.form, Form)
        _check_choice("finetune.ablation", self.ablation, Ablation)
        checked_fraction("finetune.distill_weight", self.distill_weight)
        if not 0 < self.distill_temperature < math.inf:
            raise ValueError(
                f"finetune.distill_temperature must be above 0 and finite, got {self.distill_temperature!r}"
            )


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
        _check_choice("engine.device", self.device, Device)
        _check_choice("engine.precision", self.precision, Precision)
        if self.solver_workers is not None:
            checked_at_least("engine.solver_workers", self.solver_workers, 0)


def _first_stage() -> StageRecipe:
    return StageRecipe(epochs=100)


def _second_stage() -> StageRecipe:
    return StageRecipe(epochs=160, weight_decay=1e-4, schedule="steps", lr_warmup_epochs=10)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run, with options for each of its parts.

    Attributes:
        name: what to call it; a YAML file that does not say has its own name.
        kind: `strucspars`; or a baseline, `dense` (second stage only) or `slimming`.
        seed: of everything random.
        protocol: `original` has the two warm-ups that the authors' code has, `paper-text` has none.
        data, model, sparsify, slimming, finetune, engine: the options of one part each.
        stage1: training with the penalty; without an epoch, trained weights are grouped as they are, one-shot.
        stage2: finetuning; for a dense network, its training.

    >>> Recipe(name="mine", stage1=StageRecipe(epochs=20)).sparsify_config(steps_per_epoch=10).epochs
    20
    """

    name: str
    kind: Kind = "strucspars"
    seed: int = 0
    protocol: Protocol = "original"
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    sparsify: SparsifyRecipe = field(default_factory=SparsifyRecipe)
    slimming: SlimmingRecipe = field(default_factory=SlimmingRecipe)
    stage1: StageRecipe = field(default_factory=_first_stage)
    finetune: FinetuneRecipe = field(default_factory=FinetuneRecipe)
    stage2: StageRecipe = field(default_factory=_second_stage)
    engine: EngineRecipe = field(default_factory=EngineRecipe)

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"name must not be empty, got {self.name!r}")
        _check_choice("kind", self.kind, Kind)
        _check_choice("protocol", self.protocol, Protocol)
        checked_at_least("seed", self.seed, 0)
        checked_at_least("stage2.epochs", self.stage2.epochs, 1)
        self._check_protocol()
        self._check_kind()
        self._check_first_stage()
        if self.kind == "strucspars":
            _ = self.sparsify_config(steps_per_epoch=1)  # checks the rest

    def sparsify_config(self, *, steps_per_epoch: int) -> SparsifyConfig:
        """The method's options for a data set of so many steps."""
        return self.sparsify.config(stage1=self.stage1, steps_per_epoch=steps_per_epoch, seed=self.seed)

    def _check_protocol(self) -> None:
        if self.protocol == "paper-text":
            for key, epochs in (
                ("sparsify.lambda_warmup_epochs", self.sparsify.lambda_warmup_epochs),
                ("stage2.lr_warmup_epochs", self.stage2.lr_warmup_epochs),
            ):
                if epochs:
                    raise ValueError(f"protocol paper-text has no warm-ups, but {key} is {epochs}; set it to 0")

    def _check_kind(self) -> None:
        if self.kind != "strucspars" and self.finetune.ablation != "finetune":
            raise ValueError(f"finetune.ablation {self.finetune.ablation!r} needs kind strucspars, got {self.kind!r}")
        if self.kind == "dense" and self.finetune.recalibrate_bn:
            raise ValueError("finetune.recalibrate_bn needs a network that is compressed, but kind is dense")
        if self.kind != "strucspars" and self.sparsify.from_run is not None:
            raise ValueError(f"sparsify.from_run needs kind strucspars, got {self.kind!r}")

    def _check_first_stage(self) -> None:
        if self.stage1.epochs:
            return
        if self.kind == "slimming":
            raise ValueError("stage1.epochs must be at least 1 with kind slimming, got 0: scales fall in training only")
        if self.kind == "strucspars" and self.model.weights is None and self.sparsify.from_run is None:
            raise ValueError(
                "stage1.epochs 0 groups the weights as they are, but they are fresh; name trained ones with "
                "model.weights, or train at least one epoch"
            )


def _check_choice(key: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{key} must be one of {', '.join(get_args(choices))}, got {value!r}")


SPARSIFY = "sparsify"
SLIM = "slim"
COMPRESS = "compress"
FINETUNE = "finetune"
TRAIN = "train"
STAGES = (SPARSIFY, SLIM, COMPRESS, FINETUNE, TRAIN)

# By kind of run; a dense network has the second stage alone.
FIRST_STAGES: dict[Kind, str] = {"strucspars": SPARSIFY, "slimming": SLIM}


def stage_epochs(recipe: Recipe, stage: str) -> int:
    """Epochs of a stage in which something is trained.

    >>> stage_epochs(Recipe(name="mine"), FINETUNE)
    160
    """
    return recipe.stage2.epochs if stage in (FINETUNE, TRAIN) else recipe.stage1.epochs
