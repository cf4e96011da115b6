"""Hypothesis, set for two busy cores: no deadline for one example, no store of earlier failures."""

from hypothesis import HealthCheck, settings

settings.register_profile("bpipe", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bpipe")
