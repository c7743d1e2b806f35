"""The guest runner: what runs programs inside a virtual machine, and the frames it speaks."""
