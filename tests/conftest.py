"""Settings of the suite: small and deterministic by default, many more cases with ``make thorough``."""

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "quick", derandomize=True, max_examples=25, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("thorough", settings.get_profile("quick"), derandomize=False, max_examples=2000)
settings.register_profile("mutants", settings.get_profile("quick"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("quick")  # pytest --hypothesis-profile=thorough replaces it

collect_ignore_glob = ["backends/*_script.py"]  # programs that tests start, not modules to import
