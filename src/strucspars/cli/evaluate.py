"""`strucspars eval`: the saved network of a finished run on its test images."""

from pathlib import Path
from typing import Annotated

import typer

from strucspars.cli.options import Debug, Json, examples
from strucspars.cli.output import Output

EXAMPLES = examples(
    "strucspars eval runs/demo",
    "strucspars eval runs/cifar10-resnet56-60 data.root=/elsewhere/cifar10 engine.device=cpu",
)


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a finished run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Changes to the recipe, such as engine.device=cpu.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate the saved network of a finished run again. Only data.* and engine.* can be changed.

    Where the network is a function of your own, name it again: model.name=package.module:function.
    """
    from strucspars.cli.run_evaluation import evaluated_run

    done = evaluated_run(folder, overrides or [])
    Output(as_json=as_json).outcome(done.text(), done.document())
