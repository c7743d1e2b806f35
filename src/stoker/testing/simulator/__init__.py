"""The lane's simulator: production lane, working set and admission on a virtual clock, seeded.

``trace`` makes the work, ``device_model`` spends its time, ``world`` runs it. See design 0012 for
what is production code here and what is not.
"""
