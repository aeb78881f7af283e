import os

from hypothesis import settings

# No deadline: no test asserts a time. In CI the same examples every time; elsewhere new ones.
settings.register_profile("strucspars", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("strucspars")
