import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import strucspars as ss
from strucspars.integrations.lightning import SparsifyCallback

pytestmark = [
    # Lightning 2.6 uses a class that torch deprecates; neither is ours.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # Advice for real training: workers for the data, a shuffled loader, an empty checkpoint folder.
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    # A resumed fit need not write checkpoints itself.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
]

EPOCHS, BATCHES = 5, 4
CONFIG = ss.SparsifyConfig(target=0.4, epochs=EPOCHS, controller="paper", lambda_step=1e-2, lambda_warmup=1 / EPOCHS)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 16, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def optimizer_of(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


class Classifier(LightningModule):
    """What a user has: nothing in it knows of sparsity."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = network(seed)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8 * BATCHES, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(4, (len(images),), generator=generator))


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(examples(), batch_size=8)


class ResumableBatches:
    """In another order every epoch; checkpoints know where it is, and a resumed fit goes on from there."""

    def __init__(self) -> None:
        self.epoch, self.given = 0, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        if self.given == BATCHES:  # not at the epoch's end: Lightning asks for no batch after the last
            self.epoch, self.given = self.epoch + 1, 0
        tensors = examples().tensors
        order = torch.randperm(8 * BATCHES, generator=torch.Generator().manual_seed(self.epoch)).view(BATCHES, 8)
        while self.given < BATCHES:
            self.given += 1
            yield [tensor[order[self.given - 1]] for tensor in tensors]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


def fit(
    module: LightningModule,
    callback: SparsifyCallback,
    *others: ModelCheckpoint,
    validate: bool = False,
    resumable: bool = False,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Trainer:
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback, *others],
        enable_checkpointing=bool(others),
        **({"max_epochs": EPOCHS} | silent | options),
    )
    data = ResumableBatches() if resumable else batches()
    trainer.fit(module, data, batches() if validate else None, ckpt_path=ckpt_path, weights_only=True)
    return trainer


def plain_loop(*, accumulate: int = 1, clip: float | None = None) -> tuple[nn.Module, ss.Sparsifier]:
    """The reference: what a careful user would write by hand."""
    model = network()
    optimizer = optimizer_of(model)
    sparsifier = ss.Sparsifier(model, CONFIG).attach(optimizer)
    for _ in range(EPOCHS):
        for index, (images, labels) in enumerate(batches()):
            torch.autograd.backward(functional.cross_entropy(model(images), labels) / accumulate)
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        sparsifier.end_epoch()
    return model, sparsifier


def assert_same_outcome(
    module: Classifier, callback: SparsifyCallback, model: nn.Module, plan: ss.GroupingPlan
) -> None:
    torch.testing.assert_close(module.net.state_dict(), model.state_dict(), rtol=0, atol=0)
    ours, theirs = list(callback.plan.layers.values()), list(plan.layers.values())
    assert ours == theirs


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ({}, {}),
        ({"accumulate": 2}, {"accumulate_grad_batches": 2}),
        ({"clip": 0.5}, {"gradient_clip_val": 0.5}),
    ],
    ids=["plain", "accumulation", "clipping"],
)
def test_the_callback_trains_as_a_loop_written_by_hand(loop: dict[str, Any], options: dict[str, Any]) -> None:
    model, sparsifier = plain_loop(**loop)
    module, callback = Classifier(), SparsifyCallback(CONFIG)
    fit(module, callback, **options)
    assert callback.sparsifier.lambda_value == sparsifier.lambda_value > 0
    assert_same_outcome(module, callback, model, sparsifier.plan())


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_gradient_scaler_the_penalty_joins_unscaled_gradients(fused: bool) -> None:
    class Stepped(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, fused=fused)

    strong = replace(CONFIG, lambda_step=0.1)
    scaled, plain, free = Stepped(), Stepped(), Stepped()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    fit(scaled, SparsifyCallback(strong), plugins=[plugin], max_epochs=3)
    fit(plain, SparsifyCallback(strong), max_epochs=3)
    fit(free, SparsifyCallback(CONFIG), max_epochs=3)
    ours, theirs, unpenalised = (module.get_parameter("net.5.weight") for module in (scaled, plain, free))
    # Half precision differs a little; a forgotten factor of 1024, or none of the penalty, would differ a lot.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    assert (theirs - unpenalised).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("checkpoints", "validate"),
    [
        ({"every_n_epochs": 1}, False),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, True),
        ({"every_n_train_steps": 3}, False),
        ({"every_n_train_steps": BATCHES}, False),
        ({"every_n_train_steps": BATCHES}, True),
    ],
    ids=[
        "at the epoch's end",
        "in validation",
        "within an epoch",
        "at the last step",
        "at the last step before validation",
    ],
)
def test_a_resumed_fit_continues_exactly(checkpoints: dict[str, Any], validate: bool, tmp_path: Path) -> None:
    module, callback = Classifier(), SparsifyCallback(CONFIG)
    # A loader without a state starts its epoch again when a fit is resumed within it.
    data: dict[str, Any] = {"validate": validate, "resumable": "every_n_train_steps" in checkpoints}
    fit(module, callback, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **checkpoints), **data)
    files = sorted(tmp_path.glob("*.ckpt"), key=lambda file: int(file.stem.removeprefix("step=")))
    assert len(files) >= EPOCHS
    for file in (files[0], files[len(files) // 2], files[-1]):
        resumed, continued = Classifier(seed=9), SparsifyCallback(CONFIG)
        fit(resumed, continued, **data, ckpt_path=file)
        assert continued.sparsifier.state_dict()["controller"] == callback.sparsifier.state_dict()["controller"]
        assert_same_outcome(resumed, continued, module.net, callback.plan)


def test_a_checkpoint_of_other_options_is_refused(tmp_path: Path) -> None:
    fit(Classifier(), SparsifyCallback(CONFIG), ModelCheckpoint(tmp_path, "one"), max_epochs=1)
    with pytest.raises(ValueError, match="other options: target"):
        fit(Classifier(), SparsifyCallback(replace(CONFIG, target=0.3)), ckpt_path=tmp_path / "one.ckpt")


def test_every_fit_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    callback = SparsifyCallback(CONFIG)
    module = Classifier()
    trainer = fit(module, callback, ModelCheckpoint(tmp_path, "last"))
    trainer.test(module, batches(), ckpt_path=tmp_path / "last.ckpt", verbose=False, weights_only=True)
    again = Classifier()
    fit(again, callback)
    assert_same_outcome(again, callback, module.net, callback.plan)


@pytest.mark.parametrize("finder_first", [True, False])
def test_a_fit_that_begins_with_a_search_for_its_learning_rate_starts_anew_too(
    finder_first: bool, tmp_path: Path
) -> None:
    class Tunable(Classifier):
        lr = 0.05

    callback, finder = SparsifyCallback(CONFIG), LearningRateFinder(num_training_steps=2)
    for _ in range(2):
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=EPOCHS,
            callbacks=[finder, callback] if finder_first else [callback, finder],
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Tunable(), batches())
        assert callback.sparsifier.state_dict()["controller"]["epoch"] == EPOCHS


def test_a_converted_module_is_smaller_and_keeps_working(tmp_path: Path) -> None:
    module, callback = Classifier(), SparsifyCallback(CONFIG, convert=True)
    dense = sum(parameter.numel() for parameter in module.parameters())
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    trainer = fit(module, callback, checkpoint)
    assert sum(parameter.numel() for parameter in module.parameters()) <= (1 - CONFIG.target) * dense
    assert isinstance(module.net[2], ss.ShuffledGroupConv2d)
    (metrics,) = trainer.test(module, batches(), verbose=False)
    assert metrics["test_loss"] > 0

    reference = Classifier()
    state = torch.load(checkpoint.last_model_path, weights_only=True)["state_dict"]
    reference.load_state_dict(state)  # checkpoints stay dense
    ss.mask_(reference, callback.plan)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(module.eval()(images), reference.eval()(images))

    before = module.net[2].weight.detach().clone()
    finetuning = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    finetuning.fit(module, batches())
    assert not torch.equal(module.net[2].weight, before)
    ss.save(module.net, tmp_path / "small.safetensors")
    loaded = ss.load(tmp_path / "small.safetensors", network(seed=5)).eval()
    torch.testing.assert_close(loaded(images), module.eval()(images))


def test_lambda_and_the_removed_fraction_are_logged_every_epoch() -> None:
    seen: list[dict[str, float]] = []

    class Watched(Classifier):
        def on_train_epoch_start(self) -> None:
            seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    callback = SparsifyCallback(replace(CONFIG, controller="paper", lambda_step=1e-3))
    trainer = fit(Watched(), callback)
    assert set(trainer.callback_metrics) == {"sparsify/lambda_value", "sparsify/removed_fraction"}
    assert [epoch.get("sparsify/lambda_value") for epoch in seen] == [
        None,
        0.0,
        *map(pytest.approx, (1e-3, 2e-3, 3e-3)),
    ]
    assert float(trainer.callback_metrics["sparsify/lambda_value"]) == pytest.approx(callback.sparsifier.lambda_value)


class TwoOptimizers(Classifier):
    """Manual optimization: the convolutions and the head each have their own optimizer, and both step."""

    def __init__(self, split: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.split = split

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(functional.cross_entropy(self(batch[0]), batch[1]))
        for optimizer in self.optimizers():  # type: ignore[union-attr]  # a list: there are two
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [optimizer_of(self.net[: self.split]), optimizer_of(self.net[self.split :])]


@pytest.mark.parametrize("split", [4, 6])
def test_layers_of_one_or_two_optimizers_take_the_penalty_once(split: int) -> None:
    model, sparsifier = plain_loop()
    module, callback = TwoOptimizers(split), SparsifyCallback(CONFIG)
    fit(module, callback)
    assert_same_outcome(module, callback, model, sparsifier.plan())


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # by Lightning, once per process
def test_a_skipped_step_is_not_made_by_the_penalty() -> None:
    class Skipping(Classifier):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
            return super().training_step(batch, batch_idx) if self.current_epoch < 2 else None

    class At(SparsifyCallback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 2:
                self.weight = pl_module.get_parameter("net.5.weight").detach().clone()

    module, callback = Skipping(), At(CONFIG)
    fit(module, callback)
    assert callback.sparsifier.lambda_value > 0
    assert torch.equal(module.get_parameter("net.5.weight"), callback.weight)


def test_steps_that_reach_no_layer_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class OwnSteps(Classifier):
        automatic_optimization = False

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.step()  # type: ignore[union-attr]  # one optimizer

    fit(OwnSteps(), SparsifyCallback(CONFIG))
    assert caplog.text.count("no optimizer step of epoch 1 reached the layers to sparsify") == 1


def test_another_schedule_than_the_trainers_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    fit(Classifier(), SparsifyCallback(CONFIG), max_epochs=1)
    assert "planned for 5 epochs but the Trainer has max_epochs=1" in caplog.text


def test_a_target_out_of_reach_fails_before_training() -> None:
    class Untrained(Classifier):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
            raise AssertionError("the training has begun")

    with pytest.raises(ValueError, match=r"target 0\.95 cannot be reached"):
        fit(Untrained(), SparsifyCallback(replace(CONFIG, target=0.95)))


def test_macs_are_counted_on_the_given_inputs() -> None:
    inputs = torch.zeros(1, 3, 8, 8)
    callback = SparsifyCallback(replace(CONFIG, budget="macs"), example_inputs=inputs, convert=True)
    module = Classifier()
    fit(module, callback)
    dense = ss.count_macs(network(), inputs).macs
    assert ss.count_macs(module, inputs).macs <= (1 - CONFIG.target) * dense


@pytest.mark.parametrize(
    ("strategy", "complaint"), [("ddp_spawn", "take the plan with them"), ("ddp_notebook", "take the plan with them")]
)
def test_processes_that_cannot_hand_back_a_plan_are_refused(strategy: str, complaint: str) -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    with pytest.raises(ValueError, match=complaint):
        SparsifyCallback(CONFIG).setup(trainer, Classifier(), "fit")


def test_two_ranks_end_with_the_same_plan_and_weights(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "lightning_ranks.py"), str(tmp_path)]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert finished.returncode == 0, finished.stderr
    assert "sync_dist" not in finished.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["plan"] == second["plan"]
    assert first["lambda"] == second["lambda"] > 0
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)


def test_plan_and_sparsifier_say_when_they_come() -> None:
    callback = SparsifyCallback(CONFIG)
    with pytest.raises(RuntimeError, match=r"made when trainer\.fit\(\.\.\.\) ends"):
        _ = callback.plan
    with pytest.raises(RuntimeError, match=r"made when trainer\.fit\(\.\.\.\) starts"):
        _ = callback.sparsifier


def test_a_progressive_fit_ends_in_the_network_that_was_trained() -> None:
    module, callback = (
        Classifier(),
        SparsifyCallback(replace(CONFIG, controller="auto", lambda_step=None, schedule="progressive")),
    )
    fit(module, callback)
    images = examples()[:][0]
    trained = module(images)
    ss.convert_(module, callback.plan)
    torch.testing.assert_close(module(images), trained)
    assert callback.plan == callback.sparsifier.decided_plan
