"""One rank of a distributed sparse training: `python rank_worker.py RANK WORLD FOLDER`. Run by test_agreement."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.sparsify.agreement import agreed

CONFIG = ss.SparsifyConfig(target=0.4, epochs=6, controller="paper", lambda_step=1e-3, lambda_warmup=1 / 6)


def network(seed: int = 0) -> nn.Sequential:
    """Without batch norm: the mean gradient of two half batches is that of the whole."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()


def train_and_plan(
    rank: int, world: int, config: ss.SparsifyConfig = CONFIG, *, penalty_in_loss: bool = False
) -> tuple[ss.GroupingPlan, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 4, 6, 6, generator=generator, dtype=torch.float64)[rank::world]
    labels = torch.randint(8, (8,), generator=generator)[rank::world]
    model = network()
    sparsifier = ss.Sparsifier(model, config)
    trained = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        for _ in range(3):
            optimizer.zero_grad()
            loss = functional.cross_entropy(trained(images), labels)
            torch.autograd.backward(loss + sparsifier.penalty() if penalty_in_loss else loss)
            if not penalty_in_loss:
                sparsifier.regularize_()
            optimizer.step()
        sparsifier.end_epoch()
    plan = sparsifier.plan()
    ss.convert_(model, plan)
    return plan, dict(model.state_dict())


PROGRESSIVE = replace(CONFIG, epochs=4, schedule="progressive")


def attached(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The weights after the default controller has moved lambda for an attached AdamW."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 4, 6, 6, generator=generator, dtype=torch.float64)[rank::world]
    model = network()
    trained = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    sparsifier = ss.Sparsifier(model, ss.SparsifyConfig(target=0.4, epochs=4)).attach(optimizer)
    for _ in range(4):
        for _ in range(5):
            optimizer.zero_grad()
            torch.autograd.backward(trained(images).square().mean())
            optimizer.step()
        sparsifier.end_epoch()
    return dict(model.state_dict())


def wide_plan() -> ss.GroupingPlan:
    """With a minimum width of groups."""
    sparsifier = ss.Sparsifier(network(), replace(CONFIG, target=0.08, min_channels_per_group=4))
    sparsifier.end_epoch()
    return sparsifier.plan()


def out_of_step(rank: int) -> dict[str, object]:
    """What each rank holds at every stage if it has weights and a lambda of its own."""
    model = network(seed=rank)
    sparsifier = ss.Sparsifier(model, CONFIG)
    state = sparsifier.state_dict()
    held: dict[str, object] = {"first orders": [layer["out_perm"].tolist() for layer in state["layers"].values()]}
    sparsifier.load_state_dict(state | {"controller": {**state["controller"], "lambda_value": 0.5 + rank}})
    sparsifier.end_epoch()
    held["lambda"] = sparsifier.lambda_value
    held["plan"] = sparsifier.plan().to_json()
    held["one-shot plan"] = ss.one_shot_plan(model, CONFIG.target).to_json()
    return held


def lose_broadcast() -> int:
    """A decision that does not reach the others."""
    broadcast, dist.broadcast_object_list = dist.broadcast_object_list, lambda *_, **__: None
    try:
        return agreed(lambda: 0)
    finally:
        dist.broadcast_object_list = broadcast


def refuse_width() -> ss.Sparsifier:
    """A target that the width puts out of reach, found out before any training."""
    return ss.Sparsifier(network(), replace(CONFIG, min_channels_per_group=4))


def refuse() -> int:
    raise ValueError("rank 0 says no")


def fail() -> int:
    return 1 // 0


def main(rank: int, world: int, folder: Path) -> None:
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-point", rank=rank, world_size=world)
    plan, state = train_and_plan(rank, world)
    outcome = {"plan": plan.to_json(), "state": state, "taken": agreed(lambda: rank)}
    outcome["state_by_loss"] = train_and_plan(rank, world, penalty_in_loss=True)[1]
    outcome["attached"] = attached(rank, world)
    progressive_plan, outcome["progressive_state"] = train_and_plan(rank, world, PROGRESSIVE)
    outcome["progressive_plan"] = progressive_plan.to_json()
    outcome["wide_plan"] = wide_plan().to_json()
    outcome["out_of_step"] = out_of_step(rank)
    for kind, failing in (
        ("refusal", lambda: agreed(refuse)),
        ("failure", lambda: agreed(fail)),
        ("refused_width", refuse_width),
        ("lost", lose_broadcast),
    ):
        try:
            failing()
        except (ValueError, ZeroDivisionError, RuntimeError) as error:
            outcome[kind] = f"{type(error).__name__}: {error}"
    torch.save(outcome, folder / f"{rank}-of-{world}.pt")
    if world > 1:
        dist.barrier()
    # Now and then torch's background threads abort the process while things are torn down; the work is done.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
