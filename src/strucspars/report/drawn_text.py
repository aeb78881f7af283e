"""Texts from run folders, made fit for drawings and file names."""

import re
import unicodedata

from strucspars.measure.text_table import shortened

LONGEST_SLUG = 60


def drawable(text: str, width: int = 40) -> str:
    """The text in one line of at most `width` characters, without what XML cannot hold.

    >>> drawable("layer1" + chr(27) + ".conv")
    'layer1?.conv'
    """
    plain = "".join("?" if unicodedata.category(letter)[0] == "C" else letter for letter in text)
    return shortened(plain, width)


def slug(text: str) -> str:
    """The text as part of a file name.

    >>> slug("layer1.0/Conv <b>"), slug("..")
    ('layer1-0-conv-b', 'unnamed')
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_SLUG].strip("-") or "unnamed"
