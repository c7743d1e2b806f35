"""What holds for every floor: signals as a terminal gives them, and no test judged by its speed."""

import signal
from contextlib import suppress

import pytest

# A loaded machine makes examples slow, and says nothing of what is tried. All else, such as the
# fixed examples of an automated run, stays as Hypothesis has it. The hosts of rigs have none of it.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any speed")

# Whoever starts the test command in the background has it ignore SIGINT, and an ignored signal is
# inherited: every program under test would ignore Ctrl-C too, as it should under nohup.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The contract lives in the package, since anybody's engine is held to it; its assertions explain
# themselves here as those of tests do.
pytest.register_assert_rewrite("stoker.testing.ledger_contract")
