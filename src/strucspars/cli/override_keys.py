"""Which keys of a recipe an override sets, in whatever way it is written."""

import yaml


def override_keys(override: str) -> tuple[str, ...]:
    """The dotted keys that an override sets. What is wrong about it, `read_recipe` says.

    >>> override_keys("stage1.epochs = 3"), override_keys("finetune={teacher: there, form: masked}")
    (('stage1.epochs',), ('finetune.teacher', 'finetune.form'))
    """
    key, _, text = override.partition("=")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    # A recipe has sections with options, and nothing deeper.
    return tuple(f"{key.strip()}.{option}" for option in value) if isinstance(value, dict) else (key.strip(),)
