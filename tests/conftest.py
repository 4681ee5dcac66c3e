"""What all tests share: the processes that they start keep compiled modules, however pytest itself was started.

Hundreds of them start; one that compiles muster's modules again takes a fourth longer to come up.
"""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine makes one example slow, and that says nothing.
settings.register_profile("muster", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("muster")
