"""Devices, precision and processes of a run, by Lightning Fabric."""

import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar, cast, final

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.strategies.parallel import ParallelStrategy
from torch import nn

from strucspars.train.recipe import EngineRecipe, Precision

FABRIC_PRECISION: dict[Precision, Literal["32-true", "bf16-mixed", "16-mixed"]] = {
    "32": "32-true",
    "bf16": "bf16-mixed",
    "16": "16-mixed",
}
# In mixed precision Fabric keeps one flag for all threads that says whether a backward pass is in progress.
BACKWARD_LOCK = threading.Lock()

DEAD_READER = re.compile(r"DataLoader worker \(pid.*?\) (?:is )?(killed by signal: \w+|exited unexpectedly)")
LOST_CONNECTION = re.compile("gloo|NCCL|TCPStore|Connection|Broken pipe")

Model = TypeVar("Model", bound=nn.Module)


def is_one_of_several_processes() -> bool:
    """Whether torchrun has started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


@contextmanager
def lost_processes_explained() -> Iterator[None]:
    """Raise one clear error where torch reports in its own words that a process of this run has died."""
    try:
        yield
    except RuntimeError as error:
        reader = DEAD_READER.search(str(error))
        if reader is not None:
            raise ChildProcessError(
                f"a process that reads images has died ({reader[1]}), perhaps for lack of memory; the same command "
                "resumes from the last checkpoint, and a smaller data.workers needs less memory"
            ) from error
        if is_one_of_several_processes() and LOST_CONNECTION.search(str(error)):
            raise ConnectionError(
                "another process of this run has ended; its own output says why, unless it was killed; start all of "
                "them again with the same command to resume from the last checkpoint"
            ) from error
        raise


@final
class Engine:
    """Where and how a run computes: in one process, or in one of several that torchrun has started."""

    def __init__(self, recipe: EngineRecipe) -> None:
        self.recipe = recipe
        has_gpu = torch.cuda.is_available()
        if recipe.device == "cuda" and not has_gpu:
            raise ValueError("engine.device is cuda, but PyTorch sees no GPU here; use engine.device=auto or cpu")
        on_gpu = has_gpu and recipe.device != "cpu"
        if recipe.precision == "16" and not on_gpu:
            raise ValueError("engine.precision 16 needs a GPU; use bf16 or 32 on a CPU")
        # Shapes stay the same within a run, so cuDNN may look for the fastest algorithm once.
        torch.backends.cudnn.benchmark = on_gpu
        local_processes, processes = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        # Fabric announces its precision and recommends another one.
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            # It asks for srun on every machine that has SLURM installed.
            warnings.filterwarnings("ignore", message=".*srun.*")
            self.fabric = Fabric(
                accelerator="cuda" if on_gpu else "cpu",
                devices=local_processes,
                num_nodes=processes // local_processes,
                strategy="ddp" if processes > 1 else "auto",
                precision=FABRIC_PRECISION[recipe.precision],
                # A single process ignores SLURM and MPI, which may have started a script with several runs.
                plugins=None if processes > 1 else LightningEnvironment(),
            )
            if processes > 1:
                self._check_others_are_started(processes)
            self.fabric.launch()
        self.device = self.fabric.device
        self.rank, self.world_size = self.fabric.global_rank, self.fabric.world_size
        self.is_first = self.fabric.is_global_zero
        self.memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.captures_graphs = recipe.cuda_graph and on_gpu and self.world_size == 1 and recipe.precision != "16"
        self.casts_at_once = self.captures_graphs and recipe.precision == "bf16"

    def _check_others_are_started(self, processes: int) -> None:
        """Refuse a `WORLD_SIZE` that was left in a shell: this process would wait for the others forever."""
        assert isinstance(self.fabric.strategy, ParallelStrategy), "several processes have a parallel strategy"
        # Fabric falls back to its own environment where it sees neither torchrun nor SLURM nor MPI.
        is_fallback = isinstance(self.fabric.strategy.cluster_environment, LightningEnvironment)
        names = os.environ.keys()
        is_started = names >= {"MASTER_ADDR", "MASTER_PORT"} and names & {"LOCAL_RANK", "GROUP_RANK", "NODE_RANK"}
        if is_fallback and not is_started:
            raise ValueError(
                f"WORLD_SIZE is {processes}, but this process was not started with others, for which it would wait "
                "forever; start all with torchrun, or unset WORLD_SIZE to compute in one process"
            )

    def placed(self, model: Model) -> Model:
        """The model on this device, in the layout of the recipe; changed in place."""
        model.to(self.device)
        model.to(memory_format=self.memory_format)
        return model

    def trainable(self, model: nn.Module) -> nn.Module:
        """The model as the training step calls it: compiled, in mixed precision, in step with other processes."""
        if self.recipe.compile:
            model = cast(nn.Module, torch.compile(model))
        return self.fabric.setup_module(model, move_to_device=False)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the loss, scaled where the precision needs it."""
        with nullcontext() if self.recipe.precision == "32" else BACKWARD_LOCK:
            self.fabric.backward(loss)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes; may change `values`."""
        return cast(torch.Tensor, self.fabric.all_reduce(values, reduce_op="sum"))

    def any_true(self, value: bool) -> bool:
        """Whether it is true on any process."""
        return bool(self.summed(torch.tensor(float(value), device=self.device)) > 0)

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, in their order."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def share_buffers_(self, model: nn.Module) -> None:
        """Give all processes the first one's buffers: batch-norm statistics are local until then."""
        if self.world_size > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, src=0)
