"""What holds for every floor: tests start from the signals a terminal would give."""

import signal

import pytest

# Whoever starts the test command in the background has it ignore SIGINT, and an ignored signal is
# inherited: every program under test would ignore Ctrl-C too, as it should under nohup.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The contract lives in the package, since anybody's engine is held to it; its assertions explain
# themselves here as those of tests do.
pytest.register_assert_rewrite("stoker.testing.ledger_contract")
