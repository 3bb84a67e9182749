"""Nothing here may depend on how fast the machine is: examples have no deadline, and may be slow to make."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kvlease", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvlease")
