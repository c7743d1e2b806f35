"""What holds for every floor: tests start from the signals a terminal would give."""

import signal

# Whoever starts the test command in the background has it ignore SIGINT, and an ignored signal is
# inherited: every program under test would ignore Ctrl-C too, as it should under nohup.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
