"""What is wrong with several runs, said once."""

from collections.abc import Mapping, Sequence

NAMED_RUNS = 2


def shared_problems(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for every problem, with the runs that have it; those of many runs are counted.

    Args:
        problems: of every run, by what to call it.

    >>> shared_problems({"first": ["plan.json is damaged"], "second": [], "third": ["plan.json is damaged"]})
    ['first, third: plan.json is damaged']
    """
    runs: dict[str, list[str]] = {}
    for run, sentences in problems.items():
        for sentence in sentences:
            runs.setdefault(sentence, []).append(run)
    return [f"{_named(names)}: {sentence}" for sentence, names in runs.items()]


def _named(runs: Sequence[str]) -> str:
    more = len(runs) - NAMED_RUNS
    return ", ".join(runs[:NAMED_RUNS]) + (f" and {more} more" if more > 0 else "")
