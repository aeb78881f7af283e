import os

from hypothesis import settings

# No deadline: no test asserts a time. The same examples every time; `make fuzz` draws new ones.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
