"""Counts in few characters."""

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


def short_count(count: float) -> str:
    """Three digits and a unit.

    >>> short_count(98_522), short_count(4_089_184_256), short_count(640), short_count(7.5)
    ('98.5K', '4.09G', '640', '7.5')
    """
    for size, unit in UNITS:
        # What rounds up to the next unit is written in it.
        if abs(count) >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"
