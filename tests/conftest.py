"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Tests share few cores with other work, where drawing one example may take seconds.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
