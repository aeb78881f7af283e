"""Image files as 8-bit colour pictures, so that a network sees what a viewer shows, but never turned by EXIF."""

import numpy as np
from PIL import Image

# Of these Pillow gives 16-bit grey as 32-bit numbers in 0 .. 65535: of PGM always, of PNG in older versions.
FORMATS_WITHOUT_32_BIT = ("PNG", "PPM")


def read_image(path: str) -> Image.Image:
    """The image in a file, in 8-bit RGB. 16-bit grey is scaled by its whole range: 65535 becomes 255.

    Raises:
        ValueError: the pixels have no fixed range.
        Exception: of almost any type, where the file is damaged.
    """
    with Image.open(path) as image:
        return in_8_bits(image).convert("RGB")


def in_8_bits(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bit, where Pillow would clip it at 255; images of 8 bit as they are.

    Raises:
        ValueError: the pixels are 32-bit numbers, of which nobody knows what is white.

    >>> in_8_bits(Image.fromarray(np.array([[0, 255, 32768, 65535]], dtype=np.uint16))).tobytes()
    b'\\x00\\x01\\x80\\xff'
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in FORMATS_WITHOUT_32_BIT):
        # Rounded: 257 is odd, so nothing lies halfway.
        return Image.fromarray(((np.asarray(image).astype(np.int32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its 32-bit pixels (Pillow's mode {image.mode}) have no fixed range, and must be converted to 8 or 16 bit"
        )
    return image
