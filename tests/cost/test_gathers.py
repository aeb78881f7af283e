"""The report of a folded graph."""

import pytest
import torch
from torch import fx, nn

import strucspars as ss
from strucspars.cost.counting import BeforeAfter
from strucspars.cost.gathers import FoldReport, RemainingGather, WidenedLayer


def test_all_that_is_left_is_said() -> None:
    report = FoldReport(
        gathers=(
            RemainingGather(layer="", side="input", channels=1024, runs=1000, nbytes=4096),
            RemainingGather(layer="conv", side="output", channels=8, runs=2, nbytes=32),
        ),
        num_kept_batch_norms=3,
        untraced_reason="it has a loop",
        widened=(
            WidenedLayer(layer="", groups=BeforeAfter(8, 2)),
            WidenedLayer(layer="conv", groups=BeforeAfter(16, 4)),
        ),
    )
    assert str(report).splitlines() == [
        "layer    gather  channels   runs  bytes",
        "---------------------------------------",
        "(model)  input      1,024  1,000  4,096",
        "conv     output         8      2     32",
        "2 gathers remain, 4,128 bytes",
        "",
        "layer     groups",
        "----------------",
        "(model)   8 -> 2",
        "conv     16 -> 4",
        "2 layers run with wider groups",
        "3 batch norms follow no layer that could take them in",
        "not traced, so that every shuffle and batch norm stays: it has a loop",
    ]


def test_a_graph_of_somebody_else_is_a_network_like_any() -> None:
    model, images = nn.Sequential(nn.Conv2d(4, 4, 1)), torch.zeros(1, 4, 3, 3)
    assert ss.summary(fx.symbolic_trace(model), images) == ss.summary(model, images)


@pytest.mark.parametrize("is_traceable", [True, False])
def test_a_summary_in_training_leaves_the_statistics_of_kept_batch_norms(is_traceable: bool) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)
            self.layer = ss.ShuffledGroupConv2d(4, 4, 3, padding=1, groups=2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.layer(self.norm(images))
            return output if is_traceable or output.mean() > 0 else -output

    images = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    folded = ss.fold(Network(), images).train()
    assert ss.fold_report(folded).num_kept_batch_norms == 1
    before = {name: tensor.clone() for name, tensor in folded.state_dict().items()}
    ss.summary(folded, images)
    torch.testing.assert_close(dict(folded.state_dict()), before, rtol=0, atol=0)
    assert folded.training
