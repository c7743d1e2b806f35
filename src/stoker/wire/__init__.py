"""Frames on local sockets: length, msgpack, request ids. No pickle, no polling.

The room knows nothing of what the messages mean; peers hand it ``msgspec`` types.
"""
