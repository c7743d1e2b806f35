"""What a test needs that may not be installed, and how it is run then."""

TORCH = "needs torch: make torch-env, then WITH_TORCH=1 make test"
