"""Where the outside world comes in: clocks, entropy, processes, fault points.

Only these modules may import ``time``, ``random``, ``uuid`` or ``subprocess`` (the tidy test holds
the list of exceptions), so that a simulator can own all of them.
"""
