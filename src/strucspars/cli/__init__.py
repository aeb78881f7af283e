"""The command line: parse, call, print. A file per command; `summary` and `report` share one.

Commands import what they call when they are called, so that help and completion do not wait for the training's imports.
"""

# Modules that the extra `cli` installs.
EXTRA = "PIL jinja2 lightning_fabric matplotlib rich sklearn tensorboard torchvision typer yaml"


def missing_extra(error: ImportError) -> str | None:
    """What to install if a module of the extra is missing; None for other errors."""
    package = (error.name or "").partition(".")[0]
    is_missing = isinstance(error, ModuleNotFoundError) and package in EXTRA.split()
    return f"{package} is missing: pip install 'strucspars[cli]'" if is_missing else None
