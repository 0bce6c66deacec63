"""What holds for all tests: no example has a time that it must take."""

from hypothesis import HealthCheck, settings

# On a busy machine any example may take long.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
