from hypothesis import HealthCheck, settings

# The suite runs beside real engines on small machines: how long an example takes says nothing.
settings.register_profile("tierstore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tierstore")
