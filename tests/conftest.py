"""What holds for all tests: no example of a property test fails because the machine is busy."""

from hypothesis import settings

settings.register_profile("kvlease", deadline=None)
settings.load_profile("kvlease")
