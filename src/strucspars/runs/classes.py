"""Which class each output of a run's network stands for, where the data name their classes.

Without it, images of other classes, or of the same in another order, would be taken for those that a network was
trained on: labels are numbers.
"""

import json
from collections.abc import Sequence
from itertools import zip_longest

from strucspars.runs.atomic import write_text_atomic
from strucspars.runs.folder import RunFolder


def store_classes(folder: RunFolder, classes: Sequence[str] | None) -> None:
    """Write the names down, in the order of the outputs; None for data whose classes are fixed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     store_classes(RunFolder(place), ["cat", "dog"])
    ...     stored_classes(RunFolder(place))
    ('cat', 'dog')
    """
    if classes is None:
        # Of an attempt that came to nothing, with other data.
        folder.classes_path.unlink(missing_ok=True)
        return
    # Escaped: a folder's name is bytes, and need not be UTF-8.
    write_text_atomic(folder.classes_path, json.dumps(list(classes), indent=2) + "\n")


def stored_classes(folder: RunFolder) -> tuple[str, ...] | None:
    """The names in the order of the outputs; None where none are stored.

    Raises:
        ValueError: the file is damaged; names it.
    """
    names = folder.read_json(folder.classes_path)
    if names is None and not folder.classes_path.exists():
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder.classes_path} must hold a list of class names; restore it from a copy or delete it")
    return tuple(names)


def check_same_classes(folder: RunFolder, classes: Sequence[str] | None, *, data: str) -> None:
    """Refuse data whose classes are not those of a run. Where either names none, there is nothing to compare.

    Args:
        folder: of the run.
        classes: of the data.
        data: what to call them.

    Raises:
        ValueError: the classes differ; names the first that does.
    """
    stored = stored_classes(folder)
    if stored is None or classes is None:
        return
    for output, (before, now) in enumerate(zip_longest(stored, classes)):
        if before != now:
            raise ValueError(
                f"the run in {folder.path} has other classes than {data}: output {output} means {_named(before)} in "
                f"the run, {_named(now)} in the data; give the data of that run. Where only names have changed, and "
                f"not the order of the classes, delete {folder.classes_path}"
            )


def _named(name: str | None) -> str:
    return "no class" if name is None else repr(name)
