"""The figure of a sweep: what is kept against milliseconds."""

from matplotlib.figure import Figure

from strucspars.cost.text_table import percent
from strucspars.report.drawing import BLUE, NamedFigure, house_style
from strucspars.train.sweep import DENSE, Sweep

BUDGETS = {"params": "all parameters", "macs": "all MACs", "latency": "the time"}


def sweep_figure(found: Sweep) -> NamedFigure:
    """Top-1 against milliseconds; where nothing was scored, the share of the norm that is kept."""
    scored = [row.deployed.top1 for row in found.rows]
    shares = [row.kept_norm for row in found.rows] if None in scored else [share or 0.0 for share in scored]
    what = "norm kept" if None in scored else "top-1 accuracy"
    labels = [DENSE if row.target is None else f"{100 * row.target:g}%" for row in found.rows]
    with house_style():
        figure = Figure(figsize=(6.0, 3.8), layout="constrained")
        axis = figure.add_subplot()
        places = [(row.deployed.ms, 100 * share) for row, share in zip(found.rows, shares, strict=True)]
        axis.plot(*zip(*sorted(places), strict=True), "o-", color=BLUE)
        for label, place in zip(labels, places, strict=True):
            axis.annotate(label, place, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
        axis.set_xlabel("ms per image, ONNX Runtime, one core")
        axis.set_ylabel(f"{what}, %")
        axis.set_xlim(0, 1.1 * max(ms for ms, _ in places))
        axis.margins(y=0.15)
    points = "; ".join(
        f"{label}: {percent(share)} at {row.deployed.ms:.2f} ms"
        for label, share, row in zip(labels, shares, found.rows, strict=True)
    )
    return NamedFigure(
        name="sweep",
        title=f"{found.network}: {what} against time",
        caption=f"Labels: the fraction of {BUDGETS.get(found.budget, found.budget)} that was to be removed.",
        alt=f"{what} against milliseconds: {points}.",
        figure=figure,
    )
