"""The coordinator: ready set, inference lane, admission, program hosts, outcomes."""
