"""What one-shot compression came to, in its run folder: without training there are no metrics that would tell."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from strucspars.core.checks import checked_at_least, checked_fraction, is_number
from strucspars.cost.layers import BeforeAfter
from strucspars.train.outcome import LARGEST
from strucspars.train.run_folder import RunFolder

ONE_SHOT_VERSION = 1
ONE_SHOT_STATE = "one-shot: never trained here, accuracy not measured"
_KEYS = ("classes", "image_shape", "params", "macs", "lost_norm", "seconds")


@dataclass(frozen=True, kw_only=True)
class OneShotOutcome:
    """What one-shot compression came to.

    Attributes:
        classes: outputs of the network.
        image_shape: channels, height and width of the images that MACs were counted with.
        params, macs: of the dense network and of the small one.
        lost_norm: share of the norm of the layers that can be grouped which is gone.
        seconds: that it took, without reading and writing files.
    """

    classes: int
    image_shape: tuple[int, int, int]
    params: BeforeAfter
    macs: BeforeAfter
    lost_norm: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"version": ONE_SHOT_VERSION} | asdict(self)

    @classmethod
    def from_json(cls, values: object) -> "OneShotOutcome":
        """The outcome that `to_json` has written.

        Raises:
            ValueError: it is not one.
        """
        if not isinstance(values, Mapping) or values.get("version") != ONE_SHOT_VERSION:
            raise ValueError(f"not an outcome of version {ONE_SHOT_VERSION}; it was made by another version")
        missing = [key for key in _KEYS if key not in values]
        if missing:
            raise ValueError(f"{', '.join(missing)} is missing")
        return cls(
            classes=_count("classes", values["classes"]),
            image_shape=_image_shape(values["image_shape"]),
            params=_size("params", values["params"]),
            macs=_size("macs", values["macs"]),
            lost_norm=checked_fraction("lost_norm", values["lost_norm"]),
            seconds=_seconds(values["seconds"]),
        )


def read_one_shot(folder: RunFolder) -> OneShotOutcome | None:
    """The outcome in a run folder; None if it is a run of another kind.

    Raises:
        ValueError: the file is damaged; names it.
    """
    path = folder.one_shot_path
    if not path.exists():
        return None
    values = folder.read_json(path)
    try:
        return OneShotOutcome.from_json(values)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _count(key: str, value: Any) -> int:
    count = checked_at_least(key, value, 0)
    if count >= LARGEST:
        raise ValueError(f"{key} must be below {LARGEST:g}, got {count}")
    return count


def _size(key: str, value: Any) -> BeforeAfter:
    if not isinstance(value, Mapping) or set(value) != {"before", "after"}:
        raise ValueError(f"{key} must have a number before and one after")
    return BeforeAfter(_count(f"{key}.before", value["before"]), _count(f"{key}.after", value["after"]))


def _image_shape(value: Any) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("image_shape must be channels, height and width")
    channels, height, width = (_count("image_shape", number) for number in value)
    return channels, height, width


def _seconds(value: Any) -> float:
    if not is_number(value) or not 0 <= value < LARGEST:
        raise ValueError("seconds must be a number from 0 on")
    return float(value)
