"What every test stands on: one thread a worker, Hypothesis without deadlines, and `proves`."
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')

from hypothesis import HealthCheck, settings

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile('same', deadline=None, derandomize=True, suppress_health_check=slow)
settings.register_profile('explore', deadline=None, max_examples=1000, suppress_health_check=slow)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'same'))
