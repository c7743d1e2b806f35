"""Boxes that are virtual machines, as the host sees them: the link to a guest, and the box."""
