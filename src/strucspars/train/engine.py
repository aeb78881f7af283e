"""Devices, precision and processes of a run, by Lightning Fabric."""

import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import Strategy
from torch import nn
from torch.func import functional_call

from strucspars.nn.layers import DENSE_AND_GROUPED_TYPES
from strucspars.train.recipe import EngineRecipe, Precision

FABRIC_PRECISION: dict[Precision, Literal["32-true", "bf16-mixed", "16-mixed"]] = {
    "32": "32-true",
    "bf16": "bf16-mixed",
    "16": "16-mixed",
}

# What Fabric's own environment reads.
MEETING_PLACE = {"MASTER_ADDR", "MASTER_PORT"}
PLACE_AMONG_OTHERS = {"LOCAL_RANK", "GROUP_RANK", "NODE_RANK"}

# In mixed precision Fabric insists on beginning every backward pass, and notes for all threads at once whether it has.
BACKWARD_LOCK = threading.Lock()

DEAD_READER = re.compile(r"DataLoader worker \(pid.*?\) (?:is )?(killed by signal: \w+|exited unexpectedly)")
LOST_CONNECTION = re.compile("gloo|NCCL|TCPStore|Connection|Broken pipe")

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Fabric announces its precision, recommends another one, and asks for srun on machines that merely have it."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("fabric", "pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*srun.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def is_one_of_several_processes() -> bool:
    """Whether torchrun has started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


@contextmanager
def lost_processes_explained() -> Iterator[None]:
    """Raise one clear error where torch reports in its own words that a process of this run has died.

    Raises:
        ChildProcessError: a process that reads images was killed.
        ConnectionError: another process that torchrun has started has ended.
    """
    try:
        yield
    except RuntimeError as error:
        reader = DEAD_READER.search(str(error))
        if reader is not None:
            raise ChildProcessError(
                f"a process that reads images has died ({reader[1]}), perhaps for lack of memory; the same command "
                "goes on from the last checkpoint, and a smaller data.workers needs less memory"
            ) from error
        if is_one_of_several_processes() and LOST_CONNECTION.search(str(error)):
            raise ConnectionError(
                "another process of this run has ended; its own output says why, unless it was killed; start all of "
                "them again with the same command to go on from the last checkpoint"
            ) from error
        raise


def _check_others_are_started(strategy: Strategy, processes: int) -> None:
    """Refuse a `WORLD_SIZE` that was left in a shell: the others would be waited for, and nothing would end that."""
    assert isinstance(strategy, ParallelStrategy), "several processes have a strategy for several"
    # Fabric's own environment is what it takes where it sees neither torchrun nor SLURM nor MPI.
    if not isinstance(strategy.cluster_environment, LightningEnvironment):
        return
    names = os.environ.keys()
    # Without torchrun, too, processes can be told where to meet and which of them they are.
    if not (names >= MEETING_PLACE and names & PLACE_AMONG_OTHERS):
        raise ValueError(
            f"WORLD_SIZE is {processes}, but this process was not started with others, for which it would wait for "
            "ever; start all with torchrun, or unset WORLD_SIZE to compute in one process"
        )


class Engine:
    """Where and how a run computes: one process, or one of many that torchrun has started."""

    def __init__(self, recipe: EngineRecipe) -> None:
        self.recipe = recipe
        has_gpu = torch.cuda.is_available()
        if recipe.device == "cuda" and not has_gpu:
            raise ValueError("engine.device is cuda, but PyTorch sees no GPU here; use engine.device=auto or cpu")
        on_gpu = has_gpu and recipe.device != "cpu"
        if recipe.precision == "16" and not on_gpu:
            raise ValueError("engine.precision 16 needs a GPU; use bf16 or 32 on a CPU")
        # Shapes never change within a run, so it pays to look for the fastest algorithms once.
        torch.backends.cudnn.benchmark = on_gpu
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        processes = int(os.environ.get("WORLD_SIZE", 1))
        with _without_remarks():
            self._fabric = Fabric(
                accelerator="cuda" if on_gpu else "cpu",
                devices=local_processes,
                num_nodes=processes // local_processes,
                strategy="ddp" if processes > 1 else "auto",
                precision=FABRIC_PRECISION[recipe.precision],
                # Alone, it is no part of what SLURM or MPI count: they may have started a script that runs several.
                plugins=None if processes > 1 else LightningEnvironment(),
            )
            if processes > 1:
                _check_others_are_started(self._fabric.strategy, processes)
            self._fabric.launch()

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._fabric.device

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._fabric.global_rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._fabric.world_size

    @property
    def is_first(self) -> bool:
        """Whether this process writes files."""
        return self._fabric.is_global_zero

    @property
    def memory_format(self) -> torch.memory_format:
        """Layout of images and weights."""
        return torch.channels_last if self.recipe.channels_last else torch.contiguous_format

    @property
    def captures_graphs(self) -> bool:
        """Whether whole steps may run as CUDA graphs: one process on a GPU, without a gradient scaler."""
        return (
            self.recipe.cuda_graph
            and self.device.type == "cuda"
            and self.world_size == 1
            and self.recipe.precision != "16"
        )

    @property
    def casts_at_once(self) -> bool:
        """Whether all weights are cast to half precision together: where kernels are what a step consists of."""
        return self.captures_graphs and self.recipe.precision == "bf16"

    def placed(self, model: Model) -> Model:
        """The model on this device, in the layout of the recipe."""
        # `to` changes modules in place and returns them.
        model.to(self.device)
        model.to(memory_format=self.memory_format)
        return model

    def trainable(self, model: nn.Module) -> nn.Module:
        """The model as the training step calls it: compiled, in mixed precision, in step with other processes."""
        if self.recipe.compile:
            model = cast(nn.Module, torch.compile(model))
        return self._fabric.setup_module(model, move_to_device=False)

    def with_precision(self) -> AbstractContextManager[Any]:
        """Mixed precision for forward passes that are not trained."""
        return self._fabric.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the loss, scaled where the precision needs it."""
        with nullcontext() if self.recipe.precision == "32" else BACKWARD_LOCK:
            self._fabric.backward(loss)

    def prepared(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer as the precision needs it."""
        return self._fabric.setup_optimizers(optimizer)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring gradients to their true scale before something is added to them."""
        self._fabric.strategy.precision.unscale_gradients(optimizer)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return cast(torch.Tensor, self._fabric.all_reduce(values, reduce_op="sum"))

    def any_true(self, value: bool) -> bool:
        """Whether it is true on any process."""
        return bool(self.summed(torch.tensor(float(value), device=self.device)) > 0)

    def shared(self, value: Any) -> Any:
        """What the first process holds, on all of them."""
        return self._fabric.broadcast(value)

    def share_buffers_(self, model: nn.Module) -> None:
        """Give all processes the first one's buffers: batch-norm statistics are local until then."""
        if self.world_size > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all processes."""
        return self.summed(values) / self.world_size

    def precision_state(self) -> dict[str, Any]:
        """What the precision remembers from step to step: the scale of the gradients, if they have one."""
        return dict(self._fabric.strategy.precision.state_dict())

    def load_precision_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._fabric.strategy.precision.load_state_dict(state)

    def wait(self) -> None:
        """Wait for all processes."""
        self._fabric.barrier()


class CastAtOnce(nn.Module):
    """A model whose convolutions and linear layers compute with half-precision copies of their parameters.

    Everything else stays as autocast has it, batch norms in full precision above all. The copies are refreshed before
    every forward pass; after the backward pass `collect_gradients_` brings their gradients to the parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        named = {
            parameter: f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            # Exactly these: a subclass may compute something with its weight first, and that in full precision.
            if type(module) in DENSE_AND_GROUPED_TYPES
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        # A shared parameter has one of its names here, and takes effect under all of them.
        self._names = list(named.values())
        self._parameters_in_full: list[torch.Tensor] = list(named)
        self._copies: list[torch.Tensor] = [
            parameter.detach().to(dtype).requires_grad_() for parameter in self._parameters_in_full
        ]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The model's forward pass, with its parameters as they are now."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._parameters_in_full)
        for copy in self._copies:
            copy.grad = None
        scores: torch.Tensor = functional_call(self.model, dict(zip(self._names, self._copies, strict=True)), images)
        return scores

    @torch.no_grad()
    def collect_gradients_(self) -> None:
        """Give the parameters the gradients of their copies, in full precision."""
        used = [pair for pair in zip(self._parameters_in_full, self._copies, strict=True) if pair[1].grad is not None]
        for parameter, _ in used:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if used:
            gradients = [parameter.grad for parameter, _ in used if parameter.grad is not None]
            torch._foreach_copy_(gradients, [copy.grad for _, copy in used if copy.grad is not None])
